"""The data directory: privacy, lock, secrets, device UUIDs."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from compose.directory import Directory, holder
from compose.refusal import EnvironmentRefusal


@pytest.fixture
def short() -> Iterator[Path]:
    """pytest's own paths are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="eh-", dir="/tmp") as path:
        yield Path(path)


def test_it_is_private(short: Path) -> None:
    with Directory.open(short / "a" / "d") as directory:
        assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
        directory.secret("one")
        assert stat.S_IMODE((directory.path / "secrets" / "one").stat().st_mode) == 0o600


def test_a_second_up_is_refused_and_told_who_holds_it(short: Path) -> None:
    with Directory.open(short / "d"):
        with pytest.raises(EnvironmentRefusal) as caught:
            Directory.open(short / "d")
        assert caught.value.code == "held"
        assert f"pid {os.getpid()} since" in caught.value.message
        held = holder(short / "d")
        assert held is not None and held.process.pid == os.getpid()
    Directory.open(short / "d").close()


def test_the_lock_goes_with_the_process(short: Path) -> None:
    code = (
        "import os\nfrom pathlib import Path\nfrom compose.directory import Directory\n"
        f"Directory.open(Path({str(short / 'd')!r}))\nos.abort()"
    )
    died = subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL, check=False)
    assert died.returncode < 0
    assert holder(short / "d") is None
    Directory.open(short / "d").close()


def test_a_path_that_leaves_no_room_for_sockets_is_refused(short: Path) -> None:
    with pytest.raises(EnvironmentRefusal) as caught:
        Directory.open(short / ("x" * 80))
    assert caught.value.code == "path_too_long"


def test_a_path_that_cannot_be_made_is_refused(short: Path) -> None:
    (short / "file").touch()
    with pytest.raises(EnvironmentRefusal, match="can't be made"):
        Directory.open(short / "file" / "d")


def test_a_directory_of_others_is_refused_and_stays_open_to_them(short: Path) -> None:
    """`up --data /tmp`, or a home: making it private would lock everybody out of it."""
    shared = short / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    (shared / "a file").touch()
    with pytest.raises(EnvironmentRefusal, match="open to others"):
        Directory.open(shared)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o755
    (shared / "a file").unlink()
    Directory.open(shared).close()
    shared.chmod(0o755)
    Directory.open(shared).close()
    assert stat.S_IMODE(shared.stat().st_mode) == 0o700


def test_a_full_disk_is_refused(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compose.directory.ROOM_BYTES", 1 << 60)
    with pytest.raises(EnvironmentRefusal) as caught:
        Directory.open(short / "d")
    assert caught.value.code == "disk_full"


def test_a_secret_that_a_crash_left_empty_is_made_anew(short: Path) -> None:
    """With an empty node token or cookie key, anybody on the machine could make a valid one."""
    with Directory.open(short / "d") as directory:
        (directory.path / "secrets" / "key").write_text("\n")
        made = directory.secret("key")
        assert len(made) > 40
        assert directory.secret("key") == made
        assert [path.name for path in (directory.path / "secrets").iterdir()] == ["key"]


def test_secrets_and_device_uuids_stay(short: Path) -> None:
    with Directory.open(short / "d") as directory:
        first = directory.secret("key"), directory.device_uuid("cpu0"), directory.device_uuid("cpu1")
    with Directory.open(short / "d") as directory:
        assert (directory.secret("key"), directory.device_uuid("cpu0"), directory.device_uuid("cpu1")) == first
    assert len(set(first)) == 3
