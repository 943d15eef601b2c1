"""Numbers in the pool's messages: for people in the sentence, to the byte beside it."""

import pytest

from controlplane.quantities import human_bytes, need_and_limit
from pool.residency import Refused, Residency
from pool.sizes import both, written

GIB = 1 << 30


@pytest.mark.parametrize("size", [0, 1, 1023, 1536, 150 << 20, GIB + 1, 3 << 40, 1 << 63])
def test_the_pool_writes_bytes_as_the_rest_of_the_plane_does(size: int) -> None:
    assert written(size) == human_bytes(size)
    assert both(size, GIB) == need_and_limit(size, GIB)


@pytest.mark.parametrize(
    ("budget", "room", "code", "told", "free"),
    [
        (2 * GIB, 9 * GIB, "over_budget", "needs 3.0 GiB, 2.0 GiB of the pool's budget of 2.0 GiB are free", 2 * GIB),
        (9 * GIB, GIB, "no_room", "needs 3.0 GiB, the host has 1.0 GiB left", GIB),
        (3 * GIB - 1, 9 * GIB, "over_budget", f"needs {3 * GIB} bytes, {3 * GIB - 1} bytes of the pool's budget", 3 * GIB - 1),
    ],
)
def test_a_full_pool_says_both_numbers_for_people_and_to_the_byte(
    budget: int, room: int, code: str, told: str, free: int
) -> None:
    with pytest.raises(Refused) as refused:
        Residency(budget).admit(3 * GIB, room)
    refusal = refused.value.refusal
    assert (refusal.code, refusal.need_bytes, refusal.free_bytes) == (code, 3 * GIB, free)
    assert told in refusal.message
