"""The processes of an engine on its GPUs: its own, or those of a gang's ranks, one a device."""

from msgspec.structs import replace

from worker import gpus, processes
from worker.engines.messages import State
from worker.instancedir import Record
from worker.ledger import Resident
from worker.processes import Process


def members(record: Record) -> tuple[Process, ...]:
    """Of a gang on its GPUs, in order of rank; of one that only pretends, all processes beside the engine's own."""
    engine = record.engine
    if engine is None:
        return ()
    own = {one.pid: one for one in processes.in_session(engine.pid) if one.pid != engine.pid}
    if record.pretends:
        return tuple(own[pid] for pid in sorted(own))
    on = _pids(record)
    return tuple(own[on[device]] for device in record.ranks if on.get(device) in own)


def used_bytes(record: Record) -> int | None:
    """What the driver says of them, all together; None: it does not say."""
    found = [gpus.used_by(device, pid) for device, pid in _pids(record).items()]
    return sum(size for size in found if size is not None) if any(size is not None for size in found) else None


def residents(record: Record, state: State | None) -> dict[str, Resident]:
    """By device. Of a gang's word each rank has an even part."""
    ranks = max(1, len(record.ranks))
    if state is not None and ranks > 1:
        state = replace(state, bytes_kv=state.bytes_kv // ranks, bytes_own=state.bytes_own // ranks)
    return {device: Resident(pid, state) for device, pid in _pids(record).items()}


def _pids(record: Record) -> dict[str, int]:
    engine = record.engine
    if engine is None:
        return {}
    if not record.ranks:
        return {record.device: engine.pid} if record.device else {}
    own = {process.pid for process in processes.in_session(engine.pid)}
    on = {device: [pid for pid in gpus.processes(device) if pid in own] for device in record.ranks}
    return {device: pids[0] for device, pids in on.items() if pids}
