"""What was fetched, converted or made of models' sources goes when nothing needs it, and never before."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from immutables import Map

from controlplane.fleet import Directive, Model
from controlplane.rungs import Rung
from controlplane.spec import ModelSpec
from tests.unit.worker.test_draft_model import FACTS
from worker import preparedcopies
from worker.desired import Desired, Wanted, Wish
from worker.moves import Goal
from worker.preparedcopies import PreparedCopies, at_work
from worker.shelf import Shelf, Shelved
from worker.sources import leaving
from worker.sources.identity import identity
from worker.sources.leaving import note, unneeded_since
from worker.sources.places import converted, fetched, pretended, sweep
from worker.sources.report import Inspected

replace = msgspec.structs.replace
HUB = f"hf:org/name@{'0' * 40}"
DRAFT = f"hf:org/draft@{'1' * 40}"


def model(source: str, name: str = "a", **more: Any) -> Model:
    arguments = more.pop("arguments", {})
    spec = ModelSpec(name=name, source=source, engine=more.pop("engine", "transformers"), arguments=arguments)
    return Model(model=name, spec=spec, revision=1, origin="api", registered_ms=0, facts=FACTS, **more)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparedcopies, "PAUSE_S", 0.0)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def put(models: Path, *names: str) -> None:
    for name in names:
        (models / name).mkdir()
        (models / name / "model.safetensors").write_bytes(b"weights")


def source(tmp_path: Path) -> str:
    place = tmp_path / "mine"
    place.mkdir()
    (place / "config.json").write_text("{}")
    return str(place)


def test_only_what_was_prepared_is_judged(models: Path) -> None:
    put(models, "hf-1", f"hf-{'a' * 24}", f"converted-{'b' * 24}", f"fake-{'c' * 24}", "drafts-1", "demo", "known", ".draft-x")
    assert leaving.prepared(models) == {f"hf-{'a' * 24}", f"converted-{'b' * 24}", f"fake-{'c' * 24}"}


def test_a_models_sources_follow_from_its_spec_and_its_files(models: Path, tmp_path: Path) -> None:
    mine = source(tmp_path)
    theirs = {
        fetched(HUB): model(HUB).spec,
        converted((HUB,), "float32"): model(HUB).spec,
        converted(identity(mine), "bfloat16"): model(mine, arguments={"dtype": "bfloat16"}).spec,
        fetched(DRAFT): model(mine, engine="vllm", arguments={"draft_model": DRAFT}).spec,
        pretended("a", 2**20): model("fake:", engine="fake").spec,
        pretended("x", 77): model("fake:x", engine="fake", arguments={"weight_bytes": 77}).spec,
    }
    other = converted(identity(mine), "float32")
    there = [*theirs, other]
    for name, spec in theirs.items():
        assert name in leaving.needed([spec], models, there)
    assert other not in leaving.needed([theirs[converted(identity(mine), "bfloat16")]], models, there)
    assert leaving.needed([], models, there) == set()


def test_of_a_source_that_can_not_be_looked_at_all_that_is_converted_stays(models: Path) -> None:
    there = [converted(("x",), "float32"), fetched(HUB), pretended("a", 1)]
    assert leaving.needed([model("/not/mounted").spec], models, there) == {there[0]}


def test_a_source_that_is_itself_a_prepared_one_stays(models: Path) -> None:
    put(models, fetched(HUB))
    assert leaving.needed([model(str(models / fetched(HUB))).spec], models, [fetched(HUB)]) == {fetched(HUB)}


def test_a_source_that_is_a_link_to_a_prepared_one_keeps_that(models: Path, tmp_path: Path) -> None:
    put(models, fetched(HUB))
    (tmp_path / "link").symlink_to(models / fetched(HUB))
    (models / fetched(HUB) / "config.json").write_text("{}")
    assert leaving.needed([model(str(tmp_path / "link")).spec], models, [fetched(HUB)]) == {fetched(HUB)}


class Still(Shelf):
    def __init__(self, *found: Shelved) -> None:
        super().__init__(None, "/nowhere")  # type: ignore[arg-type]
        self._shelved = {one.goal: one for one in found}
        self.before: Any = lambda: None

    @contextlib.asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        self.before()
        yield


class House:
    def __init__(self, models: Path, *found: Shelved) -> None:
        self.models, self.shelf, self.used = models, Still(*found), list[str]()
        self.desired = Desired(node="n1")
        self.copies = PreparedCopies(models.parent, self.shelf, lambda: self.desired, lambda: self.used)

    async def look(self, **changes: Any) -> set[str]:
        self.desired = replace(self.desired, **changes)
        self.copies.follow()
        sweeping: Any = self.copies._sweeping
        await asyncio.wait_for(sweeping, 20)
        return leaving.prepared(self.models)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparedcopies, "GRACE_S", 0.0)


def up(model: str, revision: int = 1) -> "Map[str, Wanted]":
    directive = Directive(number=9, rung=Rung.UP, model=model, revision=revision, grant=7, code="request", at_ms=0)
    return Map({"ins_1": Wanted(instance="ins_1", configuration="cfg_1", directive=directive)})


async def test_one_goes_when_its_model_is_retired_and_its_last_instance_is_gone(models: Path, at_once: None) -> None:
    put(models, fetched(HUB), fetched(DRAFT))
    known = Inspected(
        source_dir=str(models / fetched(HUB)), architecture="", skeleton="", parameters=0, weight_bytes=0, kv_bytes=0,
        context_tokens=0, max_num_seqs=0,
    )  # fmt: skip
    elsewhere = replace(known, source_dir="/not/mounted")
    for name, found in (("1", known), ("2", elsewhere)):
        (models / f"inspected-{name}.json").write_bytes(msgspec.json.encode(found))
    house = House(models)
    assert await house.look(models=Map({"a": model(HUB)}), instances=up("a")) == {fetched(HUB)}
    gone = Map({"a": model(HUB, retired=True)})
    assert await house.look(models=gone) == {fetched(HUB)}, "requests of it run still"
    assert await house.look(instances=Map()) == set()
    assert unneeded_since(models) == {}
    assert not (models / "inspected-1.json").exists() and (models / "inspected-2.json").exists()


async def test_what_processes_and_images_have_and_what_an_earlier_revision_was_given_stays(models: Path, at_once: None) -> None:
    first, second, third = f"fake-{'1' * 24}", f"fake-{'2' * 24}", f"fake-{'3' * 24}"
    put(models, first, second, third)
    older = Shelved(goal=Goal("a", 1), source=models / first, facts=FACTS, model=model("fake:", engine="fake"))
    house = House(models, older)
    house.used = [f"{models}/{second}/model.safetensors", "--source", "/elsewhere"]
    newer = replace(model("fake:new", engine="fake"), revision=2)
    assert await house.look(models=Map({"a": newer}), instances=up("a", 1)) == {first, second}
    house.used = []
    assert await house.look(instances=up("a", 2)) == set()


async def test_nothing_goes_before_the_grace_is_over_and_the_next_worker_does_not_begin_it_anew(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(models, fetched(HUB))
    house, now = House(models), 1000.0
    monkeypatch.setattr(preparedcopies.time, "time", lambda: now)
    house.copies.follow()
    async with asyncio.timeout(20):
        while not unneeded_since(models):
            await asyncio.sleep(0.005)
    await house.copies.close()
    assert leaving.prepared(models) == {fetched(HUB)}
    now += preparedcopies.GRACE_S
    assert await House(models).look() == set()


async def test_one_that_is_needed_again_in_time_stays_and_its_grace_begins_anew(models: Path) -> None:
    put(models, fetched(HUB))
    note(models, {fetched(HUB): 1000.0})
    house = House(models)
    assert await house.look(models=Map({"a": model(HUB)})) == {fetched(HUB)}
    assert unneeded_since(models) == {}


async def test_what_the_settings_of_a_start_name_again_stays_however_long_ago_it_was_needed_and_what_drafts_goes_at_once(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(models, fetched(HUB), "drafts-1")
    note(models, {fetched(HUB): 1000.0})
    monkeypatch.setattr(preparedcopies, "PAUSE_S", 60.0)
    house = House(models)
    house.copies.follow()
    async with asyncio.timeout(20):
        while (models / "drafts-1").exists():
            await asyncio.sleep(0.005)
    assert leaving.prepared(models) == {fetched(HUB)}
    monkeypatch.setattr(preparedcopies, "PAUSE_S", 0.0)
    assert await house.look(models=Map({"a": model(HUB)})) == {fetched(HUB)}
    assert unneeded_since(models) == {}


@pytest.mark.parametrize("error", [OSError("the disk is away"), ValueError("a fault of ours")])
async def test_a_look_that_fails_is_told_and_made_again_without_another_change(
    models: Path, at_once: None, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    put(models, fetched(HUB), "drafts-1")
    monkeypatch.setattr(preparedcopies, "AGAIN_S", 0.0)
    house, failing = House(models), [error, error, error]

    def fail() -> None:
        if failing:
            raise failing.pop()

    house.shelf.before = fail
    told = list[tuple[str, str]]()
    for level in ("warning", "exception"):
        monkeypatch.setattr(preparedcopies.log, level, lambda event, *, kind, **_: told.append((event, kind)))
    assert await house.look() == set()
    assert not (models / "drafts-1").exists()
    assert told == [("prepared_copies_kept", kind) for kind in ("drafts", "sources", "drafts")]


async def test_a_disk_too_full_to_note_what_nothing_needs_gets_room_all_the_same(models: Path, at_once: None) -> None:
    put(models, fetched(HUB))
    (models / leaving.UNNEEDED).with_suffix(".new").mkdir()  # nothing can be written there
    assert await House(models).look() == set()


async def test_the_end_of_an_image_is_a_reason_to_look(models: Path, at_once: None) -> None:
    put(models, fetched(HUB))
    house = House(models)
    house.used = [f"{models}/{fetched(HUB)}/model.safetensors"]
    assert await house.look(images=Map({"img_1": Wish(pinned=True)})) == {fetched(HUB)}
    house.used = []
    assert await house.look(images=Map()) == set()


async def test_a_model_that_was_registered_while_sources_were_prepared_keeps_its_own(models: Path, at_once: None) -> None:
    put(models, fetched(HUB))
    house = House(models)

    def registered() -> None:
        house.desired = replace(house.desired, models=Map({"a": model(HUB)}))

    house.shelf.before = registered
    assert await house.look() == {fetched(HUB)}


def test_what_was_put_aside_by_one_that_died_is_swept_at_the_next_start(models: Path) -> None:
    put(models, fetched(HUB))
    assert set(leaving.put_aside(models, [fetched(HUB), fetched(DRAFT)])) == {fetched(HUB)}
    assert leaving.prepared(models) == set()
    assert len(sweep(models.parent)) == 1
    assert list(models.iterdir()) == []


def test_instances_name_what_they_serve_whoever_is_retired() -> None:
    assert at_work(Desired(node="n1", instances=up("a", 3))) == {Goal("a", 3)}
