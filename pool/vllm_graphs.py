"""How many CUDA graphs this process has captured, whoever did: torch's own class is asked, not one of vLLM's counters."""

import weakref
from typing import Any

_captured = 0
_there = weakref.WeakSet[Any]()


def count() -> None:
    """From now on. Twice is fine."""
    import torch  # noqa: PLC0415 - a rank is asked before anything else of it is there

    graph: Any = getattr(torch.cuda, "CUDAGraph", None)
    end = getattr(graph, "capture_end", None)
    if end is None or getattr(end, "counts", False):  # None: a torch without them; 0 is what is told then
        return

    def capture_end(self: Any, *arguments: Any, **more: Any) -> Any:
        found = end(self, *arguments, **more)
        global _captured  # noqa: PLW0603 - one number a process
        _captured += 1
        _there.add(self)
        return found

    capture_end.counts = True  # type: ignore[attr-defined]
    graph.capture_end = capture_end


def captured() -> int:
    """Since `count`; those that failed are not among them."""
    return _captured


def there() -> int:
    """Of those, how many somebody still holds."""
    return len(_there)
