"""`compose/install-criu`: what it says of wrong usage, before it looks for anything."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "compose" / "install-criu"


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, timeout=20, check=False)


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_is_no_place_to_install_to(option: str) -> None:
    done = run(option)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: ")


@pytest.mark.parametrize("arguments", [["--target"], ["-x"], ["relative"], [""], ["/"], ["/a", "/b"]])
def test_wrong_usage_is_said(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "Usage: " in done.stderr


def test_a_directory_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("")
    done = run(str(tmp_path))
    assert (done.returncode, "holds something else" in done.stderr) == (2, True)
    assert (tmp_path / "kept").exists()
