"""Whose the bytes of a GPU are."""

from controlplane.subjects import DeviceBytes
from worker.engines.messages import State
from worker.ledger import Resident, ledger


def state(**sizes: int) -> State:
    fields = {"bytes_mapped": 0, "bytes_kv": 0, "bytes_private": 0} | sizes
    return State(attached=None, awake=False, running=0, **fields)


def test_every_byte_has_one_owner() -> None:
    engines = [Resident(10, state(bytes_kv=40, bytes_mapped=300)), Resident(11, state(bytes_own=100)), Resident(12, None)]
    processes = {10: 60, 11: 125, 12: 20, 7: 310, 99: 5}
    found = ledger(processes, used_bytes=540, pool_pid=7, pool_set_bytes=300, engines=engines)
    assert found == DeviceBytes(
        skeletons=20 + 25 + 20, kv=40, own_weights=100, pool_sets=300, pool_context=10, foreign={99: 5}, driver=20
    )
    assert found.total == 540


def test_an_engine_that_says_more_than_the_driver_is_not_believed() -> None:
    found = ledger({10: 30}, used_bytes=30, pool_pid=7, pool_set_bytes=50, engines=[Resident(10, state(bytes_kv=90))])
    assert (found.kv, found.skeletons, found.pool_sets, found.pool_context) == (30, 0, 0, 0)
