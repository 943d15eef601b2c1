"""What the state forgets and the page still shows: the newest events, the requests that ended, operations that failed."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from controlplane.envelope import Recorded
from controlplane.events import OperationFailed, OperationRequested, OperationSucceeded
from web.views.devicenames import Names
from web.views.events import EventRow, row
from web.views.models import Failure
from web.views.requests import OUTCOMES, RequestRow, ended

ENDED_KEPT: Final = 50
OTHERS_KEPT: Final = 40
REQUEST_EVENTS_KEPT: Final = 20
"""Request events have a ring of their own: hundreds a second must not push out the one event that matters."""
_ENDINGS: Final = frozenset(f"Request{outcome.capitalize()}" for outcome in OUTCOMES)


class Recent:
    """A bounded fold of the newest events; rows are made only when somebody looks."""

    def __init__(self) -> None:
        self._ended: deque[Recorded] = deque(maxlen=ENDED_KEPT)
        self._requests: deque[Recorded] = deque(maxlen=REQUEST_EVENTS_KEPT)
        self._others: deque[Recorded] = deque(maxlen=OTHERS_KEPT)
        self._failures: dict[str, Failure] = {}
        self.position = 0

    def add(self, recorded: Recorded) -> None:
        """Take in one event; those up to `position` are known already and skipped."""
        if recorded.position <= self.position:
            return
        self.position = recorded.position
        if recorded.event.AGGREGATE != "request":
            self._others.append(recorded)
            self._remember_operation(recorded)
            return
        self._requests.append(recorded)
        if recorded.type in _ENDINGS:
            self._ended.append(recorded)

    def refill(self, events: Iterable[Recorded]) -> None:
        """Take in what the log holds besides what is kept: after a start, or after events went by unseen."""
        known = {r.position: r for r in (*self._ended, *self._requests, *self._others, *events)}
        for ring in (self._ended, self._requests, self._others):
            ring.clear()
        self._failures.clear()
        self.position = 0
        for position in sorted(known):
            self.add(known[position])

    def _remember_operation(self, recorded: Recorded) -> None:
        match recorded.event:
            case OperationFailed(model=str(model)) as e:
                self._failures[model] = Failure(
                    operation=e.operation, kind=e.kind, code=e.code, message=e.message, at_ms=recorded.at_ms,
                    position=recorded.position,
                )  # fmt: skip
            case OperationRequested(model=str(model)) | OperationSucceeded(model=str(model)):
                self._failures.pop(model, None)
            case _:
                pass

    @property
    def failures(self) -> Mapping[str, Failure]:
        """Model -> its last operation, if that failed."""
        return dict(self._failures)

    def ended_requests(self) -> tuple[RequestRow, ...]:
        """Newest first."""
        return tuple(row for recorded in reversed(self._ended) if (row := ended(recorded)) is not None)

    def events(self, devices: Names) -> tuple[EventRow, ...]:
        """Newest first."""
        return tuple(row(r, devices) for r in sorted((*self._others, *self._requests), key=lambda r: -r.position))
