"""Processes that are signalled and waited for, where descriptors run short."""

import errno
import os
import signal

import pytest

from worker import processes


def descriptors_of_processes() -> int:
    """Pidfds that we have open."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += "pidfd" in os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own
            continue
    return found


async def test_a_process_that_can_not_be_looked_at_costs_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    us, had = processes.identify(os.getpid()), descriptors_of_processes()
    assert us is not None

    def none_left(_pid: int) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(processes, "identify", none_left)
    with pytest.raises(OSError, match="too many open files"):
        processes.send(us, signal.SIGTERM)
    with pytest.raises(OSError, match="too many open files"):
        await processes.ended(us, 0)
    assert descriptors_of_processes() == had
