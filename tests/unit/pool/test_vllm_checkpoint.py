"""What a rank gives up before a checkpoint, and makes anew behind it. vLLM's own objects are played."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from pool import vllm_group

done: list[str] = []


class Communicator:
    """vLLM's over NCCL: made of its group by all ranks at once."""

    made = 0

    def __init__(self, group: str, device: str) -> None:
        Communicator.made += 1
        self.group, self.device = group, device
        self.comm: int | None = Communicator.made
        self.available, self.disabled = True, False
        self.nccl = SimpleNamespace(ncclCommDestroy=lambda comm: done.append(f"destroy {comm}"))


class Wrapper:
    """Of a compiled piece's graphs."""

    _all_instances: ClassVar[list["Wrapper"]] = []

    def __init__(self) -> None:
        self.concrete_cudagraph_entries = {1: "graph"}

    @classmethod
    def clear_all_graphs(cls) -> None:
        for one in cls._all_instances:
            one.concrete_cudagraph_entries.clear()


def group(name: str, *, size: int = 2, initialized: bool = False, **others: Any) -> Any:
    communicator = SimpleNamespace(pynccl_comm=Communicator(name, "cuda:0"), **others) if size > 1 else None
    backend = SimpleNamespace(_is_initialized=lambda: initialized)
    return SimpleNamespace(
        unique_name=name, world_size=size, device_communicator=communicator,
        device_group=SimpleNamespace(_get_backend=lambda _device: backend),
    )  # fmt: skip


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Those of a rank: tensor parallel over two, and pipelines of one."""
    found = {"tp:0": group("tp:0"), "pp:0": group("pp:0", size=1)}
    names = (
        "vllm", "vllm.distributed", "vllm.distributed.parallel_state", "vllm.distributed.device_communicators",
        "vllm.distributed.device_communicators.pynccl", "vllm.compilation", "vllm.compilation.cuda_graph",
    )  # fmt: skip
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    state = modules["vllm.distributed.parallel_state"]
    state._groups = {name: (lambda one=one: one) for name, one in found.items()} | {"gone:0": lambda: None}
    modules["vllm.distributed"].parallel_state = state
    modules["vllm.distributed.device_communicators.pynccl"].PyNcclCommunicator = Communicator
    modules["vllm.compilation.cuda_graph"].CUDAGraphWrapper = Wrapper
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    stacks = {"size": 1024}

    def resize(size: int) -> int:
        before, stacks["size"] = stacks["size"], size
        done.append(f"stacks {size}")
        return before

    monkeypatch.setattr(vllm_group, "_cuda", lambda: SimpleNamespace(stacks=resize))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    done.clear()
    Wrapper._all_instances.clear()
    yield found
    Wrapper._all_instances.clear()


class Runner:
    """vLLM's second one, which keeps whole graphs itself."""

    def __init__(self) -> None:
        self.cudagraph_manager = SimpleNamespace(graphs={1: "graph"}, _graphs_captured=True)
        self.fails = False

    def capture_model(self) -> int:
        done.append("capture")
        assert not self.cudagraph_manager.graphs, "as vLLM has it: none is captured twice"
        self.cudagraph_manager.graphs[1] = "again"
        if self.fails:
            raise RuntimeError("out of memory")
        self.cudagraph_manager._graphs_captured = True
        return 0


def test_graphs_go_before_communicators_and_these_are_made_anew_under_the_objects_that_vllm_knows(
    groups: dict[str, Any],
) -> None:
    runner, known = Runner(), groups["tp:0"].device_communicator.pynccl_comm
    first = known.comm
    assert vllm_group.disband(runner, 16) == (True, 1024)
    assert (runner.cudagraph_manager.graphs, runner.cudagraph_manager._graphs_captured, known.comm) == ({}, False, None)
    assert done == [f"destroy {first}", "stacks 16"]
    vllm_group.regroup(1024)
    assert groups["tp:0"].device_communicator.pynccl_comm is known
    assert known.comm not in (None, first) and (known.group, known.device) == ("tp:0", "cuda:0")
    assert done[-1] == "stacks 1024"
    vllm_group.capture(runner)
    assert runner.cudagraph_manager.graphs == {1: "again"}


def test_graphs_of_compiled_pieces_go_too_where_vllms_first_runner_keeps_them(groups: dict[str, Any]) -> None:
    Wrapper._all_instances.append(Wrapper())
    assert vllm_group.disband(SimpleNamespace(), 16)[0]
    assert not Wrapper._all_instances[0].concrete_cudagraph_entries
    assert not vllm_group.disband(SimpleNamespace(), 16)[0], "there were none any more"


def test_what_is_not_whole_is_not_kept_of_a_capture_that_failed(groups: dict[str, Any]) -> None:
    runner = Runner()
    vllm_group.disband(runner, 16)
    runner.fails = True
    with pytest.raises(RuntimeError):
        vllm_group.capture(runner)
    assert (runner.cudagraph_manager.graphs, runner.cudagraph_manager._graphs_captured) == ({}, False)
    runner.fails = False
    vllm_group.capture(runner)
    assert runner.cudagraph_manager._graphs_captured


def test_a_driver_that_keeps_the_stacks_as_they_are_keeps_nobody_on_his_gpu(
    groups: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: int) -> int:
        raise OSError(1, "cuCtxSetLimit: CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(vllm_group, "_cuda", lambda: SimpleNamespace(stacks=refused))
    assert vllm_group.disband(Runner(), 16) == (True, 0)
    vllm_group.regroup(0)
    assert groups["tp:0"].device_communicator.pynccl_comm.comm is not None


@pytest.mark.parametrize("other", ["ca_comm", "symm_mem_comm", "fi_ar_comm", "fi_pcie_ipc_ar_comm", "one_of_tomorrow_comm"])
def test_another_way_of_sharing_memory_is_found(groups: dict[str, Any], other: str) -> None:
    assert vllm_group.bond() is None
    setattr(groups["tp:0"].device_communicator, other, SimpleNamespace(disabled=True))
    assert vllm_group.bond() is None
    setattr(groups["tp:0"].device_communicator, other, SimpleNamespace(disabled=False))
    assert vllm_group.bond() == "tp:0 reduces by SimpleNamespace, which shares memory between ranks"


def test_a_communicator_of_torchs_own_is_found(groups: dict[str, Any]) -> None:
    groups["tp:0"].device_group = SimpleNamespace(_get_backend=lambda _: SimpleNamespace(_is_initialized=lambda: True))
    assert vllm_group.bond() == "torch has a communicator of its own for tp:0"


def test_a_group_that_has_no_gpus_has_none(groups: dict[str, Any]) -> None:
    def refused(_: torch.device) -> Any:
        raise RuntimeError("no backend type associated with device type cuda")

    groups["tp:0"].device_group = SimpleNamespace(_get_backend=refused)
    assert vllm_group.bond() is None
