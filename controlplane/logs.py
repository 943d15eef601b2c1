"""Structured logs of a process: JSON lines on standard error, kept by whoever started it, or in a file of its own."""

import os
from typing import Final

import structlog

STDERR: Final = 2


class Lines:
    """Lines go straight to the descriptor. One that can't be written (its disk is full) is lost, and the process goes on."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        left = text.encode(errors="backslashreplace")
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            pass  # there is nowhere to say it
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


def write_json_lines(descriptor: int = STDERR) -> None:
    """Send this process's structlog there."""
    lines = Lines(descriptor)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(file=lines),  # type: ignore[arg-type]  # it asks for no more than these two
        cache_logger_on_first_use=True,
    )
