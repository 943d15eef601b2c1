"""What an engine on a GPU says to the pool daemon, blocking: bring a set, find it, have it on a device, give it back."""

import os
from collections.abc import Callable, Iterable

from pool.blocks import Groups
from pool.client import ANSWER_S, SILENCE_S, Attachment, PoolRefused, ask, expect, replies
from pool.messages import Attach, Attached, Deposit, Filled, Find, Release, Released, Room, Seal, Staged, Staging, Written
from pool.wire import Channel, close_all

FILL_S = 60.0
"""Of a set on its way to a GPU, other copies before it included: 60 GiB take 1.2 s by a link of its own, 8 s unpinned."""
ROOM_S = 120.0
"""Zeroed memory comes at 2 to 10 GiB/s."""


class DeviceAttachment(Attachment):
    """A set that is on a GPU for this process. `fds`: device memory, then the host segments. A restarted daemon gets the host
    set's reference back; of the device's memory it knows nothing, and that lives as long as this process maps it.
    """

    def __init__(self, path: str, channel: Channel, attached: Attached, fds: list[int]) -> None:
        self.filled: Filled | None = None
        super().__init__(path, channel, attached, fds)

    def succeeded(self, attached: Attached, fds: list[int]) -> "DeviceAttachment":
        """What this connection holds instead; `end_thread` has been called."""
        self._bell.close()
        self._ear.close()
        return DeviceAttachment(self._path, self.channel, attached, fds)

    def release(self, *, deadline_s: float = FILL_S) -> Released | None:
        """Give it back and hear that the memory is free; None if the daemon has died meanwhile. Unmap first."""
        self.end_thread()
        try:
            self.channel.send(Release(weight_set=self.attached.weight_set, device=self.attached.device), deadline_s)
            return expect(Released, self.channel.receive(replies, deadline_s))
        except (OSError, PoolRefused):
            return None
        finally:
            self.close()


def attach_device(
    path: str | os.PathLike[str],
    weight_set: str,
    device: str,
    map_them: Callable[[Attached, list[int]], None],
    *,
    beside: tuple[str, ...] = (),
    neighbours: Groups = (),
) -> DeviceAttachment:
    """Blocking: have a set on a GPU. `map_them` gets its descriptors while the bytes still travel; it must not use them yet.

    beside: devices that are filled for this engine at the same time, whose links are not to be asked for help. neighbours:
    segments whose places lie side by side, which one descriptor may cover.
    Raises PoolRefused (`device_full` with both numbers, ...), OSError, and what `map_them` raises; what that has mapped is
    the caller's to unmap.
    """
    channel, attached, fds = ask(os.fspath(path), weight_set, FILL_S, device, beside=beside, neighbours=neighbours)
    try:
        map_them(attached, fds)
        filled = expect(Filled, channel.receive(replies, FILL_S))
    except BaseException:
        close_all(fds)
        channel.close()
        raise
    attachment = DeviceAttachment(os.fspath(path), channel, attached, fds)
    attachment.filled = filled
    return attachment


class Spoiled(OSError):
    """The memory that was to be exchanged holds neither set: unmap it."""


def exchange(old: DeviceAttachment, weight_set: str) -> DeviceAttachment:
    """Blocking: another set of the same layout into the memory that is mapped, which nobody reads meanwhile.

    `old` is of no use afterwards. Raises PoolRefused (`not_in_place`, ...): nothing has changed, but a death of the daemon goes
    unnoticed until `old` is released; Spoiled.
    """
    old.end_thread()
    request = Attach(weight_set=weight_set, device=old.attached.device, over=old.attached.weight_set)
    try:
        old.channel.send(request, ANSWER_S)
        attached = expect(Attached, old.channel.receive(replies, FILL_S))
        fds = old.channel.receive_fds(attached.descriptors, ANSWER_S)
    except OSError as error:
        old.close()
        raise Spoiled(f"{weight_set} over {old.attached.weight_set}: {error}") from error
    try:
        filled = expect(Filled, old.channel.receive(replies, FILL_S))
    except (OSError, PoolRefused) as error:
        close_all(fds)
        old.close()
        raise Spoiled(f"{weight_set} over {old.attached.weight_set}: {error}") from error
    attachment = old.succeeded(attached, fds)
    attachment.filled = filled
    return attachment


def deposit(path: str | os.PathLike[str], request: Deposit, write: Callable[[list[int]], Iterable[int] | None]) -> Staged:
    """Blocking: bring a set in an engine's own layout. Raises PoolRefused, OSError.

    `write` fills the segments; it may tell now and then how many tensors are done, the first first, for their digests to begin.
    """
    channel = Channel.connect(os.fspath(path), ANSWER_S)
    try:
        channel.send(request, ANSWER_S)
        expect(Room, channel.receive(replies, ROOM_S))
        fds = channel.receive_fds(len(request.segments), ANSWER_S)
        try:
            for count in write(fds) or ():
                channel.send(Written(tensors=count), ANSWER_S)
        finally:
            close_all(fds)
        channel.send(Seal(), ANSWER_S)
        while True:
            reply = channel.receive(replies, SILENCE_S)
            if not isinstance(reply, Staging):
                return expect(Staged, reply)
    finally:
        channel.close()


def find(path: str | os.PathLike[str], source: str, form: str) -> str | None:
    """Blocking: the weight set of these files in this form, if the pool has it. Raises OSError, PoolRefused (`bad_source`)."""
    channel = Channel.connect(os.fspath(path), ANSWER_S)
    try:
        channel.send(Find(source=source, form=form), ANSWER_S)
        return expect(Staged, channel.receive(replies, ANSWER_S)).weight_set
    except PoolRefused as refused:
        if refused.code != "unknown_set":
            raise
        return None
    finally:
        channel.close()
