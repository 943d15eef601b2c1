"""Postgres' programs are copied to where its account can run them: once, whole, whoever else does so at the same time."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compose.embedded import programs
from compose.embedded.programs import LEFT_S, abandoned


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    install = tmp_path / "site" / "package" / "install"
    for name in ("bin/postgres", "lib/libpq.so", "include/pg.h"):
        (install / name).parent.mkdir(parents=True, exist_ok=True)
        (install / name).write_text(name)
    (tmp_path / "home").mkdir()
    return install


def files(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())


WHOLE = ["package/install/bin/postgres", "package/install/lib/libpq.so", "wheel"]


def test_several_at_once_make_one_whole_copy(tmp_path: Path, wheel: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from compose.embedded import programs\n"
        "install, copied = map(Path, sys.argv[1:]); sys.stdin.read(); programs._copy(install.parent, install, copied)"
    )
    argv = [sys.executable, "-c", script, str(wheel), str(tmp_path / "home" / "install-1")]
    makers = [subprocess.Popen(argv, stdin=subprocess.PIPE) for _ in range(4)]
    for maker in makers:
        assert maker.stdin is not None
        maker.stdin.close()
    assert [maker.wait(60) for maker in makers] == [0] * 4
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["install-1"]
    assert files(tmp_path / "home" / "install-1") == WHOLE


def test_one_that_was_made_meanwhile_is_used(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied, rename = tmp_path / "home" / "install-1", Path.rename

    def after_another(fresh: Path, target: Path) -> Path:
        (copied / "theirs").mkdir(parents=True)
        return rename(fresh, target)

    monkeypatch.setattr(Path, "rename", after_another)
    programs._copy(wheel.parent, wheel, copied)
    assert [path.name for path in copied.parent.iterdir()] == ["install-1"]
    assert (copied / "theirs").is_dir()


def test_what_a_killed_one_has_left_goes_and_what_is_being_made_stays(tmp_path: Path, wheel: Path) -> None:
    old, young = (tmp_path / "home" / name for name in ("install-0.7", "install-0.8"))
    for left in (old, young):
        left.mkdir()
    now = old.stat().st_mtime
    os.utime(old, (now, now - LEFT_S - 60))
    programs._copy(wheel.parent, wheel, tmp_path / "home" / "install-1")
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["install-0.8", "install-1"]


def test_a_copy_is_abandoned_once_its_wheel_is_gone(tmp_path: Path, wheel: Path) -> None:
    copied = tmp_path / "home" / "install-1"
    programs._copy(wheel.parent, wheel, copied)
    assert abandoned(tmp_path / "home") == []
    shutil.rmtree(wheel)
    assert abandoned(tmp_path / "home") == [copied]
