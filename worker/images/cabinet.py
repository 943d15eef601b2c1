"""The images of one node, as its worker sees them: which may be used, why one may not, and what is told to the plane."""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from controlplane.commands import (
    ImageFound,
    ReportImageBuilt,
    ReportImageFailed,
    ReportImageRefused,
    ReportImageRemoved,
)  # fmt: skip
from worker import namespaces
from worker.images import criu, facts
from worker.images.budget import Budget
from worker.images.criu import Criu
from worker.images.fingerprint import Fingerprint, Refusal, changed_file, difference
from worker.images.manifest import ImageBroken, Manifest
from worker.images.store import Store
from worker.report import OfImage

log = structlog.get_logger("images")


class Cabinet:
    """`hindrance`: why engines can't be saved here; empty: they can. Its methods block; call them in a thread.

    Reports go out in the loop in which it was made.
    """

    def __init__(
        self, data: Path, node: str, report: Callable[[OfImage], None], found: Criu | None, quota_bytes: int = 0
    ) -> None:
        self.store = Store(data / "images")
        self._node = node
        facts.our_code()  # before anybody can have put other files there
        loop = asyncio.get_running_loop()
        self._report: Callable[[OfImage], None] = lambda body: _soon(loop, report, body)
        self.apart = namespaces.possible() is None
        self.criu = found or Criu("", "", "CRIU was not found")
        self.hindrance = self.criu.refusal or ("" if os.geteuid() == 0 else "CRIU needs root")
        self._turn = threading.RLock()
        """Of whoever changes what there is and tells the plane of it: in one order, on the disk and in the reports."""
        self._told: set[tuple[str, str]] = set()
        self.budget = Budget(self.store, quota_bytes, lambda manifest: self._refusal(manifest) is None)
        self._judged: list[Callable[[], None]] = []
        self._writing = weakref.WeakValueDictionary[str, asyncio.Lock]()

    @staticmethod
    def open(data: Path, node: str, report: Callable[[OfImage], None], given: str = "", quota_bytes: int = 0) -> "Cabinet":
        """Look for CRIU, let it check the kernel, remove what was half written."""
        path = criu.find(data, given)
        cabinet = Cabinet(data, node, report, criu.probe(path) if path else None, quota_bytes)
        for name in cabinet.store.sweep():
            log.warning("half_written_image_swept", name=name)
        return cabinet

    def found(self) -> tuple[ImageFound, ...]:
        """What is on disk, for the hello; why some may not be used is told by `begin`, after it."""
        shown = []
        for image in self.store.images():
            try:
                manifest = self.store.read(image)
            except ImageBroken as broken:
                log.warning("image_broken", image=image, code=broken.code, message=broken.message)
                continue
            if self.store.standing(image).failed:
                continue
            refusal = self._refusal(manifest)
            usable = refusal is None and not self.hindrance
            configuration, size = manifest.fingerprint.configuration, manifest.size_bytes
            shown.append(ImageFound(image, configuration, size, usable, manifest.zero_bytes))
            if refusal is not None:
                self._judged.append(lambda manifest=manifest, refusal=refusal: self._refuse(manifest, refusal))  # type: ignore[misc]
        return tuple(shown)

    def begin(self) -> None:
        """After the hello."""
        for judged in self._judged:
            judged()
        self._judged.clear()

    def fingerprint(self, configuration: str, engine: str) -> Fingerprint:
        """Of an engine of that configuration, as it would be started here and now."""
        return facts.fingerprint(configuration, engine, self._node, self.criu, apart=self.apart)

    def started(self, configuration: str, engine: str) -> Fingerprint:
        """Of an engine that is about to be started, by the files that it will read."""
        code = facts.code_on_disk()
        return facts.fingerprint(configuration, engine, self._node, self.criu, apart=self.apart, code=code)

    def writing(self, image: str) -> asyncio.Lock:
        """Held by whoever writes that image: all its drafts have one name."""
        return self._writing.setdefault(image, asyncio.Lock())

    def find(self, configuration: str, engine: str) -> Manifest | None:
        """An image that may be restored; None: there is none, and if there is one that may not be used, the plane was told."""
        if self.hindrance:
            return None
        now = self.fingerprint(configuration, engine)
        image = now.image
        if not self.store.path(image).is_dir():
            self._refuse_others(configuration)
            return None
        if self.store.standing(image).failed:
            return None
        try:
            manifest = self.store.read(image)
        except ImageBroken as broken:
            self.fail(image, configuration, "verify", broken.code, broken.message, final=True)
            return None
        if (refusal := self._refusal(manifest, now)) is not None:
            self._refuse(manifest, refusal)
            return None
        return manifest

    def publish(self, manifest: Manifest) -> Manifest:
        """Make the draft the image, tell the plane, remove those that it replaces, keep to the quota.

        Raises OSError: it is not the image.
        """
        with self._turn:
            whole = self.store.publish(manifest)
            self._told = {told for told in self._told if told[0] != whole.image}
            self._report(
                ReportImageBuilt(
                    node=self._node, image=whole.image, configuration=whole.fingerprint.configuration,
                    size_bytes=whole.size_bytes, zero_bytes=whole.zero_bytes, took_ms=whole.took_ms, proof=whole.proof,
                    fingerprint=msgspec.structs.asdict(whole.fingerprint),
                )
            )  # fmt: skip
        try:
            for old in self._stale(whole):
                self.remove(old, "replaced")
            self.collect(keep=frozenset({whole.image}))
        except OSError as error:  # this one is there, and told; the next one tries again
            log.warning("others_not_removed", image=whole.image, reason=str(error))
        return whole

    def _stale(self, fresh: Manifest) -> list[str]:
        """Older images of its configuration, which can't be used any more."""
        found = []
        for image in self.store.images():
            try:
                manifest = self.store.read(image)
            except ImageBroken:
                continue  # removed at the next start
            mine = manifest.fingerprint.configuration == fresh.fingerprint.configuration
            if mine and image != fresh.image and self._refusal(manifest) is not None:
                found.append(image)
        return found

    def fail(self, image: str, configuration: str, step: str, code: str, message: str, *, final: bool = False) -> None:
        """Count a failure of a restore; the one that is too many is told, and the image is left alone until somebody acts.

        One that was removed meanwhile has not failed: the plane would know it again, and have no other made.
        """
        with self._turn:
            if step != "build" and not self.store.path(image).is_dir():
                log.info("image_gone", image=image, step=step, code=code, message=message)
                return
            standing = self.store.failed(image, code, message, final=final)
            log.warning("image_failure", image=image, step=step, code=code, message=message, failures=standing.failures)
            if standing.failed or final:
                self._report(
                    ReportImageFailed(
                        node=self._node, image=image, configuration=configuration, step=step, code=code, message=message
                    )
                )

    def remove(self, image: str, code: str = "operator") -> None:
        with self._turn:
            self.forget(image)
            self._report(ReportImageRemoved(node=self._node, image=image, code=code))

    def forget(self, image: str) -> None:
        """Remove it without a word: the plane knows."""
        with self._turn:
            self.store.remove(image)
            self._told = {told for told in self._told if told[0] != image}

    def collect(self, *, keep: frozenset[str] = frozenset()) -> list[str]:
        """Remove what is over the quota, least valuable first; names of what went."""
        gone = self.budget.surplus(keep=keep)
        for image in gone:
            self.remove(image, "quota")
        return gone

    def make_room(self, need_bytes: int) -> None:
        """Before an image of about that size is written: others go for it. Raises NoRoom, and nothing is removed then."""
        for image in self.budget.room_for(need_bytes):
            self.remove(image, "quota")

    def verify(self, image: str) -> Manifest:
        """Compare an image with its digests and with today's facts. Raises ImageBroken (a refusal has its own code)."""
        manifest = self.store.read(image)
        self.store.verify(manifest)
        if (refusal := self._refusal(manifest)) is not None:
            raise ImageBroken(refusal.code, str(refusal))
        return manifest

    def _refusal(self, manifest: Manifest, now: Fingerprint | None = None) -> Refusal | None:
        """`now`: of the engine that it is wanted for; without it, of one like that which it was made of."""
        made = manifest.fingerprint
        now = now or self.fingerprint(made.configuration, made.engine.partition(" ")[0])
        if (refusal := difference(made, now)) is not None:
            return refusal
        return changed_file(manifest.mapped, tuple(facts.mapped_file(file.path) for file in manifest.mapped))

    def _refuse_others(self, configuration: str) -> None:
        for image in self.store.images():
            try:
                manifest = self.store.read(image)
            except ImageBroken:
                continue  # removed at the next start
            if manifest.fingerprint.configuration == configuration and (refusal := self._refusal(manifest)) is not None:
                self._refuse(manifest, refusal)

    def _refuse(self, manifest: Manifest, refusal: Refusal) -> None:
        with self._turn:
            if (manifest.image, refusal.code) in self._told:
                return
            self._told.add((manifest.image, refusal.code))
            configuration = manifest.fingerprint.configuration
            log.warning("image_refused", image=manifest.image, code=refusal.code, was=refusal.was, now=refusal.now)
            self._report(
                ReportImageRefused(
                    node=self._node, image=manifest.image, configuration=configuration, code=refusal.code, message=str(refusal)
                )
            )


def _soon(loop: asyncio.AbstractEventLoop, report: Callable[[OfImage], None], body: OfImage) -> None:
    loop.call_soon_threadsafe(report, body)
