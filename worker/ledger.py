"""Whose the bytes of a GPU are, as the driver counts them by process: the one place where they are told apart. Pure."""

from collections.abc import Mapping, Sequence, Set

from msgspec import Struct

from controlplane.subjects import DeviceBytes
from worker.engines.messages import State


class Resident(Struct, frozen=True):
    """An engine on the device: its pid as the machine knows it, and its last word of itself."""

    pid: int
    state: State | None


def ledger(
    processes: Mapping[int, int],
    *,
    used_bytes: int,
    pool_pid: int,
    pool_set_bytes: int,
    engines: Sequence[Resident],
    former: Set[int] = frozenset(),
) -> DeviceBytes:
    """`processes`: pid -> bytes, by the driver. `pool_set_bytes`: of weight sets there; the driver counts them as the daemon's,
    whoever maps them. `former`: pids that were ours; what they still have is the driver's, as is what no process has.
    """
    kv = own = skeletons = 0
    for engine in engines:
        taken = processes.get(engine.pid, 0)
        its_kv = min(taken, engine.state.bytes_kv) if engine.state else 0
        its_own = min(taken - its_kv, engine.state.bytes_own) if engine.state else 0
        kv, own, skeletons = kv + its_kv, own + its_own, skeletons + taken - its_kv - its_own
    ours = {pool_pid, *(engine.pid for engine in engines)}
    sets = min(pool_set_bytes, processes.get(pool_pid, 0))
    foreign = {pid: size for pid, size in processes.items() if size and pid not in ours and pid not in former}
    named = sum(size for pid, size in processes.items() if pid in ours) + sum(foreign.values())
    return DeviceBytes(
        skeletons=skeletons, kv=kv, own_weights=own, pool_sets=sets, pool_context=processes.get(pool_pid, 0) - sets,
        foreign=foreign, driver=max(0, used_bytes - named),
    )  # fmt: skip
