"""The ranks of a gang as one: all of them or none, whatever one of them does."""

import multiprocessing
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from pool.client import PoolRefused
from pool.native import LayoutDiffers
from pool.ranks import Answer, Word, form_of
from worker.engines.interface import EngineFault
from worker.engines.vllm_gang import Gang

ASLEEP = Word(pid=1, own=False, attached=None, shared_bytes=100, bytes_mapped=0, bytes_kv=0)


class Ranks:
    """Plays vLLM's engine core: every order goes to every rank, which answers for itself."""

    def __init__(self, size: int) -> None:
        self.words = [replace(ASLEEP, pid=rank) for rank in range(size)]
        self.faults: dict[tuple[str, int], tuple[str, str, str]] = {}
        self.silent = False
        self.orders: list[str] = []
        self.told: list[tuple[Any, ...]] = []
        self.found: dict[tuple[str, int], Any] = {}
        self.ends = [os.pipe() for _ in range(size)]
        workers = [SimpleNamespace(proc=SimpleNamespace(sentinel=reader, kill=lambda: None)) for reader, _ in self.ends]
        self.model_executor = SimpleNamespace(workers=workers)

    def collective_rpc(self, method: str, *, timeout: float, args: tuple[Any, ...]) -> list[Answer]:
        assert method == "enginehouse"
        self.orders.append(args[0])
        self.told.append(args)
        if self.silent:
            raise TimeoutError(f"no answer in {timeout} s")
        return [self._answer(rank, *args) for rank in range(len(self.words))]

    def _answer(self, rank: int, order: str, *args: Any) -> Answer:
        if (fault := self.faults.get((order, rank))) is not None:
            return Answer(None, fault, self.words[rank])
        found: Any = None
        match order:
            case "attach":
                self.words[rank] = replace(self.words[rank], attached=args[1].split("+")[rank], bytes_mapped=100, bytes_kv=7)
                found = (100, 5.0 + rank)
            case "detach":
                self.words[rank] = replace(self.words[rank], attached=None, bytes_mapped=0, bytes_kv=0)
            case "find":
                found = f"ws_{form_of(args[2], rank, len(self.words))}"
            case "deposit":
                found = (f"ws_{rank}", 100, 50)
            case "kv_create" | "kv_release":
                self.words[rank] = replace(self.words[rank], bytes_kv=7 if order == "kv_create" else 0)
            case _:
                found = self.found.get((order, rank))
        return Answer(found, None, self.words[rank])


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """They die after the test. A gang's death would be this process's, and so would be that of one of their pipes later on."""
    status, before = list[int](), set(threading.enumerate())
    monkeypatch.setattr(os, "_exit", status.append)
    made = Ranks(2)
    yield made
    for _, writer in made.ends:
        os.close(writer)
    for watch in set(threading.enumerate()) - before:
        watch.join(30)
    assert status == [70]
    for reader, _ in made.ends:
        os.close(reader)


def test_all_ranks_attach_their_own_set_at_once(ranks: Ranks) -> None:
    gang = Gang(ranks, ("GPU-a", "GPU-b"))
    filled = gang.attach("ws_0+ws_1", pool_socket="/pool.sock")
    assert [word.attached for word in gang.words] == ["ws_0", "ws_1"]
    assert (gang.weights.attached, gang.weights.bytes_mapped, gang.kv.size_bytes) == ("ws_0+ws_1", 200, 14)
    assert (filled.copied_bytes, filled.took_ms) == (200, 6.0)


def test_a_rank_that_cannot_wake_sends_the_others_back_to_sleep(ranks: Ranks) -> None:
    gang = Gang(ranks, ("GPU-a", "GPU-b"))
    ranks.faults["attach", 1] = ("PoolRefused", "device_full", "it needs 9 bytes of 4")
    with pytest.raises(PoolRefused, match="rank 1 of 2: it needs 9 bytes of 4") as refused:
        gang.attach("ws_0+ws_1", pool_socket="/pool.sock")
    assert refused.value.code == "device_full"
    assert [(word.attached, word.bytes_mapped, word.bytes_kv) for word in gang.words] == [(None, 0, 0)] * 2


def test_a_layout_that_differs_is_told_as_one(ranks: Ranks) -> None:
    gang = Gang(ranks, ("GPU-a", "GPU-b"))
    ranks.faults["attach", 0] = ("LayoutDiffers", "", "other layout")
    with pytest.raises(LayoutDiffers, match="rank 0 of 2: other layout"):
        gang.attach("ws_0+ws_1", pool_socket="/pool.sock")


def test_a_silent_rank_is_the_end_of_the_gang(ranks: Ranks) -> None:
    """C26: one rank is never ready."""
    gang = Gang(ranks, ("GPU-a", "GPU-b"))
    ranks.silent = True
    with pytest.raises(EngineFault) as fault:
        gang.attach("ws_0+ws_1", pool_socket="/pool.sock")
    assert (fault.value.code, fault.value.fatal) == ("rank_silent", True)


def test_each_rank_brings_and_finds_its_own_part(ranks: Ranks) -> None:
    gang = Gang(ranks, ("GPU-a", "GPU-b"))
    assert gang.weights.deposit("/pool.sock", "/models/a", "cfg_1").weight_set == "ws_0+ws_1"
    assert gang.find("/pool.sock", "/models/a", "cfg_1") == "ws_cfg_1.0of2+ws_cfg_1.1of2"


def test_kv_memory_that_is_there_is_not_asked_for_again(ranks: Ranks) -> None:
    gang = Gang(ranks, ("GPU-a", "GPU-b"))
    gang.attach("ws_0+ws_1", pool_socket="/pool.sock")
    gang.kv.create()
    assert "kv_create" not in ranks.orders
    gang.kv.release()
    gang.kv.create()
    assert ranks.orders[-2:] == ["kv_release", "kv_create"]


def test_graphs_of_all_ranks_are_counted_with_each_order(ranks: Ranks) -> None:
    ranks.words = [replace(word, graphs=35) for word in ranks.words]
    gang = Gang(ranks, ("GPU-a", "GPU-b"))
    assert gang.graphs == 70
    ranks.words[1] = replace(ranks.words[1], graphs=36)  # one captured again while it woke
    gang.attach("ws_0+ws_1", pool_socket="/pool.sock")
    assert gang.graphs == 71


def checkpointable(ranks: Ranks, *, graphs: int) -> None:
    for rank in range(2):
        ranks.found["release_graphs", rank] = (graphs, 0)
        ranks.found["checkpoint_prepare", rank] = 1024 * (rank + 1)


def test_around_a_checkpoint_ranks_let_go_and_connect_again_and_capture_at_the_next_wake_alone(ranks: Ranks) -> None:
    gang = Gang(ranks, ("GPU-a", "GPU-b"))
    gang.capture_graphs()
    checkpointable(ranks, graphs=35)
    gang.checkpoint_prepare(16)
    gang.checkpoint_restore()
    gang.capture_graphs()
    gang.capture_graphs()
    assert ranks.told[1:] == [
        ("checkpoint_hindrance",), ("release_graphs",), ("checkpoint_prepare", 16), ("checkpoint_restore", (1024, 2048)),
        ("capture_graphs",),
    ], "graphs before communicators, each rank its own stacks, and once"  # fmt: skip


def test_a_gang_without_graphs_captures_none(ranks: Ranks) -> None:
    gang = Gang(ranks, ("GPU-a", "GPU-b"))
    checkpointable(ranks, graphs=0)
    gang.checkpoint_prepare(16)
    gang.checkpoint_restore()
    gang.capture_graphs()
    assert ranks.orders[-1] == "checkpoint_restore"


@pytest.mark.parametrize("kind", ["RuntimeError", "OSError", "TimeoutError"])
def test_ranks_of_which_one_has_its_graphs_and_another_has_not_are_the_end_of_the_gang(ranks: Ranks, kind: str) -> None:
    gang = Gang(ranks, ("GPU-a", "GPU-b"))
    checkpointable(ranks, graphs=35)
    gang.checkpoint_prepare(16)
    gang.checkpoint_restore()
    ranks.faults["capture_graphs", 1] = (kind, "", "out of memory")
    with pytest.raises(EngineFault, match="could not be captured again: rank 1 of 2: out of memory") as fault:
        gang.capture_graphs()
    assert (fault.value.code, fault.value.fatal) == ("graphs_lost", True)


def test_ranks_that_share_more_than_they_give_up_say_so_and_sleep_on(ranks: Ranks) -> None:
    gang = Gang(ranks, ("GPU-a", "GPU-b"))
    ranks.found["checkpoint_hindrance", 1] = "tp:0 has a CustomAllreduce"
    with pytest.raises(EngineFault, match="rank 1 can't be taken off its GPU: tp:0 has a CustomAllreduce") as fault:
        gang.checkpoint_prepare(16)
    assert ranks.orders[-1] == "checkpoint_hindrance", "none has given anything up"
    assert (fault.value.code, fault.value.fatal) == ("not_checkpointable", False)


def test_graphs_that_somebody_holds_still_keep_the_gang_and_those_that_went_are_captured_again(ranks: Ranks) -> None:
    gang = Gang(ranks, ("GPU-a", "GPU-b"))
    checkpointable(ranks, graphs=35)
    ranks.found["release_graphs", 1] = (36, 1)
    with pytest.raises(EngineFault, match="rank 1 can't be taken off its GPU: 1 CUDA graphs are held still") as fault:
        gang.checkpoint_prepare(16)
    assert (fault.value.code, fault.value.fatal) == ("not_checkpointable", False)
    gang.capture_graphs()
    assert ranks.orders[-2:] == ["release_graphs", "capture_graphs"], "communicators stay"


def _die_with_a_rank() -> None:
    ranks = Ranks(2)
    Gang(ranks, ("GPU-a", "GPU-b"))
    os.close(ranks.ends[1][1])  # rank 1 has ended
    threading.Event().wait(60)


def test_a_rank_that_dies_takes_the_engine_with_it() -> None:
    process = multiprocessing.get_context("spawn").Process(target=_die_with_a_rank)
    process.start()
    process.join(30)
    assert process.exitcode == 70
