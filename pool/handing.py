"""Handing a set to a connection: what is in it, and descriptors, of host memory or of a device's that is being filled."""

import msgspec

from pool.arena import Arena
from pool.device import Resident
from pool.lane import Silent, within
from pool.manifest import Manifest
from pool.messages import Attach, Attached, Filled
from pool.references import References
from pool.residency import Refused
from pool.talk import hand_over, send
from pool.wire import AsyncChannel, close_all, copied

SILENT_S = 50.0
"""Less than an engine waits for its weights (`devicelink.FILL_S`), so that it is told why they don't come."""


async def attach(channel: AsyncChannel, request: Attach, held: References, arena: Arena) -> None:
    """Raises Refused, OSError; the connection then holds what it held before, but of a device that is silent (`device_silent`):
    what was asked for is still to come there, and the connection's until it ends."""
    manifest = held.hold(request.weight_set)
    attached = Attached(
        weight_set=manifest.weight_set, segments=manifest.segments, tensors=manifest.tensors,
        host_segments=manifest.host_segments, device=request.device, in_place=request.over is not None,
    )  # fmt: skip
    if request.left_on is not None:
        held.left(manifest, request.left_on, request.left)
    if request.device is None:
        await hand_over(channel, attached, arena.open(manifest))
        return
    try:
        if request.over is not None:
            resident = await held.exchange(manifest, request.device, request.over)
        else:
            resident = await held.hold_on(manifest, request.device, beside=request.beside, neighbours=request.neighbours)
    except Refused:
        await held.release(manifest.weight_set, None)
        raise
    was_there = resident.holders > 1  # whoever comes while it travels waits for this copy, and is told that it cost nothing
    try:
        filled = await _send_device(channel, manifest, attached, resident, arena)
    except Silent:
        raise
    except (Refused, OSError):
        await held.release(manifest.weight_set, request.device)
        raise
    if was_there:
        filled = msgspec.structs.replace(filled, copied_bytes=0, path="resident", shards=())
    await send(channel, filled)


async def _send_device(
    channel: AsyncChannel, manifest: Manifest, attached: Attached, resident: Resident, arena: Arena
) -> Filled:
    device = attached.device or ""
    theirs = [] if resident.base is None else [resident.base]
    made = [await within(device, one.exported, SILENT_S) for one in (*theirs, resident)]
    for one in (*theirs, resident):
        if one.filled.done():  # it may have failed since
            one.filled.result()
    lent = [made[0].fds[which] for which in resident.shared]
    handed = dict(sorted(zip(resident.blocks, (*lent, *made[-1].fds), strict=True)))  # by their first segments
    attached = msgspec.structs.replace(attached, blocks=tuple(handed), copies=resident.copies)
    copies = [] if attached.in_place else copied(handed.values())  # ours are closed when a copy fails
    try:
        fds = arena.open(manifest)
    except OSError:
        close_all(copies)
        raise
    count = len(manifest.segments) - manifest.host_segments
    close_all(fds[:count])
    await hand_over(channel, attached, [*copies, *fds[count:]])
    for one in theirs:
        await within(device, one.filled, SILENT_S)
    return await within(device, resident.filled, SILENT_S)
