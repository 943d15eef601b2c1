"""A clock that no one sets and no sleep stops."""

import time


def uptime_s() -> float:
    """Seconds since the machine was started, those in which it was suspended with them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
