"""What an engine has produced and its frontend has not yet recorded. A frontend that comes back gets it all again."""

from collections.abc import Iterator, Sequence

from worker.engines.interface import Output
from worker.engines.messages import Ack, Connected, Ended, Tokens


class _Pending:
    __slots__ = ("base", "ended", "ids")

    def __init__(self) -> None:
        self.base = 0
        self.ids: list[int] = []
        self.ended: Ended | None = None


class Outbox:
    """One entry per request from its submission until its recorded end."""

    def __init__(self) -> None:
        self._pending: dict[str, _Pending] = {}

    def __contains__(self, request: str) -> bool:
        return request in self._pending

    def open(self, request: str) -> None:
        self._pending[request] = _Pending()

    def add(self, outputs: Sequence[Output]) -> Iterator[Tokens | Ended]:
        """Keep what a step has produced, and yield the messages that carry it: ids first, then what has ended."""
        requests, starts, added = [], [], []
        for output in outputs:
            if ids := output.ids:
                entry = self._pending[output.request]
                requests.append(output.request)
                starts.append(entry.base + len(entry.ids))
                added.append(ids)
                entry.ids.extend(ids)
        if requests:
            yield Tokens(requests=tuple(requests), starts=tuple(starts), ids=tuple(added))
        for output in outputs:
            if output.reason is not None:
                yield self.end(output.request, output.reason, output.message)

    def end(self, request: str, reason: str, message: str = "") -> Ended:
        """Keep the end of a request (one that was never opened, too: an abort of it is answered) and return its message."""
        entry = self._pending.setdefault(request, _Pending())
        if entry.ended is None:
            entry.ended = Ended(request=request, reason=reason, count=entry.base + len(entry.ids), message=message)
        return entry.ended

    def acknowledge(self, ack: Ack) -> None:
        entry = self._pending.get(ack.request)
        if entry is None:
            return
        if ack.ended and entry.ended is not None:
            del self._pending[ack.request]
            return
        known = min(max(ack.count - entry.base, 0), len(entry.ids))
        del entry.ids[:known]
        entry.base += known

    def clear(self) -> None:
        """Forget everything: nobody will ask for it again."""
        self._pending.clear()

    def greeting(self, pid: int) -> Iterator[Connected | Tokens | Ended]:
        """Yield all that a frontend must hear on a new connection."""
        yield Connected(pid=pid, requests={request: entry.base for request, entry in self._pending.items()})
        told = [(request, entry.base, tuple(entry.ids)) for request, entry in self._pending.items() if entry.ids]
        if told:
            requests, starts, ids = zip(*told, strict=True)
            yield Tokens(requests=requests, starts=starts, ids=ids)
        for entry in self._pending.values():
            if entry.ended is not None:
                yield entry.ended
