"""Constants of policy, in milliseconds unless the name says otherwise."""

from typing import Final

BOUND_MS: Final = 30_000
"""The head of the queue yields to warm models for so long; then their new requests wait behind it."""

QUEUE_DEADLINE_MS: Final = 120_000
"""A request that has not begun to climb by then fails: longer than any swap (a cold start takes 33-86 s), shorter than
the patience of HTTP clients (600 s by default in the openai client)."""

OVERDUE_MS: Final = 600_000
"""A transition that nobody has reported on for so long is reported as overdue: more than the sum of a worker's step deadlines.
Requests that wait for a climb, and operators' loads, end by then as well."""

LOST_MS: Final = 10_000
"""The gateway of a request whose instance is gone has this long to say what becomes of it. It sees the stream break at once."""

REOPENED_MS: Final = 2_000
"""An interrupted request is not sent to the instance that lost it for so long: the worker's word of a death may come after
the gateway's. A worker sees a death within milliseconds, a frontend's restart takes about a second."""

RENEWED_MS: Final = 10_000
"""What a waiter's sentence names (bytes, processes, who has the place) is told anew when it is another, at most so often."""

INSPECTION_MS: Final = 60_000
"""A model that no node has inspected is waited for so long after it was registered; then its requests are refused."""

BACK_OFF_MS: Final = 1_000
BACK_OFF_LIMIT_MS: Final = 60_000
"""1, 2, 4 ... 60 s between starts that fail."""

RENEW_AGAIN_MS: Final = 3_600_000
"""A stale image that could not be made anew for want of room is tried again after so long, or once its skeleton was in use.
Long, since a sleeper's limits count from its last try."""

CLIMBS: Final = 2
"""A waiting request fails with the second failed climb that it has seen: one more try is what transient faults need."""

ATTEMPTS: Final = 2
"""A request whose instance died before anything was sent is tried once more."""

QUEUE_LIMIT: Final = 1_000
"""Requests that may wait for one model."""

MEASURED_ANEW: Final = 0.05
"""A skeleton's size is recorded again when it differs by more than this share; allocators vary by a few per cent."""


def back_off_ms(failures: int) -> int:
    return int(min(BACK_OFF_MS * 2 ** (failures - 1), BACK_OFF_LIMIT_MS))
