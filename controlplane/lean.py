"""What our processes leave out when they start: a start is mostly imports.

Two libraries import others for parts of theirs that nobody here uses: structlog brings rich (for colours on a terminal; we
write JSON lines), nats-py brings aiohttp (for NATS over websockets; ours is TCP). Both try, and do without what is not
installed. So while they are imported, those others are not there. Whoever wants rich or aiohttp itself imports it as ever.
"""

import contextlib
import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from itertools import pairwise
from types import ModuleType
from typing import Final

PROGRAMS: Final = frozenset({"controlplane.decider", "web.server", "worker.agent", "worker.frontend.server"})
"""Their `main` calls `started`."""
NURSERY: Final = "compose.embryo"
"""Its children call it."""
SPARED: Final[Mapping[str, tuple[str, ...]]] = {"structlog": ("rich",), "nats": ("aiohttp",)}


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Modules that can't be imported inside the block, unless they have been before."""
    away = [name for name in names if name not in sys.modules]
    for name in away:
        sys.modules[name] = None  # type: ignore[assignment]  # an import of it is an ImportError
    try:
        yield
    finally:
        for name in away:
            if name in sys.modules and sys.modules[name] is None:
                del sys.modules[name]


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        with without(*SPARED[module.__name__]):
            super().exec_module(module)


class _Finder:
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in SPARED:
            return None
        found = PathFinder.find_spec(fullname, path, target)
        if found is None or found.origin is None or not isinstance(found.loader, SourceFileLoader):
            return found
        places = found.submodule_search_locations
        return spec_from_file_location(
            fullname, found.origin, loader=_Loader(fullname, found.origin), submodule_search_locations=places
        )


def install() -> None:
    """Be lean in this process from now on. If it is one of `PROGRAMS` that is being started, no garbage is collected until it
    says `started`: nothing that an import makes is garbage, and to look for some takes a seventh of the time."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    given = dict(pairwise(sys.orig_argv))
    if sys.argv[:1] == ["-m"] and given.get("-m") in {*PROGRAMS, NURSERY}:  # what Python sets until it has found the program
        gc.disable()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """For imports in the block. Collects no garbage there, and what is there afterwards stays."""
    gc.disable()
    try:
        yield
    finally:
        started()


def started() -> None:
    """The program has been imported. What is there now stays: leave it out of every collection to come."""
    gc.freeze()
    gc.enable()
