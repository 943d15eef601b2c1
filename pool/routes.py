"""Which devices help a fill, by what all of them are doing at that moment. A device's own fill goes before its help."""

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
        self._helping: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def chosen(self, target: Gpu, size_bytes: int, *, beside: Sequence[str] = ()) -> Iterator[tuple[Route, ...]]:
        """Taken for as long as the context lasts: who helps one fill is not asked for another, nor is anybody of `beside`."""
        able = [uuid for uuid in self._gpus if (uuid, target.uuid) in self._topology.peers and uuid not in beside]
        others = {uuid: self._gpus[uuid].activity() for uuid in able}  # milliseconds each: a wake asks nobody in vain
        with self._lock:
            if (stop := self._helping.pop(target.uuid, None)) is not None:
                stop.set()
            loads = {
                uuid: Load(free_bytes=does.free_bytes, decoding=does.anybody, copying=bool(self._copying[uuid]))
                for uuid, does in others.items()
                if does is not None
            }
            paths = choose(target.uuid, size_bytes, self._topology, loads, reserve_bytes=RESERVE_BYTES)
            rate = self._topology.bytes_per_s(target.uuid)
            routes = tuple(Route(self._gpus[path.via] if path.via else None, path.share, rate) for path in paths)
            own = {path.via or target.uuid: route.stop for path, route in zip(paths, routes, strict=True)}
            self._copying.update(own.keys())
            self._helping.update({uuid: stop for uuid, stop in own.items() if uuid != target.uuid})
        try:
            yield routes
        finally:
            with self._lock:
                self._copying.subtract(own.keys())
                self._helping = {uuid: stop for uuid, stop in self._helping.items() if stop not in own.values()}
