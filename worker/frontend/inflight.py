"""One request in flight: ids come in, text goes out to at most one reader, and what is recorded is what was said."""

import asyncio
from collections.abc import Iterable

from worker.frontend.chat import TextSide
from worker.frontend.record import Closed, Opened, Record, Recorded
from worker.frontend.stops import Stops

ACK_IDS = 64
"""Ids between two acknowledgements: each costs both sides a message, and a frontend's death sends at most so many again."""


class Inflight:
    """`received` counts the engine's ids, `counted` those that belong to the answer (none after a stop string)."""

    def __init__(self, opened: Opened, record: Record, text_side: TextSide) -> None:
        self.opened, self.record = opened, record
        self.text = ""
        self.received = 0
        self.counted = 0
        self.acknowledged = 0
        self.closed: Closed | None = None
        self.engine_done = False
        """The engine has said that it is over: nothing of it is left there once this is acknowledged."""
        self.reader: object | None = None
        self.changed = asyncio.Event()
        """Set when there is something new for the reader, who clears it."""
        self._detokeniser = text_side.detokeniser()
        self._stops = Stops(opened.stops)

    def take(self, start: int, ids: tuple[int, ...]) -> bool:
        """Take ids from the engine, those that are here already aside. False: some before `start` are missing."""
        if start > self.received:
            return False
        new = ids[self.received - start :]
        if new:
            self.record.append(Recorded(ids=new))
            self.replay(new)
        return True

    def replay(self, ids: Iterable[int]) -> None:
        """Turn ids into text; at a stop string the answer is closed."""
        pieces = []
        for token in ids:
            self.received += 1
            if self.closed is None:
                self.counted += 1
                pieces.append(self._stops.feed(self._detokeniser.feed(token)))
                if self._stops.found is not None:
                    self.closed = Closed(reason="stop")
        self.text += "".join(pieces)
        self.changed.set()

    def close(self, closed: Closed) -> None:
        """End it, unless it has ended; text that was held back comes out."""
        if self.closed is None:
            self.text += self._stops.feed(self._detokeniser.flush())
            found = self._stops.found is not None  # the last bytes of a broken character can complete a stop string
            self.text += self._stops.flush()
            self.closed = Closed(reason="stop") if found and not closed.error else closed
            self.record.append(self.closed)
        self.changed.set()

    def owed(self) -> bool:
        """Whether it is time to acknowledge."""
        return self.received - self.acknowledged >= ACK_IDS
