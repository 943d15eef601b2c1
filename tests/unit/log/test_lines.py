"""Logs of processes: a line that can't be written is lost, and nothing else."""

import os
from pathlib import Path

from controlplane.logs import Lines


def test_lines_go_straight_to_the_file(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        lines = Lines(file.fileno())
        lines.write('{"event": "é"}\n')
        lines.write("half \udc80\n")
        assert (tmp_path / "log").read_bytes() == '{"event": "é"}\nhalf \\udc80\n'.encode()


def test_a_full_disk_ends_no_process() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        Lines(full).write("lost\n")
    finally:
        os.close(full)
    Lines(full).write("nor does a file that is gone\n")
