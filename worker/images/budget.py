"""How much of the disk a node's images may take, and what goes for it: the least valuable first, pinned ones never."""

import shutil
import time
from collections.abc import Callable
from typing import Final

from controlplane.quantities import human_bytes, need_and_limit
from worker.filedigest import taken_bytes
from worker.images.manifest import ImageBroken, Manifest
from worker.images.store import Store
from worker.images.worth import Holding, surplus

QUOTA: Final = 0.5
"""Of the room that images have or could have on their disk, unless the settings say a number."""


class NoRoom(Exception):
    """An image can't be written. `code`: `over_quota` or `no_space`; `message` has both numbers."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class Budget:
    """`given_bytes`: the settings' quota, 0: none. `fits` says whether an image could be used today.

    `pinned` and `configurations_pinned` stay whatever the quota says; `wishes.Wishes` keeps all three up to date.
    """

    def __init__(self, store: Store, given_bytes: int, fits: Callable[[Manifest], bool]) -> None:
        self._store, self.given_bytes, self._fits = store, given_bytes, fits
        self.pinned: frozenset[str] = frozenset()
        self.configurations_pinned: frozenset[str] = frozenset()

    @property
    def quota_bytes(self) -> int:
        if self.given_bytes:
            return self.given_bytes
        self._store.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        return int((shutil.disk_usage(self._store.root).free + taken_bytes(self._store.root)) * QUOTA)

    def surplus(self, *, keep: frozenset[str] = frozenset()) -> list[str]:
        """What would have to go for the rest to be within the quota, least valuable first."""
        holdings = self._holdings(keep)
        over = sum(one.size_bytes for one in holdings) - self.quota_bytes
        return [one.image for one in surplus(holdings, over, _now_ms())]

    def room_for(self, need_bytes: int) -> list[str]:
        """What has to go before an image of that size is written. Raises NoRoom when even that would not do."""
        quota, holdings = self.quota_bytes, self._holdings(frozenset())
        held = sum(one.size_bytes for one in holdings)
        free = shutil.disk_usage(self._store.root).free
        gone = surplus(holdings, max(held + need_bytes - quota, need_bytes - free), _now_ms())
        freed = sum(one.size_bytes for one in gone)
        if held - freed + need_bytes > quota:
            kept = f", of which pinned ones take {human_bytes(held - freed)}" if held > freed else ""
            need, limit = need_and_limit(need_bytes, quota)
            raise NoRoom("over_quota", f"an image needs about {need}; the quota is {limit}{kept}")
        if free + freed < need_bytes:
            could = f", and {human_bytes(freed)} could be freed" if freed else ""
            need, has = need_and_limit(need_bytes, free)
            raise NoRoom("no_space", f"an image needs about {need} of room; {self._store.root} has {has}{could}")
        return [one.image for one in gone]

    def _holdings(self, keep: frozenset[str]) -> list[Holding]:
        found = []
        for image in self._store.images():
            standing, size = self._store.standing(image), self._store.size_bytes(image)
            try:
                manifest = self._store.read(image)
            except ImageBroken:
                if not self._store.path(image).is_dir():
                    continue  # it was removed just now
                found.append(Holding(image=image, size_bytes=size, usable=False))
                continue
            kept = image in keep | self.pinned or manifest.fingerprint.configuration in self.configurations_pinned
            found.append(
                Holding(
                    image=image, size_bytes=size, made_ms=manifest.made_ms, used_ms=standing.used_ms, uses=standing.uses,
                    took_ms=manifest.took_ms, usable=not standing.failed and self._fits(manifest), kept=kept,
                )
            )  # fmt: skip
        return found


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
