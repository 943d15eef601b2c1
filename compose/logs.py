"""Where `up` writes about itself: JSON lines in its own log file, as its children do."""

import os
from pathlib import Path

import structlog


def write_own_log(path: Path) -> None:
    """Send this process's structlog to `path` (0600, appended)."""
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "a", buffering=1)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(file=file),
    )
