"""How fast a copy may be while a neighbour on the same device computes: some of its memory's bandwidth is the copy's."""

import time
from collections.abc import Callable, Set

from pool.gpu import Activity, Gpu

BESIDE_DECODING = 0.8
"""Of the rate that is expected of a link (`Place.bytes_per_s`): a slower one is slowed in proportion. While copies ran at 50 to
54 GB/s a neighbour lost 4.9 to 6 % of its decoding (H200s, decoding bound by the device's memory), at 45 GB/s 4.6 to 5.2 %, at
40 GB/s 3.6 and 4.3 %, for 0.1 s more of a wake of 16 GB. 1 or more: never slowed."""


class Pace:
    """Keeps a copy to a rate, on average since its first byte. Waits before more is queued; used by one thread.

    Pieces stay whole, so it is small gaps between them that slow it: a copy engine that waits costs nobody anything.
    """

    def __init__(
        self,
        bytes_per_s: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        """None: as fast as it goes."""
        self.bytes_per_s = bytes_per_s
        self._clock, self._wait = clock, wait
        self._begun: float | None = None
        self._queued = 0

    def hold(self, size_bytes: int) -> None:
        """Until so many bytes more may be queued."""
        if self.bytes_per_s is None:
            return
        now = self._clock()
        if self._begun is None:
            self._begun = now
        if (early := self._begun + self._queued / self.bytes_per_s - now) > 0:
            self._wait(early)
        self._queued += size_bytes


FREE = Pace(None)


def pace_beside(gpu: Gpu, share: float, bytes_per_s: float, neighbours: Set[int]) -> Pace:
    """On a device where other engines have weights: slowed if one of them computed there a moment ago, or if nobody can tell.

    bytes_per_s: what is expected of the device's link. neighbours: the engines' process ids; 0 stands for one that can't be
    known. An engine that was at work and has gone to sleep for this copy's sake is none of them.
    """
    return Pace(bytes_per_s * share) if share < 1 and _compute(neighbours, gpu.activity()) else FREE


def _compute(neighbours: Set[int], activity: Activity | None) -> bool:
    if activity is None or activity.computing is None or 0 in neighbours:
        return activity is None or activity.anybody
    return bool(activity.computing & neighbours)
