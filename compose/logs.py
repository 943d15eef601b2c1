"""Where `up` writes about itself: JSON lines in its own log file, as its children do."""

import os
from pathlib import Path

from controlplane.logs import write_json_lines


def write_own_log(path: Path) -> None:
    """Send this process's structlog to `path` (0600, appended)."""
    write_json_lines(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
