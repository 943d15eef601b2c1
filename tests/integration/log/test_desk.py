"""The desk: answers after the commit, each command once, all of it in order."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from controlplane import ids
from controlplane.answer import Queued
from controlplane.commands import Admit, BeginReign, CloseGateway, EndRequests, OpenGateway, Order, Tick
from controlplane.desk import Desk
from controlplane.envelope import Recorded
from controlplane.fleet import Fleet, fold
from controlplane.log import Conflict, Full, Log, MemoryLog, StaleEpoch
from controlplane.refusal import Code, Refusal
from tests.ruling import rule


def admit(model: str = "m", *, id: str | None = None, request: str | None = None) -> Order:
    body = Admit(
        request=request or ids.new(ids.REQUEST), model=model, gateway="gw_1", kind="chat", streamed=True, prompt_bytes=3
    )
    return Order(id=id or ids.new(ids.COMMAND), actor="gateway:gw_1", body=body)


@pytest.fixture(params=["memory", "postgres"])
def twin(request: pytest.FixtureRequest) -> Log:
    return MemoryLog() if request.param == "memory" else request.getfixturevalue("log")


class Commits:
    """Counts the appends of the log behind it, and can hold them up."""

    def __init__(self, log: Log) -> None:
        self._log, self.sizes, self.gate = log, list[int](), asyncio.Event()
        self.gate.set()

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)

    async def append(self, epoch: int, events: Sequence[Recorded]) -> None:
        await self.gate.wait()
        await self._log.append(epoch, events)
        self.sizes.append(len(events))


@pytest.fixture
async def desk(twin: Log) -> AsyncIterator[Desk]:
    epoch = await twin.begin_reign("h", 1)
    made = Desk(Commits(twin), Fleet(), epoch, rule)  # type: ignore[arg-type]
    running = asyncio.create_task(made.run())
    await made.submit(Order(id=ids.new(ids.COMMAND), actor="desk", body=BeginReign(host="h", pid=1, epoch=epoch)))
    yield made
    made.close()
    await running


def commits(desk: Desk) -> Commits:
    assert isinstance(desk._log, Commits)
    return desk._log


async def test_an_answer_names_positions_that_the_log_confirms(desk: Desk, twin: Log) -> None:
    order = admit()
    reply = await desk.submit(order)
    events = await twin.of_command(order.id)
    assert isinstance(reply, Queued)
    assert [event.type for event in events] == ["RequestAccepted", "RequestQueued"]
    assert (reply.position, reply.place, events[0].actor) == (events[-1].position, 1, "gateway:gw_1")


async def test_commands_that_wait_share_one_commit_and_see_each_other(desk: Desk, twin: Log) -> None:
    commits(desk).gate.clear()
    replies = [asyncio.create_task(desk.submit(admit())) for _ in range(20)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not any(reply.done() for reply in replies)
    commits(desk).gate.set()
    answered = await asyncio.gather(*replies)
    assert [reply.place for reply in answered if isinstance(reply, Queued)] == list(range(1, 21))
    assert len(commits(desk).sizes) <= 3
    assert fold(await twin.read(0)) == desk.fleet


async def test_a_repeated_command_gets_its_first_answer_and_writes_nothing(desk: Desk, twin: Log) -> None:
    order = admit()
    first = await desk.submit(order)
    for _ in range(3):
        await desk.submit(admit())
    head = await twin.head()
    assert await desk.submit(order) == first, "refused anew, but the log knows the first answer"
    assert await twin.head() == head


async def test_a_repeated_command_that_decides_otherwise_today_still_gets_its_first_answer(desk: Desk, twin: Log) -> None:
    first = await desk.submit(admit(id="cmd_1", request="req_1"))
    commits(desk).gate.clear()
    others = [asyncio.create_task(desk.submit(admit())) for _ in range(2)]
    await asyncio.sleep(0.01)
    # Another body under the id: `decide` gives it events, the append finds the id in the log and takes the batch back.
    again = asyncio.create_task(desk.submit(admit(id="cmd_1", request="req_9")))
    others.append(asyncio.create_task(desk.submit(admit())))
    commits(desk).gate.set()
    assert await again == first
    assert [reply.place for reply in await asyncio.gather(*others) if isinstance(reply, Queued)] == [2, 3, 4]
    assert "req_9" not in desk.fleet.requests
    assert fold(await twin.read(0)) == desk.fleet


async def test_one_command_sent_twice_at_once_is_carried_out_once(desk: Desk, twin: Log) -> None:
    order = admit()
    replies = await asyncio.gather(*(desk.submit(order) for _ in range(5)))
    assert len(set(map(repr, replies))) == 1
    assert len(await twin.of_command(order.id)) == 2


async def test_a_refusal_writes_nothing_and_is_decided_again(desk: Desk, twin: Log) -> None:
    head = await twin.head()
    reply = await desk.submit(admit("never", id="cmd_1"))
    assert reply == Refusal(Code.MODEL_UNKNOWN, "no such model", None, {"near": "ever"})
    assert await twin.head() == head
    assert isinstance(await desk.submit(admit("m", id="cmd_1")), Queued)


async def test_a_broken_decision_hurts_nobody_else(desk: Desk) -> None:
    broken, fine = await asyncio.gather(desk.submit(admit("broken")), desk.submit(admit()))
    assert isinstance(broken, Refusal)
    assert broken.code is Code.FAULT
    assert isinstance(fine, Queued)


async def test_what_the_log_can_not_keep_is_refused_and_those_beside_it_are_carried_out(desk: Desk, twin: Log) -> None:
    """Else one engine's last words would end every decider that hears them, for ever."""
    poison = Order(id="cmd_p", actor="gateway:g", body=OpenGateway(gateway="g", host="last words: \0", pid=1))
    commits(desk).gate.clear()
    replies = [asyncio.create_task(desk.submit(order)) for order in (admit(), poison, admit(), poison)]
    await asyncio.sleep(0)
    commits(desk).gate.set()
    first, refused, second, again = await asyncio.gather(*replies)
    assert isinstance(first, Queued) and isinstance(second, Queued)
    assert (first.place, second.place) == (1, 2)
    for reply in (refused, again, await desk.submit(poison)):
        assert isinstance(reply, Refusal)
        assert reply.code is Code.FAULT
    assert fold(await twin.read(0)) == desk.fleet


async def test_a_full_disk_refuses_everybody_and_ends_nobody(desk: Desk, twin: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    before = desk.fleet

    async def no_room(epoch: int, events: Sequence[Recorded]) -> None:
        raise Full("could not extend file")

    with monkeypatch.context() as full:
        full.setattr(commits(desk), "append", no_room)
        replies = await asyncio.gather(*(desk.submit(opened(f"gw_{n}")) for n in range(3)))
    for reply in replies:
        assert isinstance(reply, Refusal)
        assert (reply.code, reply.retry_after_ms, reply.details) == (Code.UNAVAILABLE, 5000, {"reason": "disk_full"})
    assert desk.fleet is before
    assert not isinstance(await desk.submit(opened("gw_1")), Refusal)
    assert await twin.head() == desk.fleet.position


async def test_whoever_asks_hears_that_the_disk_is_full_until_there_is_room_again(
    twin: Log, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to write anything for that: who sends requests elsewhere while it is full would never do so."""
    monkeypatch.setattr("controlplane.desk.FULL_LOOK_S", 0)

    def asked() -> Order:
        return Order(id=ids.new(ids.COMMAND), actor="gateway:gw_1", body=EndRequests(ends=()))

    async def no_room(*_: object) -> None:
        raise Full("could not extend file")

    assert not isinstance(await desk.submit(asked()), Refusal)
    with monkeypatch.context() as full:
        full.setattr(commits(desk), "append", no_room)
        full.setattr(twin, "room", no_room)
        assert not isinstance(await desk.submit(asked()), Refusal), "nothing had to be written yet"
        await desk.submit(opened("gw_1"))
        for _ in range(2):
            reply = await desk.submit(asked())
            assert isinstance(reply, Refusal) and reply.details == {"reason": "disk_full"}
    head = await twin.head()
    assert not isinstance(await desk.submit(asked()), Refusal)
    assert await twin.head() == head, "the try has left nothing behind"


def opened(gateway: str) -> Order:
    return Order(id=ids.new(ids.COMMAND), actor=f"gateway:{gateway}", body=OpenGateway(gateway=gateway, host="h", pid=1))


async def test_a_command_that_contradicts_the_log_ends_one_decider_and_not_the_next(twin: Log) -> None:
    epoch = await twin.begin_reign("h", 1)
    misled = Desk(twin, Fleet(), epoch, rule)
    running = asyncio.create_task(misled.run())
    for number, body in enumerate(
        (opening := OpenGateway(gateway="g", host="h", pid=1), CloseGateway(gateway="g", code="stopped"))
    ):
        await misled.submit(Order(id=f"cmd_{number}", actor="gateway:g", body=body))
    again = Order(id="cmd_again", actor="gateway:g", body=opening)  # its stream has ended: version 1 is taken
    replies = [asyncio.create_task(misled.submit(order)) for order in (admit(), again)]
    with pytest.raises(Conflict):
        await running
    fine, refused = await asyncio.gather(*replies)
    assert isinstance(fine, Queued)
    assert isinstance(refused, Refusal)
    assert refused.code is Code.FAULT
    assert set(fold(await twin.read(0)).requests) == {fine.request}


async def test_a_tick_that_changes_nothing_costs_no_commit(desk: Desk) -> None:
    before = list(commits(desk).sizes)
    await desk.submit(Order(id=ids.new(ids.COMMAND), actor="desk", body=Tick()))
    assert commits(desk).sizes == before


async def test_a_deposed_decider_answers_nobody_and_stops(twin: Log) -> None:
    deposed = Desk(twin, Fleet(), await twin.begin_reign("h", 1), rule)
    await twin.begin_reign("other", 2)
    running = asyncio.create_task(deposed.run())
    waiting = asyncio.create_task(deposed.submit(admit()))
    with pytest.raises(StaleEpoch):
        await running
    assert not waiting.done()
    waiting.cancel()
    assert await twin.head() == 0


async def test_what_waits_at_the_end_is_still_answered(twin: Log) -> None:
    closing = Desk(twin, Fleet(), await twin.begin_reign("h", 1), rule)
    waiting = asyncio.create_task(
        closing.submit(Order(id="cmd_1", actor="gateway:g", body=OpenGateway(gateway="g", host="h", pid=1)))
    )
    await asyncio.sleep(0)
    closing.close()
    await closing.run()
    assert (await waiting).position == 1  # type: ignore[union-attr]
