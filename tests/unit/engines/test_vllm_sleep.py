"""The vLLM engine to sleep and back: what its prefix cache remembers, memory that runs out. Core and backend are played."""

from types import SimpleNamespace
from typing import Any

import pytest

from worker.engines.interface import EngineFault
from worker.engines.vllm import VllmEngine
from worker.engines.vllm_parking import PARKED_STACK_BYTES


class Inside:
    """Core and backend in one; notes what is done, in order."""

    def __init__(self, *, forgets: bool | None = True) -> None:
        self.done: list[str] = []
        self._forgets = forgets
        self.batch_queue = None
        self.scheduler = SimpleNamespace(has_requests=lambda: False)
        self.full = False
        self.kv = SimpleNamespace(create=self.create, release=lambda: self.done.append("release"))
        self.weights = SimpleNamespace(attached="ws_1", own=False)

    def reset_prefix_cache(self) -> bool | None:
        self.done.append("forget")
        return self._forgets

    def attach(self, weight_set: str, *, pool_socket: str) -> str:
        self.done.append(f"attach {weight_set}")
        if self.full:
            raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: 512 bytes, 100 are free")
        return "filled"

    def create(self) -> None:
        self.done.append("create")
        if self.full:
            raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: 512 bytes, 100 are free")

    def exchange(self, weight_set: str) -> str:
        self.done.append(f"exchange {weight_set}")
        return "filled"


def engine(inside: Inside) -> Any:
    made: Any = VllmEngine.__new__(VllmEngine)
    made._core = made._backend = inside
    made._running, made._awake, made._device, made._gang = {}, True, "GPU-1", None
    return made


def test_c22_the_prefix_cache_is_forgotten_before_its_memory_goes() -> None:
    inside = Inside()
    slept = engine(inside)
    slept.sleep()
    assert inside.done == ["forget", "release"]
    assert not slept._awake


def test_c22_it_is_forgotten_before_other_weights_come() -> None:
    inside = Inside()
    engine(inside).attach("/pool.sock", "ws_2")
    assert inside.done == ["forget", "exchange ws_2"]


def test_c22_a_cache_that_is_not_forgotten_ends_the_step_and_nothing_follows() -> None:
    inside = Inside(forgets=False)
    slept = engine(inside)
    for act in (slept.sleep, lambda: slept.attach("/pool.sock", "ws_2")):
        with pytest.raises(EngineFault) as fault:
            act()
        assert fault.value.code == "cache_kept"
    assert inside.done == ["forget", "forget"]


def test_c08_a_sleep_with_requests_is_refused_and_touches_nothing() -> None:
    inside = Inside()
    busy = engine(inside)
    busy._running = {"req_1": object()}
    with pytest.raises(EngineFault, match="1 requests run: drain first"):
        busy.sleep()
    assert inside.done == []


@pytest.mark.parametrize("mapped", [True, False])
def test_c16_memory_that_runs_out_half_way_through_a_wake_is_given_back_and_the_next_wake_succeeds(mapped: bool) -> None:
    inside = Inside()
    woken = engine(inside)
    woken.sleep()
    inside.weights.attached = "ws_1" if mapped else None
    inside.done.clear()
    inside.full = True
    with pytest.raises(EngineFault, match="512 bytes, 100 are free") as fault:
        woken.wake("m") if mapped else woken.attach("/pool.sock", "ws_1")
    assert (fault.value.code, fault.value.fatal) == ("no_memory", False)
    assert inside.done == ["create" if mapped else "attach ws_1", "release"]
    assert not woken._awake
    inside.full, inside.weights.attached = False, "ws_1"
    woken.wake("m")
    assert woken._awake


class Ranks(Inside):
    """A gang."""

    def trim(self) -> None:
        self.done.append("trim")

    def checkpoint_prepare(self, stack_bytes: int) -> None:
        self.done.append(f"let go, stacks {stack_bytes}")

    def checkpoint_restore(self) -> None:
        self.done.append("connect")

    def capture_graphs(self) -> None:
        self.done.append("capture")


def test_a_gang_lets_go_after_what_it_may_not_have_and_captures_once_its_memory_is_there() -> None:
    inside = Ranks()
    gang = engine(inside)
    gang._gang = inside
    with pytest.raises(EngineFault, match="sleep and detach first"):
        gang.scrub()
    gang.sleep()
    inside.weights.attached, inside.weights.own = None, False
    inside.done.clear()
    gang.scrub()
    assert gang._parked
    gang.revived()
    assert not gang._parked
    inside.weights.attached = "ws_1"
    gang.wake("m")
    assert inside.done == ["trim", f"let go, stacks {PARKED_STACK_BYTES}", "connect", "create", "capture"]


def test_a_gang_that_does_not_let_go_is_not_parked() -> None:
    inside = Ranks()
    gang = engine(inside)
    gang._gang, gang._parked = inside, False
    gang.sleep()
    inside.weights.attached, inside.weights.own = None, False

    def shares(_: int) -> None:
        raise EngineFault("not_checkpointable", "rank 1 shares a file")

    inside.checkpoint_prepare = shares  # type: ignore[method-assign]
    with pytest.raises(EngineFault, match="rank 1 shares a file"):
        gang.scrub()
    assert not gang._parked
