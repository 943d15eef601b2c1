"""The harness removes what interrupted test runs have left, and nothing else."""

import os
import subprocess
import time
from pathlib import Path

from tests.leftovers import ABANDONED_S, KEPT_S, keep, sweep


def made(place: Path, pid: int, word: str, age_s: float, *, kept: bool = False) -> Path:
    path = place / f"eh-{pid}-{word}"
    (path / "run").mkdir(parents=True)
    if kept:
        keep(path)
    os.utime(path, (then := time.time() - age_s, then))
    return path


def test_only_what_is_old_and_nobodys_goes(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    old = made(tmp_path, ended.pid, "0000000a", 2 * ABANDONED_S)
    read = made(tmp_path, ended.pid, "0000000b", 2 * KEPT_S, kept=True)
    young = made(tmp_path, ended.pid, "0000000f", ABANDONED_S / 2)
    kept = made(tmp_path, ended.pid, "00000010", KEPT_S / 2, kept=True)
    used = made(tmp_path, os.getpid(), "0000000c", 2 * KEPT_S)
    other = made(tmp_path, ended.pid, "no-pids", 2 * KEPT_S).rename(tmp_path / "eh-word-0000000d")
    link = tmp_path / f"eh-{ended.pid}-0000000e"
    link.symlink_to(other)
    assert sorted(sweep(tmp_path)) == sorted([old, read])
    assert sorted(tmp_path.iterdir()) == sorted([young, kept, used, other, link])
