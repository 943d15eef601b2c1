"""What an engine has produced and its frontend has not yet recorded. A frontend that comes back gets it all again."""

from collections.abc import Iterator

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

    def add(self, request: str, ids: tuple[int, ...]) -> Tokens:
        """Keep `ids` and return the message that carries them."""
        entry = self._pending[request]
        start = entry.base + len(entry.ids)
        entry.ids.extend(ids)
        return Tokens(request=request, start=start, ids=ids)

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
        for request, entry in self._pending.items():
            if entry.ids:
                yield Tokens(request=request, start=entry.base, ids=tuple(entry.ids))
            if entry.ended is not None:
                yield entry.ended
