"""The latest-frame hub: each fragment is kept once, encoded; readers take what changed since what they have.

A frame is the join of the fragments that are newer than a reader's last frame. Readers that keep up all get the very
same bytes; one that was slow gets one frame with the newest of everything it missed, so nothing is ever queued for it.
Memory is bounded by the fragments that exist and the handful of joins that are cached until the next frame.
"""

import asyncio
import os
from collections.abc import Iterable, Mapping
from time import monotonic
from typing import Final

HEARTBEAT_S: Final = 15.0
"""Proxies commonly cut a stream that is silent for 30 to 60 s, and a page that hears no beat connects again."""
STUCK_S: Final = 30.0
"""A reader whose socket takes nothing for this long is let go; its browser connects again."""
HEARTBEAT: Final = b"event: beat\ndata:\n\n"
"""An event, not a comment: a page has to see it."""


class Reader:
    """One open page. `seq`: the newest frame it was given."""

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.waiting: asyncio.Future[None] | None = None
        self.task: asyncio.Task[object] | None = asyncio.current_task()
        self.sending_since = 0.0
        self.beats = 0


class Hub:
    """Attributes: readers (open pages), seq (number of the newest frame), closed."""

    def __init__(self) -> None:
        self.id = os.urandom(4).hex()
        self.seq = 0
        self.readers: set[Reader] = set()
        self.closed = False
        self._pieces: dict[str, tuple[int, bytes]] = {}
        self._joins: dict[int, bytes] = {}
        self._beats = 0
        self._beat_at = monotonic()
        self._arrived: asyncio.Event = asyncio.Event()

    def publish(self, pieces: Mapping[str, bytes], gone: Iterable[str] = ()) -> None:
        """Replace the fragments in `pieces`, forget those `gone`, and wake every reader: one frame."""
        self.seq += 1
        for name in gone:
            self._pieces.pop(name, None)
        for name, piece in pieces.items():
            self._pieces.pop(name, None)  # to the end: the dictionary stays in the order of publication
            self._pieces[name] = (self.seq, piece)
        self._joins.clear()
        self._wake()

    def frame(self, since: int) -> bytes:
        """All that is newer than frame `since`, as one unnamed SSE message; empty when nothing is."""
        joined = self._joins.get(since)
        if joined is None:
            newer = b"".join(piece for seq, piece in self._pieces.values() if seq > since)
            joined = b"id: %b.%d\ndata: %b\n\n" % (self.id.encode(), self.seq, newer) if newer else b""
            self._joins[since] = joined
        return joined

    def since(self, mark: str) -> int:
        """The frame that a mark (`<hub>.<frame>`, from a page or `Last-Event-ID`) stands for; -1: of another life, send all."""
        hub, _, seq = mark.partition(".")
        if hub != self.id or not seq.isascii() or not seq.isdigit() or len(seq) > 15 or int(seq) > self.seq:
            return -1
        return int(seq)

    @property
    def mark(self) -> str:
        return f"{self.id}.{self.seq}"

    def join(self, mark: str) -> Reader:
        """Add a reader that has the frame `mark`. The caller's task is the one that reads."""
        reader = Reader(self.since(mark))
        self.readers.add(reader)
        self._arrived.set()
        return reader

    def leave(self, reader: Reader) -> None:
        self.readers.discard(reader)
        if not self.readers:
            self._arrived.clear()

    async def watched(self) -> None:
        """Return once there is a reader."""
        await self._arrived.wait()

    async def next(self, reader: Reader) -> bytes | None:
        """The next bytes for `reader`: a frame or a heartbeat. None: the hub has closed."""
        while not self.closed:
            if reader.seq != self.seq:
                frame, reader.seq = self.frame(reader.seq), self.seq
                if frame:
                    return frame
            elif reader.beats != self._beats:
                reader.beats = self._beats
                return HEARTBEAT
            reader.waiting = asyncio.get_running_loop().create_future()
            await reader.waiting
        return None

    def beat(self) -> None:
        """Send a heartbeat to readers that have nothing else to take, and let go of those that are stuck."""
        self._beats += 1
        now, last = monotonic(), self._beat_at
        self._beat_at = now
        for reader in tuple(self.readers):
            if reader.sending_since and now - last > STUCK_S:  # this process stood still, and took nothing to the socket
                reader.sending_since = now
            elif reader.sending_since and now - reader.sending_since > STUCK_S and reader.task is not None:
                reader.task.cancel()
        self._wake()

    async def run(self) -> None:
        """Beat until closed."""
        while not self.closed:
            await asyncio.sleep(HEARTBEAT_S)
            self.beat()

    def close(self) -> None:
        """End every stream now. Readers in the middle of a send are cut."""
        self.closed = True
        self._wake()
        for reader in tuple(self.readers):
            if reader.sending_since and reader.task is not None:
                reader.task.cancel()

    def _wake(self) -> None:
        for reader in self.readers:
            if reader.waiting is not None and not reader.waiting.done():
                reader.waiting.set_result(None)
