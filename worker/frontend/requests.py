"""All requests in flight of one frontend: from the engine's words to their ends, and what becomes of those nobody reads."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from worker.countdown import Countdown
from worker.engines.messages import Abort, Ack, Connected, Ended, FrontendToEngine, Submit, Tokens
from worker.frontend.chat import load
from worker.frontend.inflight import Inflight
from worker.frontend.record import Closed, Opened, Record, replay

GRACE_S: Final = 2.0
"""A reader that went without a word may come back within this; then the engine stops writing for it."""
RETURN_S: Final = 10.0
"""The same after this process was started anew: the readers must notice first."""
REMEMBERED: Final = 10_000
"""Requests that are over and whose repetition is recognised."""
RATE_WINDOW_S: Final = 5.0


class RequestExists(Exception):
    """This attempt of this request is here, or was."""


class Requests:
    """The engine's listener. `send` reaches the engine if it is there."""

    def __init__(self, directory: Path, send: Callable[[FrontendToEngine], None]) -> None:
        self._directory, self._send = directory, send
        self._inflight: dict[str, Inflight] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        self._timers: dict[str, Countdown] = {}
        self._rate: deque[tuple[float, int]] = deque()

    # ---- for the server -------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Take up what the last frontend of this instance left; readers have `RETURN_S` to come back."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for record, found in replay(self._directory):
            try:
                inflight = Inflight(found.opened, record, load(Path(found.opened.source)))
            except ValueError:  # its tokenizer is gone: the model was retired meanwhile
                record.remove()
                continue
            inflight.replay(found.ids)
            if found.closed is not None:
                inflight.close(found.closed)
            self._inflight[found.opened.key] = inflight
            self._expire(inflight, RETURN_S)

    def open(self, opened: Opened) -> Inflight:
        """Record and submit a request.

        Raises:
            RequestExists, ValueError (its id is no name).
        """
        if opened.key in self._inflight or opened.key in self._over:
            raise RequestExists(opened.key)
        text_side = load(Path(opened.source))
        inflight = Inflight(opened, Record.create(self._directory, opened), text_side)
        self._inflight[opened.key] = inflight
        self._submit(inflight)
        return inflight

    def find(self, request: str) -> Inflight | None:
        """Return the newest attempt of a request."""
        found = [inflight for inflight in self._inflight.values() if inflight.opened.request == request]
        return max(found, key=lambda inflight: inflight.opened.attempt, default=None)

    def abort(self, inflight: Inflight) -> None:
        """The reader wants no more of it."""
        if inflight.closed is None:
            inflight.close(Closed(reason="aborted", error=True, message="the request was aborted"))
        if not inflight.engine_done:
            self._send(Abort(request=inflight.opened.key))

    def abort_all(self) -> None:
        """The worker's drain deadline has passed."""
        for inflight in list(self._inflight.values()):
            if inflight.closed is None:
                self.abort(inflight)

    def read_by(self, inflight: Inflight, reader: object) -> None:
        """`reader` reads from now on; another one that did stops."""
        inflight.reader = reader
        inflight.changed.set()
        if timer := self._timers.pop(inflight.opened.key, None):
            timer.cancel()

    def left_by(self, inflight: Inflight, reader: object, *, has_all: bool) -> None:
        """`reader` is gone: with everything, or without a word."""
        if inflight.reader is not reader:
            return
        inflight.reader = None
        if has_all:
            self._forget(inflight)
        else:
            self._expire(inflight, GRACE_S)

    def running(self) -> int:
        return sum(inflight.closed is None for inflight in self._inflight.values())

    def tokens_per_s(self) -> float:
        """Over the last seconds, all requests together."""
        now = time.monotonic()
        while self._rate and self._rate[0][0] < now - RATE_WINDOW_S:
            self._rate.popleft()
        return sum(count for _, count in self._rate) / RATE_WINDOW_S

    def close(self) -> None:
        """The process ends; the records stay."""
        for timer in self._timers.values():
            timer.cancel()
        for inflight in self._inflight.values():
            inflight.record.close()

    # ---- for the engine -------------------------------------------------------------------------------------

    def connected(self, message: Connected) -> None:
        """Compare what the engine has with what should be there."""
        for key in message.requests.keys() - self._inflight.keys():
            self._send(Abort(request=key))  # its reader has it all, or has given it up
        for key, inflight in self._inflight.items():
            if key in message.requests:
                if inflight.closed is not None:
                    self.abort(inflight)
            elif inflight.closed is None and not inflight.received:
                self._submit(inflight)  # lost on its way, or the engine was not there yet
            elif inflight.closed is None:
                inflight.close(_died())

    def tokens(self, message: Tokens) -> bool:
        found = zip(message.requests, message.starts, message.ids, strict=True)
        taken = [self._take(request, start, ids) for request, start, ids in found]
        return all(taken)

    def _take(self, request: str, start: int, ids: tuple[int, ...]) -> bool:
        inflight = self._inflight.get(request)
        if inflight is None:
            return True
        was_open = inflight.closed is None
        if not inflight.take(start, ids):
            return False
        if was_open:
            self._count(len(ids))
            if inflight.closed is not None:
                self._send(Abort(request=request))  # it can't know of a stop string
        if inflight.owed():
            self._send(Ack(request=request, count=inflight.received))
            inflight.acknowledged = inflight.received
        return True

    def ended(self, message: Ended) -> bool:
        inflight = self._inflight.get(message.request)
        if inflight is not None:
            if inflight.received < message.count:
                return False
            inflight.engine_done = True
            what = message.message or f"the engine says {message.reason}"
            inflight.close(Closed(reason=message.reason, error=message.reason not in ("stop", "length"), message=what))
        self._send(Ack(request=message.request, count=message.count, ended=True))
        return True

    def lost(self) -> None:
        for inflight in self._inflight.values():
            inflight.engine_done = True
            inflight.close(_died())

    # ---- within ---------------------------------------------------------------------------------------------

    def _submit(self, inflight: Inflight) -> None:
        opened = inflight.opened
        self._send(Submit(request=opened.key, prompt=opened.prompt, sampling=opened.sampling))

    def _expire(self, inflight: Inflight, after_s: float) -> None:
        def expired() -> None:
            self.abort(inflight)
            self._forget(inflight)

        self._timers[inflight.opened.key] = Countdown(after_s, expired)

    def _forget(self, inflight: Inflight) -> None:
        key = inflight.opened.key
        inflight.record.remove()
        self._inflight.pop(key, None)
        if timer := self._timers.pop(key, None):
            timer.cancel()
        self._over[key] = None
        if len(self._over) > REMEMBERED:
            self._over.popitem(last=False)

    def _count(self, tokens: int) -> None:
        now = time.monotonic()
        if self._rate and now - self._rate[-1][0] < 0.1:
            then, count = self._rate[-1]
            self._rate[-1] = (then, count + tokens)
        else:
            self._rate.append((now, tokens))


def _died() -> Closed:
    return Closed(reason="engine_died", error=True, message="the engine's process died in the middle of it; send it again")
