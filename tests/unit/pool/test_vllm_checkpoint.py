"""What a rank gives up before a checkpoint, and makes anew behind it. vLLM's own objects are played."""

import gc
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from pool import vllm_checkpoint, vllm_graphs

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


class Graph:
    """torch's, without a GPU."""

    def capture_end(self) -> None:
        done.append("captured")


def captured() -> Any:
    """As vLLM does it."""
    graph: Any = torch.cuda.CUDAGraph()
    graph.capture_end()
    return graph


class Wrapper:
    """Of a compiled piece's graphs."""

    _all_instances: ClassVar[list["Wrapper"]] = []

    def __init__(self) -> None:
        self.entries = {1: captured()}
        Wrapper._all_instances.append(self)

    @classmethod
    def clear_all_graphs(cls) -> None:
        for one in cls._all_instances:
            one.entries.clear()


class Runner:
    """vLLM's second one, which keeps whole graphs itself."""

    def __init__(self) -> None:
        self.cudagraph_manager: Any = SimpleNamespace(graphs={1: captured()}, _graphs_captured=True)

    def capture_model(self) -> int:
        assert not self.cudagraph_manager.graphs, "as vLLM has it: none is captured twice"
        self.cudagraph_manager.graphs[1] = captured()
        self.cudagraph_manager._graphs_captured = True
        return 0


class Manager(SimpleNamespace):
    """Of vLLM's later versions."""

    def release_graphs(self) -> None:
        done.append("released by itself")
        self.graphs.clear()


def group(name: str, *, size: int = 2) -> Any:
    communicator = SimpleNamespace(pynccl_comm=Communicator(name, "cuda:0")) if size > 1 else None
    return SimpleNamespace(
        unique_name=name, world_size=size, device_communicator=communicator,
        device_group=SimpleNamespace(_get_backend=lambda _device: SimpleNamespace(_is_initialized=lambda: False)),
    )  # fmt: skip


FLASHINFER = "vllm.distributed.device_communicators.flashinfer_all_reduce"


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Those of a rank: tensor parallel over two, and pipelines of one."""
    found = {"tp:0": group("tp:0"), "pp:0": group("pp:0", size=1)}
    names = (
        "vllm", "vllm.distributed", "vllm.distributed.parallel_state", "vllm.distributed.device_communicators",
        "vllm.distributed.device_communicators.pynccl", FLASHINFER, "vllm.compilation", "vllm.compilation.cuda_graph",
        "vllm.compilation.breakable_cudagraph",
    )  # fmt: skip
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    state = modules["vllm.distributed.parallel_state"]
    state._groups = {name: (lambda one=one: one) for name, one in found.items()} | {"gone:0": lambda: None}
    modules["vllm.distributed"].parallel_state = state
    modules["vllm.distributed.device_communicators"].flashinfer_all_reduce = modules[FLASHINFER]
    modules[FLASHINFER]._fi_ar_workspace = modules[FLASHINFER]._fi_ar_quant_workspace = None
    modules["vllm.distributed.device_communicators.pynccl"].PyNcclCommunicator = Communicator
    modules["vllm.compilation.cuda_graph"].CUDAGraphWrapper = Wrapper
    modules["vllm.compilation.breakable_cudagraph"].BreakableCUDAGraphWrapper = type(
        "Breakable", (Wrapper,), {"_all_instances": []}
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    stacks = {"size": 1024}

    def resize(size: int) -> int:
        before, stacks["size"] = stacks["size"], size
        done.append(f"stacks {size}")
        return before

    monkeypatch.setattr(vllm_checkpoint, "_cuda", lambda: SimpleNamespace(stacks=resize))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("Graph", (Graph,), {"capture_end": Graph.capture_end}))
    monkeypatch.setattr(vllm_graphs, "_there", weakref.WeakSet())
    vllm_graphs.count()
    Wrapper._all_instances.clear()
    done.clear()
    yield found
    Wrapper._all_instances.clear()


def test_communicators_end_and_are_made_anew_under_the_objects_that_vllm_knows(groups: dict[str, Any]) -> None:
    worker, known = SimpleNamespace(), groups["tp:0"].device_communicator.pynccl_comm
    first = known.comm
    assert vllm_checkpoint.prepare(worker, 16) == 1024
    assert known.comm is None
    assert done == [f"destroy {first}", "stacks 16"]
    vllm_checkpoint.restore(worker, 1024)
    assert groups["tp:0"].device_communicator.pynccl_comm is known
    assert known.comm not in (None, first) and (known.group, known.device) == ("tp:0", "cuda:0")
    assert done[-1] == "stacks 1024"


def test_vllms_own_hooks_are_called_around_it_where_there_are_any(groups: dict[str, Any]) -> None:
    worker = SimpleNamespace(
        checkpoint_prepare=lambda: done.append("prepared"),
        checkpoint_restore=lambda: done.append(f"restored {groups['tp:0'].device_communicator.pynccl_comm.comm is not None}"),
    )
    vllm_checkpoint.prepare(worker, 16)
    assert done[0] == "prepared"
    vllm_checkpoint.restore(worker, 1024)
    assert done[-1] == "restored True", "with communicators to do it by"


@pytest.mark.parametrize("manager", [SimpleNamespace, Manager])
def test_graphs_go_whoever_of_vllm_keeps_them_and_are_captured_again(groups: dict[str, Any], manager: type) -> None:
    runner = Runner()
    runner.cudagraph_manager = manager(**vars(runner.cudagraph_manager))
    Wrapper()
    assert vllm_checkpoint.release_graphs(runner) == (2, 0)
    assert ("released by itself" in done) == (manager is Manager)
    assert vllm_checkpoint.release_graphs(runner) == (0, 0), "there were none any more"
    before = vllm_graphs.captured()
    vllm_checkpoint.capture_graphs(runner)
    assert (vllm_graphs.there(), vllm_graphs.captured() - before) == (1, 1)


def test_a_runner_without_graphs_has_none_to_give_up(groups: dict[str, Any]) -> None:
    assert vllm_checkpoint.release_graphs(SimpleNamespace()) == (0, 0)


def test_graphs_that_only_a_cycle_holds_are_gone_and_what_another_holds_is_told(groups: dict[str, Any]) -> None:
    cycle: dict[str, Any] = {"graph": captured()}
    cycle["itself"] = cycle
    del cycle
    another = captured()
    gc.freeze()  # as vLLM does at the end of its start
    assert vllm_checkpoint.release_graphs(Runner()) == (3, 1)
    gc.unfreeze()
    del another
    assert vllm_graphs.there() == 0


def test_a_driver_that_keeps_the_stacks_as_they_are_keeps_nobody_on_his_gpu_and_it_is_told(
    groups: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(_: int) -> int:
        raise OSError(1, "cuCtxSetLimit: CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(vllm_checkpoint, "_cuda", lambda: SimpleNamespace(stacks=refused))
    assert vllm_checkpoint.prepare(SimpleNamespace(), 16) == 0
    assert "CUDA_ERROR_INVALID_VALUE" in capsys.readouterr().err
    vllm_checkpoint.restore(SimpleNamespace(), 0)
    assert groups["tp:0"].device_communicator.pynccl_comm.comm is not None


@pytest.mark.parametrize("other", ["ca_comm", "symm_mem_comm", "fi_ar_comm", "fi_pcie_ipc_ar_comm", "one_of_tomorrow_comm"])
def test_another_way_of_sharing_memory_is_found(groups: dict[str, Any], other: str) -> None:
    assert vllm_checkpoint.hindrance() is None
    setattr(groups["tp:0"].device_communicator, other, SimpleNamespace(disabled=True))
    assert vllm_checkpoint.hindrance() is None
    setattr(groups["tp:0"].device_communicator, other, SimpleNamespace(disabled=False))
    assert vllm_checkpoint.hindrance() == "tp:0 has a SimpleNamespace, which shares memory between ranks"


def test_so_is_what_experts_are_exchanged_by(groups: dict[str, Any]) -> None:
    groups["tp:0"].device_communicator.all2all_manager = SimpleNamespace()
    assert vllm_checkpoint.hindrance() == "tp:0 has a SimpleNamespace, which shares memory between ranks"


@pytest.mark.parametrize("name", ["_fi_ar_workspace", "_fi_ar_quant_workspace"])
def test_so_is_what_fused_passes_of_flashinfer_share(groups: dict[str, Any], name: str) -> None:
    setattr(sys.modules[FLASHINFER], name, object())
    assert vllm_checkpoint.hindrance() == "FlashInfer has a workspace that ranks share"


def test_so_is_a_communicator_of_torchs_own(groups: dict[str, Any]) -> None:
    groups["tp:0"].device_group = SimpleNamespace(_get_backend=lambda _: SimpleNamespace(_is_initialized=lambda: True))
    assert vllm_checkpoint.hindrance() == "torch has a communicator of its own for tp:0"


def test_a_group_that_has_no_gpus_has_none(groups: dict[str, Any]) -> None:
    def refused(_: torch.device) -> Any:
        raise RuntimeError("no backend type associated with device type cuda")

    groups["tp:0"].device_group = SimpleNamespace(_get_backend=refused)
    assert vllm_checkpoint.hindrance() is None
