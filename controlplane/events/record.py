"""The shape every event shares, and what ties an event to its aggregate's stream and its node."""

from typing import ClassVar

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A fact, in the past tense. Subclasses are the closed union `events.AnyEvent`.

    `AGGREGATE` and `KEY` give the stream, `aggregate:value of the KEY field`. An event with a `node` field
    concerns that node's worker, which follows it. `ENDS` marks the last event of a stream.
    """

    V: ClassVar[int] = 1
    AGGREGATE: ClassVar[str]
    KEY: ClassVar[str]
    ENDS: ClassVar[bool] = False

    @property
    def stream(self) -> str:
        return f"{self.AGGREGATE}:{getattr(self, self.KEY)}"
