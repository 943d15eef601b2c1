"""Who is on a device, in words: for the message of an assertion that wants nobody there."""

from pathlib import Path

from worker import gpus


def on(device: str) -> str:
    return "; ".join(f"{pid} has {size} bytes: {_what(pid)}" for pid, size in gpus.processes(device).items()) or "nobody"


def _what(pid: int) -> str:
    """Its state and command line; one that the driver still clears up after has none."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        state = next(line.split(None, 1)[1] for line in status.splitlines() if line.startswith("State:"))
        return f"{state}, {Path(f'/proc/{pid}/cmdline').read_bytes().replace(bytes(1), b' ').decode(errors='replace')[:200]}"
    except OSError:
        return "no such process any more"
