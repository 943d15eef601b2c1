"""What doctor says of the ladder's lower rungs, on machines that are told of."""

import gzip
from pathlib import Path

import pytest

from compose import imagechecks, kernelchecks
from compose.check import Check
from worker import gpus, namespaces
from worker.cuda import able

ALL = "\n".join(f"CONFIG_{name}=y" for name in kernelchecks.NEEDED_OPTIONS)
ROOT = (1 << 41) - 1


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A machine that lacks nothing."""
    made = tmp_path / "proc"
    (made / "self" / "ns").mkdir(parents=True)
    (made / "sys/kernel/yama").mkdir(parents=True)
    (made / "config.gz").write_bytes(gzip.compress(ALL.encode()))
    (made / "sys/kernel/yama/ptrace_scope").write_text("1\n")
    (made / "sys/kernel/io_uring_disabled").write_text("0\n")
    (made / "cpuinfo").write_text("flags: fpu amx_tile\n")
    may(made, ROOT)
    return made


def may(proc: Path, capabilities: int) -> None:
    (proc / "self" / "status").write_text(f"Name:\tx\nCapEff:\t{capabilities:016x}\n")


def verdicts(proc: Path, *, gpu: bool = False) -> dict[str, str]:
    return {check.name: check.verdict for check in kernelchecks.kernel_checks(gpu=gpu, proc=proc)}


def test_a_machine_that_lacks_nothing_has_no_note(proc: Path) -> None:
    assert set(verdicts(proc, gpu=True).values()) == {"ok"}


def test_a_kernel_without_an_option_is_named_with_its_cure(proc: Path) -> None:
    text = ALL.replace("CONFIG_CHECKPOINT_RESTORE=y", "# CONFIG_CHECKPOINT_RESTORE is not set").replace(
        "CONFIG_UNIX_DIAG=y", "CONFIG_UNIX_DIAG=m"
    )
    (proc / "config.gz").write_bytes(gzip.compress(text.encode()))
    found = kernelchecks.kernel_options(proc)
    assert found.verdict == "note" and "lacks CHECKPOINT_RESTORE (by its configuration)" in found.found
    assert "CONFIG_CHECKPOINT_RESTORE=y" in found.cure and "UNIX_DIAG" not in found.cure


def test_a_kernel_that_shows_no_configuration_is_judged_by_what_is_there(proc: Path, tmp_path: Path) -> None:
    (proc / "config.gz").unlink()
    found = kernelchecks.kernel_options(proc, tmp_path)
    assert "CHECKPOINT_RESTORE" in found.found and "by what /proc shows" in found.found
    for path in ("sys/kernel/ns_last_pid", "self/ns/pid", "self/ns/net"):
        (proc / path).write_text("")
    assert kernelchecks.kernel_options(proc, tmp_path).verdict == "ok"


def test_missing_capabilities_are_named_as_a_container_is_given_them(proc: Path) -> None:
    may(proc, ROOT & ~(1 << 21) & ~(1 << 19))
    found = kernelchecks.capabilities(proc)
    assert found.found == "without SYS_ADMIN, SYS_PTRACE"
    assert "--cap-add=SYS_ADMIN --cap-add=SYS_PTRACE" in found.cure


def test_ptrace_scope_three_can_be_cured_at_boot_only(proc: Path) -> None:
    (proc / "sys/kernel/yama/ptrace_scope").write_text("3\n")
    found = kernelchecks.ptrace(proc)
    assert found.verdict == "note" and "at boot" in found.cure


def test_locked_memory_matters_with_a_gpu_only(proc: Path) -> None:
    may(proc, 0)
    assert kernelchecks.memlock(proc, gpu=False, limit=8 << 20).verdict == "ok"
    found = kernelchecks.memlock(proc, gpu=True, limit=8 << 20)
    assert found.verdict == "note" and "8.0 MiB" in found.found and "ulimit" in found.cure
    may(proc, 1 << 14)
    assert kernelchecks.memlock(proc, gpu=True, limit=8 << 20).verdict == "ok"


def line(name: str, verdict: str = "ok", found: str = "", cure: str = "") -> Check:
    return Check(name=name, verdict=verdict, found=found, cure=cure)  # type: ignore[arg-type]


NO_GPU, GPU = line("cuda", found="no GPU, so"), line("cuda", found="driver 580")
OLD = line("cuda", "note", "driver 550", "Update it.")
NO_CUDA = "not checkpoint (no CUDA is used)"
CRIU = line("criu", "note", "not found", "Install it.")


@pytest.mark.parametrize(
    ("lines", "root", "says", "cure"),
    [
        ([line("criu"), NO_GPU], True, "up, sleep, saved, cold; not checkpoint (no CUDA is used)", ""),
        ([line("criu"), GPU], True, "up, sleep, checkpoint, saved, cold", ""),
        ([CRIU, GPU], True, "up, sleep, checkpoint, cold; not saved (criu)", "Install it."),
        ([line("criu"), OLD], True, "up, sleep, cold; not checkpoint (cuda); not saved (cuda)", "Update it."),
        ([line("criu"), NO_GPU], False, f"up, sleep, cold; {NO_CUDA}; not saved (it needs root)", "Run as"),
        ([line("criu"), line("namespaces", "note"), NO_GPU], True, f"up, sleep, saved, cold; {NO_CUDA}", ""),
        ([line("criu"), line("memlock", "note"), GPU], True, "up, sleep, checkpoint, saved, cold", ""),
    ],
)  # fmt: skip
def test_the_ladder_is_as_long_as_the_lines_allow(lines: list[Check], root: bool, says: str, cure: str) -> None:
    found = imagechecks.ladder(lines, root=root)
    assert found.found == says
    assert found.cure.startswith(cure) if cure else not found.cure
    assert found.verdict == ("note" if cure else "ok")


def test_every_note_has_a_cure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(namespaces, "possible", lambda: "unshare: Operation not permitted")
    monkeypatch.setattr(imagechecks.criu, "find", lambda data, given: None)
    monkeypatch.setattr(gpus, "gpus", lambda: (object(),))
    monkeypatch.setattr(gpus, "driver_version", lambda: "550.1")
    monkeypatch.setattr(gpus, "cuda_version", lambda: "12.4")
    monkeypatch.setattr(able, "hindrance", lambda: "its driver is 550.1; checkpoints need 570 or newer: update it")
    found = {check.name: check for check in imagechecks.image_checks(tmp_path)}
    assert {"criu", "kernel", "capabilities", "ptrace", "memlock", "io_uring", "namespaces", "cuda", "ladder"} <= found.keys()
    assert all(check.cure for check in found.values() if check.verdict != "ok")
    assert found["cuda"].found.startswith("driver 550.1, CUDA 12.4")
    assert "saved" in found["ladder"].found.split(";")[-1]
