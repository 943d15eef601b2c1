"""What doctor says of memory nodes: of one, of two, of a kernel that refuses, of a pool that runs."""

from compose.nodechecks import found
from pool.described import Described, SetState
from pool.numa import MemoryNode

GIB = 1 << 30
TWO = tuple(MemoryNode(number=number, total_bytes=256 * GIB, free_bytes=(10 + number) * GIB) for number in range(2))


def described(placement: str, *node_bytes: dict[int, int]) -> Described:
    sets = tuple(
        SetState(weight_set=f"ws_{number}", size_bytes=GIB, mapped_by=0, source="/models/a", node_bytes=each)
        for number, each in enumerate(node_bytes)
    )
    return Described(budget_bytes=GIB, used_bytes=0, pid=1, sets=sets, placement=placement)


def test_one_node_needs_nothing() -> None:
    assert (found(TWO[:1], "", None).verdict, found((), "", None).verdict) == ("ok", "ok")


def test_what_lies_where_is_told_of_a_pool_that_runs() -> None:
    check = found(TWO, "", described("placed", {0: 3 * GIB}, {0: GIB, 1: 2 * GIB}))
    assert check.verdict == "ok"
    assert check.found == (
        "0 with 10.0 GiB of 256 GiB, 1 with 11.0 GiB of 256 GiB; weights on 0: 4.0 GiB; weights on 1: 2.0 GiB"
    )


def test_a_refusal_is_told_with_what_to_do() -> None:
    for check in (
        found(TWO, "[Errno 1] mbind: Operation not permitted", None),
        found(TWO, "", described("not placed: [Errno 1] mbind: Operation not permitted")),
    ):
        assert check.verdict == "note"
        assert "not permitted" in check.found
        assert "SYS_NICE" in check.cure
