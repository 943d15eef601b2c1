"""How fast a copy may be while a neighbour on the same device computes: some of its memory's bandwidth is the copy's."""

import time
from collections.abc import Callable

from pool.gpu import Gpu

BESIDE_DECODING = 0.8
"""Of the rate that is expected of a link (`Place.bytes_per_s`): a slower one is slowed in proportion. While copies ran at 50 to
54 GB/s a neighbour lost 4.9 to 6 % of its decoding (H200s, decoding bound by the device's memory), at 45 GB/s 4.6 to 5.2 %, at
40 GB/s 4.3 %, for 0.1 s more of a wake of 16 GB. 1 or more: never slowed."""


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


def pace_beside(gpu: Gpu, share: float, bytes_per_s: float) -> Pace:
    """On a device where other engines have weights: slowed if anybody computed there a moment ago, or if the driver can't tell.

    bytes_per_s: what is expected of the device's link.
    """
    load = gpu.load()
    return FREE if share >= 1 or (load is not None and not load[1]) else Pace(bytes_per_s * share)
