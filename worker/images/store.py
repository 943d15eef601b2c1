"""The image directory of a node, `DIR/images/`: one directory per image, its manifest written last.

A directory without a manifest is half-written and removed at the next start. What is in it is process memory: 0700.
"""

import contextlib
import itertools
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
import structlog
from msgspec.structs import replace

from worker.filedigest import taken_bytes
from worker.images import writeback
from worker.images.exchange import exchange
from worker.images.manifest import MANIFEST, File, Manifest, described, read, verify

DRAFT: Final = ".draft"
ASIDE: Final = f".aside{DRAFT}"
"""An image that another is about to replace, where a disk can't exchange the two."""
TRIES: Final = 2
"""Restores of one image that may fail before it counts as failed: a first one may have met a busy machine."""
SYNCS: Final = 16
"""Files whose way to the disk is waited for at once."""
_LOGS: Final = ("dump.log", "stats-dump", "stats-restore", "restore.log")
_removals = itertools.count(1)

log = structlog.get_logger("images")


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """`standing.json` beside the manifest: what has happened to the image since."""

    used_ms: int = 0
    uses: int = 0
    failures: int = 0
    failed: str = ""
    """Code, once it may not be used any more until an operator acts."""
    message: str = ""


class Store:
    """`root` is `DIR/images`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._standings = threading.Lock()
        """Of whoever changes one: several instances may come back from an image at once."""

    def sweep(self) -> list[str]:
        """At a worker's start: remove what was half written, as far as the disk lets it; names of what was found.

        An image that was put aside for one that never took its place is put back.
        """
        if not self.root.is_dir():
            return []
        for aside in self.root.glob(f"*{ASIDE}"):
            image = self.root / aside.name.removesuffix(ASIDE)
            if (aside / MANIFEST).is_file() and not image.exists():
                with contextlib.suppress(OSError):  # as below
                    aside.rename(image)
        left = [path for path in self.root.iterdir() if path.name.endswith(DRAFT) or not (path / MANIFEST).is_file()]
        for path in left:
            shutil.rmtree(path, ignore_errors=True)  # a worker starts without its images rather than not at all
        return [path.name for path in left]

    def draft(self, image: str) -> Path:
        """An empty directory to write an image to."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.root / f"{image}{DRAFT}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700)
        return path

    def sync(self, image: str) -> None:
        """All of a draft to disk; others may read it meanwhile (its proof does). Raises OSError.

        An engine of many threads has a file for each. So that they don't wait for the disk one after another, all are begun
        before the first is waited for, and several are waited for at once.
        """
        files = self._drafted(image)
        for path in files:
            writeback.begin(path)
        with ThreadPoolExecutor(SYNCS, "image-sync") as waiting:
            for synced in [waiting.submit(_fsync, path) for path in files]:
                synced.result()

    def describe(self, image: str) -> tuple[File, ...]:
        """The files of a draft, with their digests. Raises OSError."""
        return tuple(described(path) for path in self._drafted(image))

    def _drafted(self, image: str) -> list[Path]:
        return sorted(path for path in (self.root / f"{image}{DRAFT}").iterdir() if path.name not in _LOGS)

    def publish(self, manifest: Manifest) -> Manifest:
        """Make a draft the image: described and synced, unless it is (`files`), then the manifest, then its name.

        Raises OSError.
        """
        draft, final = self.root / f"{manifest.image}{DRAFT}", self.root / manifest.image
        for name in _LOGS:
            (draft / name).unlink(missing_ok=True)
        whole = manifest
        if not manifest.files:
            whole = replace(manifest, files=self.describe(manifest.image))
            self.sync(manifest.image)
        (draft / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(whole)))
        _fsync(draft / MANIFEST)
        _fsync(draft)
        old = self._replace(draft, final)
        _fsync(self.root)
        if old is not None:  # not before the disk has the new one under its name
            shutil.rmtree(old, ignore_errors=True)
        return whole

    def _replace(self, draft: Path, final: Path) -> Path | None:
        """Give a draft its name; at every moment the old image or the new one can be found. Where the old one is now."""
        aside = self.root / f"{final.name}{ASIDE}"
        try:
            if exchange(draft, final):
                return draft
            shutil.rmtree(aside, ignore_errors=True)
            final.rename(aside)
        except FileNotFoundError:  # there is none, or it was removed just now
            draft.rename(final)
            return None
        try:
            draft.rename(final)
        except OSError:
            aside.rename(final)
            raise
        return aside

    def discard(self, image: str) -> None:
        """Remove a draft."""
        shutil.rmtree(self.root / f"{image}{DRAFT}", ignore_errors=True)

    def images(self) -> Iterator[str]:
        """Names of all images, broken ones included."""
        if self.root.is_dir():
            yield from sorted(path.name for path in self.root.iterdir() if path.is_dir() and not path.name.endswith(DRAFT))

    def read(self, image: str) -> Manifest:
        """Raises ImageBroken (`manifest_missing`, `manifest_broken`, `image_unreadable`)."""
        return read(self.root / image)

    def verify(self, manifest: Manifest, *, memory: bool | None = None) -> None:
        """Compare files with their digests, as `manifest.verify`. Raises ImageBroken (`image_truncated`, `image_corrupt`,
        `image_unreadable`)."""
        verify(self.root / manifest.image, manifest, memory=memory)

    def path(self, image: str) -> Path:
        return self.root / image

    def standing(self, image: str) -> Standing:
        try:
            return msgspec.json.decode((self.root / image / "standing.json").read_bytes(), type=Standing)
        except FileNotFoundError:
            return Standing()
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("standing_unreadable", image=image, reason=str(error))
            return Standing()  # as if it had never been used: what is wrong with it is found out again

    def used(self, image: str) -> None:
        with self._standings:
            known = self.standing(image)
            self._stand(image, replace(known, used_ms=time.time_ns() // 1_000_000, uses=known.uses + 1, failures=0))

    def failed(self, image: str, code: str, message: str, *, final: bool = False) -> Standing:
        """Count a failure; the second (or a final one) makes the image a failed one."""
        with self._standings:
            known = self.standing(image)
            count = known.failures + 1
            given_up = code if final or count >= TRIES else known.failed
            return self._stand(image, replace(known, failures=count, failed=given_up, message=message))

    def remove(self, image: str) -> None:
        """Take its name away first, so that nobody sees half of it. Raises OSError, and the image is as it was.

        What can't be removed once the name is gone is swept at the next start. Two threads may remove one image at once.
        """
        gone = self.root / f"{image}.{next(_removals)}.gone{DRAFT}"
        try:
            (self.root / image).rename(gone)
        except FileNotFoundError:
            return
        shutil.rmtree(gone, ignore_errors=True)

    def size_bytes(self, image: str) -> int:
        """What it takes of the disk, whatever its manifest says."""
        return taken_bytes(self.root / image)

    def _stand(self, image: str, standing: Standing) -> Standing:
        path = self.root / image / "standing.json"
        draft = path.with_suffix(".new")
        try:
            draft.write_bytes(msgspec.json.encode(standing))
            draft.replace(path)
        except FileNotFoundError:
            pass  # the image is gone, and its history with it
        except OSError as error:  # the disk is full, say: no reason to give up an engine that has come back from there
            log.warning("standing_not_kept", image=image, reason=str(error))
        return standing


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
