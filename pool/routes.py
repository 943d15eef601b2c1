"""Which devices help a fill, by what all of them are doing at that moment."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

from pool.fill import RESERVE_BYTES
from pool.gpu import Gpu
from pool.journey import Route
from pool.paths import Load, choose
from pool.topology import Topology


class Routes:
    """Asked by every lane's thread."""

    def __init__(self, gpus: Sequence[Gpu], topology: Topology) -> None:
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._topology = topology
        self._copying: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def chosen(self, target: Gpu, size_bytes: int) -> Iterator[tuple[Route, ...]]:
        """Taken for as long as the context lasts: who helps one fill is not asked for another."""
        others = {uuid: gpu.load() for uuid, gpu in self._gpus.items() if gpu is not target}
        with self._lock:
            loads = {
                uuid: Load(free_bytes=load[0], decoding=load[1], copying=bool(self._copying[uuid]))
                for uuid, load in others.items()
                if load is not None
            }
            paths = choose(target.uuid, size_bytes, self._topology, loads, reserve_bytes=RESERVE_BYTES)
            used = [path.via or target.uuid for path in paths]
            self._copying.update(used)
        try:
            yield tuple(Route(self._gpus[path.via] if path.via else None, path.share) for path in paths)
        finally:
            with self._lock:
                self._copying.subtract(used)
