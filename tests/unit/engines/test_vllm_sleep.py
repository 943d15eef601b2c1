"""The vLLM engine to sleep and back: what its prefix cache remembers, memory that runs out. Core and backend are played."""

from types import SimpleNamespace
from typing import Any

import pytest

from worker.engines.interface import EngineFault
from worker.engines.vllm import VllmEngine


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
