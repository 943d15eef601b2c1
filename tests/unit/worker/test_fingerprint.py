"""What an image depends on: the first fact that differs has a name, and both values."""

import msgspec
import pytest

from worker.images.fingerprint import OF_START, REASONS, Fingerprint, difference, outdated

MADE = Fingerprint(
    configuration="cfg_1", engine="vllm 0.26.0", python="3.12.3", torch="2.11.0", kernel="6.18", libc="2.39", criu="4.2.1",
    cpu="Xeon", driver="580.159.04", cuda="13.0", gpu="1 x H200", namespaces="apart", node="n1",
)  # fmt: skip


def test_c23_the_same_facts_fit() -> None:
    assert difference(MADE, msgspec.structs.replace(MADE)) is None


@pytest.mark.parametrize("field", Fingerprint.__struct_fields__)
def test_c23_a_fact_that_differs_is_named_with_both_values(field: str) -> None:
    now = msgspec.structs.replace(MADE, **{field: "of today"})
    refusal = difference(MADE, now)
    assert refusal is not None
    assert (refusal.code, refusal.was, refusal.now) == (f"{field}_changed", getattr(MADE, field), "of today")
    assert str(refusal) == f"{field}_changed: it was {refusal.was!r} when the image was made, and is 'of today' now"
    assert now.image != MADE.image, "what is made today is another image"


def test_c23_every_fact_is_looked_at() -> None:
    assert set(REASONS) == set(Fingerprint.__struct_fields__)


@pytest.mark.parametrize("field", Fingerprint.__struct_fields__)
def test_an_engine_is_outdated_by_what_it_has_from_its_start_alone(field: str) -> None:
    now = msgspec.structs.replace(MADE, **{field: "of today"})
    why = outdated(MADE, now)
    assert bool(why) is (field in OF_START)
    assert (repr(getattr(MADE, field)) in why and "'of today'" in why) is bool(why), "both values"
    assert {"engine", "python", "torch", "libc"} <= OF_START and "criu" not in OF_START, "CRIU is that of whoever writes it"


def test_an_engine_of_which_nothing_is_known_is_outdated() -> None:
    assert outdated(MADE, MADE) == ""
    assert "did not write down" in outdated(None, MADE)
