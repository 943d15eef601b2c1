"""The directory of an instance."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from worker import instancedir, processes
from worker.instancedir import InstanceDir


def test_a_record_survives_and_is_private(tmp_path: Path) -> None:
    directory = InstanceDir(tmp_path / "inst", "ins_1")
    directory.create("cfg_1")
    directory.edit(port=4711)
    directory.edit(woken=("m", 1))
    record = directory.read()
    assert record is not None
    assert (record.configuration, record.port, record.woken) == ("cfg_1", 4711, ("m", 1))
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory.path / "instance.json").stat().st_mode) == 0o600
    assert [found.instance for found in instancedir.listing(tmp_path / "inst")] == ["ins_1"]


def test_creating_again_keeps_what_is_there(tmp_path: Path) -> None:
    directory = InstanceDir(tmp_path, "ins_1")
    directory.create("cfg_1")
    directory.edit(port=1)
    assert directory.create("cfg_1").port == 1


def test_two_writers_do_not_lose_each_others_fields(tmp_path: Path) -> None:
    directory = InstanceDir(tmp_path, "ins_1")
    directory.create("cfg_1")
    program = (
        "import sys; from pathlib import Path; from worker.instancedir import InstanceDir\n"
        "d = InstanceDir(Path(sys.argv[1]), 'ins_1')\n"
        "for n in range(200): d.edit(port=n)"
    )
    other = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    for number in range(200):
        directory.edit(skeleton_bytes=number)
    assert other.wait(30) == 0
    record = directory.read()
    assert record is not None
    assert (record.port, record.skeleton_bytes) == (199, 199)


@pytest.mark.parametrize("left", [b"", b"\0" * 64, b'{"instance": "ins_1"'])
def test_what_a_power_cut_left_of_a_record_is_no_record(tmp_path: Path, left: bytes) -> None:
    """Nothing is synced, so an empty file is what a crash of the machine may leave: a worker must not stumble over it."""
    directory = InstanceDir(tmp_path, "ins_1")
    directory.create("cfg_1")
    (directory.path / "instance.json").write_bytes(left)
    assert directory.read() is None
    with pytest.raises(FileNotFoundError):
        directory.edit(port=1)
    directory.remove()
    assert list(instancedir.listing(tmp_path)) == []


@pytest.mark.parametrize("name", ["../x", "", "a/b", "x" * 65, "ins_1\n"])
def test_only_plain_names_become_paths(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no instance id"):
        InstanceDir(tmp_path, name)


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shorter data directory"):
        InstanceDir(tmp_path / ("x" * 120), "ins_1")


def test_a_pid_is_trusted_only_with_its_start_time_and_boot(tmp_path: Path) -> None:
    me = processes.identify(os.getpid())
    assert me is not None
    directory = InstanceDir(tmp_path, "ins_1")
    directory.create("cfg_1")
    record = directory.edit(holder=me, engine=replace(me, started=me.started + 1), frontend=replace(me, boot="other"))
    assert instancedir.living(record) == {"holder": me}


def test_the_engine_log_outlives_the_instance(tmp_path: Path) -> None:
    directory = InstanceDir(tmp_path / "inst", "ins_1")
    directory.create("cfg_1")
    directory.engine_log.write_text("one\ntwo\nthree\n")
    assert directory.last_words() == "three"
    directory.keep_log(tmp_path / "logs")
    directory.remove()
    assert not directory.path.exists()
    assert (tmp_path / "logs" / "ins_1.log").read_text() == "one\ntwo\nthree\n"
