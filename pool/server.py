"""The daemon's conversations: one task a connection, all bookkeeping in this one thread, reading and hashing in others."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Sequence
from typing import assert_never

import msgspec

from pool.admission import admission, peer
from pool.arena import Arena
from pool.checks import Checks
from pool.deposits import Deposits
from pool.described import Described
from pool.devices import Devices
from pool.gpu import Gpu
from pool.handing import attach
from pool.loss import Loss
from pool.messages import (
    Attach,
    Deposit,
    Describe,
    Drop,
    Find,
    Refusal,
    Release,
    Request,
    Room,
    Seal,
    Stage,
    Staged,
    Verify,
    Written,
)
from pool.pace import BESIDE_DECODING
from pool.ready import Ready
from pool.references import References
from pool.removals import Removals
from pool.residency import Refused, Residency
from pool.stage import Cancelled
from pool.stagings import Stagings
from pool.talk import SEND_S, WORD_S, send, talking
from pool.topology import NO_TOPOLOGY, Topology
from pool.way import Way
from pool.wire import REQUEST_LIMIT, AsyncChannel, WireBroken

WRITING_S = 900.0
"""An engine that has been given room writes 60 GiB in ten seconds, or into a machine that swaps."""
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
log = logging.getLogger("pool")


class Server:
    def __init__(
        self,
        arena: Arena,
        residency: Residency,
        gpus: Sequence[Gpu] = (),
        topology: Topology = NO_TOPOLOGY,
        *,
        ready_bytes: int = 0,
        share: float = BESIDE_DECODING,
        helpers: bool = True,
    ) -> None:
        """ready_bytes: of memory without a set, at most. share: of a link's rate for copies beside a neighbour that decodes.
        helpers: for `Described`; without any there is no topology, either."""
        self.arena = arena
        self.residency = residency
        self._told = {"ready_limit_bytes": ready_bytes, "helpers": helpers, "beside_decoding": share}
        way = Way()
        self.devices = Devices(arena, way, gpus, topology, share=share)
        self.ready = Ready(arena, self.devices, way, lambda: self._may_be_ready(ready_bytes))
        self.stagings = Stagings(arena, residency, self.devices, self.ready, way)
        self.deposits = Deposits(self.stagings)
        self.loss = Loss(arena)
        self._connections: set[asyncio.Task[None]] = set()
        self.removals = Removals(self.stagings)
        self.checks = Checks(arena, residency, self.removals.remove)
        self._checking: asyncio.Task[None] | None = None

    def adopt(self) -> None:
        """Take over what an earlier daemon left; digests are compared in the background."""
        sound, removed = self.arena.adopt()
        for manifest in sound:
            self.residency.add(manifest)
            if any(origin.form for origin in manifest.origins):
                self.devices.host.prepare(manifest)
        log.info("adopted", extra={"sets": [manifest.weight_set for manifest in sound], "leftovers_removed": removed})
        if self.residency.used_bytes > self.residency.budget_bytes:
            log.warning("over_budget", extra={"used": self.residency.used_bytes, "budget": self.residency.budget_bytes})
        largest = max(sound, key=lambda manifest: manifest.size_bytes, default=None)
        self.ready.start(largest.segments if largest is not None else ())
        self._checking = asyncio.create_task(self.checks.all(sound), name="check adopted sets")

    def _may_be_ready(self, limit_bytes: int) -> int:
        """Of the budget only what no set has; of the host's memory no more than half of what is left."""
        unused = self.residency.budget_bytes - self.residency.used_bytes
        return max(min(limit_bytes, unused, self.ready.size_bytes + self.arena.room() // 2), 0)

    async def serve(self, listener: socket.socket) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, most likely: those who are connected go on
                log.error("cannot_accept", extra={"why": str(error)})
                await asyncio.sleep(WORD_S)
                continue
            task = asyncio.create_task(self._converse(AsyncChannel(sock)))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def close(self) -> None:
        """Ends conversations and stagings; what is staged stays."""
        if self.loss.noticed():
            await self.stagings.close()
            await self.loss.lingered()
        tasks = [*self._connections, *([self._checking] if self._checking else [])]
        for task in tasks:
            task.cancel()
        await self.stagings.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.ready.close()
        await self.devices.close()
        self.checks.close()

    # ---- a conversation -------------------------------------------------------------------------------------

    async def _converse(self, channel: AsyncChannel) -> None:
        held = References(self.residency, self.devices, self.removals.remove, process=peer(channel.sock))
        try:
            if (refusal := admission(channel.sock, len(self._connections))) is not None:
                await send(channel, refusal)
                return
            while (request := await channel.receive(_requests, REQUEST_LIMIT, SEND_S)) is not None:
                try:
                    with self.loss.answering(request):
                        await self._answer(channel, request, held)
                except Refused as refused:
                    log.info(
                        "refused", extra={"request": request, "code": refused.refusal.code, "why": refused.refusal.message}
                    )
                    await send(channel, refused.refusal)
        except (ConnectionError, TimeoutError) as error:
            log.info("connection_lost", extra={"why": repr(error)})
        except Exception:
            log.exception("conversation_failed")
            with contextlib.suppress(ConnectionError, TimeoutError):
                await send(channel, Refusal(code="failed", message="the pool daemon failed at this: see its log"))
        finally:
            channel.close()
            await held.close()

    async def _answer(self, channel: AsyncChannel, request: Request, held: References) -> None:
        match request:
            case Stage():
                await self._stage(channel, request.source)
            case Attach():
                await attach(channel, request, held, self.arena)
            case Release(weight_set=weight_set, device=device):
                await send(channel, await held.release(weight_set, device))
            case Deposit():
                await self._deposit(channel, request)
            case Seal() | Written():
                raise Refused("failed", "there is nothing to seal: ask for a deposit first")
            case Find(source=source, form=form):
                await send(channel, await self.deposits.find(source, form))
            case Drop():
                await self.removals.drop(request.weight_set)
                await send(channel, await self._describe())
            case Verify():
                await self.checks.verify(channel, request.weight_set)
            case Describe():
                await send(channel, await self._describe())
            case _:
                assert_never(request)

    async def _stage(self, channel: AsyncChannel, source: str) -> None:
        staging = self.stagings.join(source)
        try:
            staged: Staged = await talking(channel, staging.task, staging.progress)
            log.info("staged", extra=msgspec.structs.asdict(staged))
            await send(channel, staged)
        except Cancelled:
            raise WireBroken("the staging was cancelled") from None
        finally:
            self.stagings.leave(staging)

    async def _deposit(self, channel: AsyncChannel, request: Deposit) -> None:
        pledge = await self.deposits.begin(request)
        try:
            await send(channel, Room())
            async with asyncio.timeout(SEND_S):
                await channel.send_fds(pledge.draft.fds)
            async with asyncio.timeout(WRITING_S):
                while isinstance(word := await channel.receive(_requests, REQUEST_LIMIT, SEND_S), Written):
                    pledge.digests.begin(word.tensors)
            if not isinstance(word, Seal):
                raise WireBroken("a deposit was not sealed")
            sealing = asyncio.ensure_future(self.deposits.seal(pledge))
            try:
                manifest, staged = await talking(channel, sealing, pledge.digests.progress)
            except BaseException:
                pledge.digests.progress.cancel()
                await asyncio.wait([sealing])
                sealing.exception()  # nobody asks for it any more
                raise
            self.devices.host.prepare(manifest)
            log.info("deposited", extra=msgspec.structs.asdict(staged))
            await send(channel, staged)
        finally:
            await self.deposits.end(pledge)

    async def _describe(self) -> Described:
        described = self.residency.describe(os.getpid())
        devices = await self.devices.describe()
        nodes = self.arena.nodes
        return msgspec.structs.replace(
            described,
            devices=devices,
            ready_bytes=self.ready.size_bytes,
            nodes=nodes.nodes(),
            placement=nodes.state,
            **self._told,
        )
