"""Which images go first."""

import shutil
from pathlib import Path

import msgspec
import pytest

from worker.images.budget import Budget, NoRoom
from worker.images.fingerprint import Fingerprint
from worker.images.manifest import Manifest
from worker.images.store import Store
from worker.images.worth import DAY_MS, Holding, surplus, worth

MIB = 1 << 20
NOW = 100 * DAY_MS


def held(image: str, **facts: object) -> Holding:
    fields: dict[str, object] = {"size_bytes": 100 * MIB, "made_ms": NOW, "took_ms": 2000, **facts}
    return msgspec.convert({"image": image, **fields}, Holding)


@pytest.mark.parametrize(
    "better",
    [
        held("b", uses=1, used_ms=NOW), held("b", took_ms=4000), held("b", size_bytes=50 * MIB),
        held("b", made_ms=NOW, used_ms=NOW + 1),
    ],
)  # fmt: skip
def test_uses_cost_and_freshness_are_worth_something_and_size_costs(better: Holding) -> None:
    plain = held("a", made_ms=NOW - DAY_MS)
    assert worth(better, NOW) > worth(plain, NOW)


def test_the_least_valuable_go_first_and_no_more_than_needed() -> None:
    old, used, costly = held("old", made_ms=0), held("used", uses=9), held("costly", took_ms=60_000)
    assert [one.image for one in surplus([costly, used, old], 1, NOW)] == ["old"]
    assert [one.image for one in surplus([costly, used, old], 150 * MIB, NOW)] == ["old", "used"]
    assert surplus([costly, used, old], 0, NOW) == []


def test_what_cannot_be_used_goes_before_everything_and_what_is_kept_never() -> None:
    broken, poor = held("broken", uses=1000, usable=False), held("poor", made_ms=0)
    assert [one.image for one in surplus([poor, broken], 1, NOW)] == ["broken"]
    kept = msgspec.structs.replace(broken, kept=True)
    assert [one.image for one in surplus([poor, kept], 900 * MIB, NOW)] == ["poor"]


def written(store: Store, image: str, configuration: str, size: int, made_ms: int) -> None:
    facts = dict.fromkeys(Fingerprint.__struct_fields__, "x") | {"configuration": configuration}
    manifest = Manifest(
        image=image, fingerprint=msgspec.convert(facts, Fingerprint), mapped=(), files=(), pid=1, place="", skeleton_bytes=size,
        made_ms=made_ms, proof="same_tokens",
    )  # fmt: skip
    (store.draft(image) / "pages-1.img").write_bytes(bytes(size))
    store.publish(manifest)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "images")
    for nth, name in enumerate(("one", "two", "three")):
        written(made, f"img_{name}", f"cfg_{name}", MIB, (nth + 1) * DAY_MS)
    return made


def test_a_budget_names_what_is_over_it_and_spares_pins_of_both_kinds(store: Store) -> None:
    assert Budget(store, 10 * MIB, lambda _: True).surplus() == []
    budget = Budget(store, MIB + MIB // 2, lambda _: True)
    assert budget.surplus() == ["img_one", "img_two"]
    budget.pinned = frozenset({"img_one"})
    budget.configurations_pinned = frozenset({"cfg_three"})
    assert budget.surplus() == ["img_two"]
    assert Budget(store, 2 * MIB + MIB // 2, lambda made: made.image != "img_three").surplus() == ["img_three"]


def test_room_for_a_new_one_is_made_or_refused_with_both_numbers(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget(store, 4 * MIB, lambda _: True)
    assert budget.room_for(MIB // 2) == []
    assert budget.room_for(2 * MIB) == ["img_one", "img_two"]
    with pytest.raises(NoRoom, match=r"needs about 5\.0 MiB; the quota is 4\.0 MiB") as over:
        budget.room_for(5 * MIB)
    assert over.value.code == "over_quota"
    budget.configurations_pinned = frozenset({"cfg_one", "cfg_two", "cfg_three"})
    with pytest.raises(NoRoom, match="pinned ones take") as pinned:
        budget.room_for(2 * MIB)
    assert pinned.value.code == "over_quota"
    budget.configurations_pinned = frozenset()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(8 * MIB, 8 * MIB, 1000))  # type: ignore[attr-defined]
    assert budget.room_for(MIB) == ["img_one"], "the disk is full: one goes, though the quota would let it stay"
    with pytest.raises(NoRoom, match=r"has 1000 B, and [\d.]+ MiB could be freed") as full:
        Budget(store, 1000 * MIB, lambda _: True).room_for(20 * MIB)
    assert full.value.code == "no_space"
    assert len(list(store.images())) == 3, "nothing is removed by asking"


def test_what_is_removed_while_images_are_counted_is_none_of_those_that_go(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = store.size_bytes

    def and_the_first_goes(image: str) -> int:
        if image == "img_one":
            store.remove(image)
        return measured(image)

    monkeypatch.setattr(store, "size_bytes", and_the_first_goes)
    assert Budget(store, 2 * MIB + MIB // 2, lambda _: True).room_for(MIB) == ["img_two"]
