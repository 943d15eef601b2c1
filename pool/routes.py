"""Which devices help a fill, by what all of them are doing at that moment. A device's own fill goes before its help."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pool.fill import RESERVE_BYTES
from pool.gpu import Activity, Gpu
from pool.journey import Route
from pool.paths import Load, Path, candidates, choose, enough
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
        seen = self._ask(target.uuid, size_bytes, beside)
        with self._lock:
            if (stop := self._helping.pop(target.uuid, None)) is not None:
                stop.set()
            paths = self._choose(target.uuid, size_bytes, seen)
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

    def _ask(self, target: str, size_bytes: int, beside: Sequence[str]) -> dict[str, Activity]:
        """What those do who may help: nobody in vain, for each takes milliseconds and the wake waits."""
        seen: dict[str, Activity] = {}
        for place in candidates(target, size_bytes, self._topology):
            uuid = place.device
            if uuid not in self._gpus or uuid in beside or self._copying[uuid]:
                continue
            if (activity := self._gpus[uuid].activity()) is not None:
                seen[uuid] = activity
                if enough(self._choose(target, size_bytes, seen), self._loads(seen)):
                    break
        return seen

    def _choose(self, target: str, size_bytes: int, seen: Mapping[str, Activity]) -> tuple[Path, ...]:
        return choose(target, size_bytes, self._topology, self._loads(seen), reserve_bytes=RESERVE_BYTES)

    def _loads(self, seen: Mapping[str, Activity]) -> dict[str, Load]:
        return {
            uuid: Load(free_bytes=does.free_bytes, decoding=does.anybody, copying=bool(self._copying[uuid]))
            for uuid, does in seen.items()
        }
