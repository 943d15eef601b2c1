"""Copies of models that draft go when nobody refers to them, and never before."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from immutables import Map

from tests.unit.worker.test_draft_model import FACTS, MODEL
from worker import preparedcopies
from worker.desired import Desired, Wanted
from worker.moves import Goal
from worker.preparedcopies import PreparedCopies, read
from worker.shelf import Shelf, Shelved
from worker.sources import copies

replace = msgspec.structs.replace
MODELS = Map({"a": MODEL})
RETIRED = Map({"a": replace(MODEL, retired=True)})
ASLEEP = Map({"ins_1": Wanted(instance="ins_1", configuration="cfg_1")})


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(preparedcopies, "PAUSE_S", 0.0)
    models = tmp_path / "models"
    for name in ("drafts-1", "drafts-2", "hf-1"):
        (models / name).mkdir(parents=True)
        (models / name / "model.safetensors").write_bytes(b"weights")
    copies.note(models, "cfg_1", models / "drafts-1")
    copies.note(models, "cfg_2", models / "drafts-2")
    return models


def left(models: Path) -> list[str]:
    return sorted(path.name for path in models.iterdir() if path.is_dir() and path.name != "drafting")


def test_a_copy_that_a_configuration_in_use_reads_stays_and_others_go(models: Path) -> None:
    assert copies.remove(models, {"cfg_1", "cfg_other"}, ()) == ["drafts-2"]
    assert left(models) == ["drafts-1", "hf-1"]
    assert [path.name for path in (models / "drafting").iterdir()] == ["cfg_1"]


def test_a_copy_of_two_configurations_stays_for_the_last(models: Path) -> None:
    copies.note(models, "cfg_3", models / "drafts-1")
    assert copies.remove(models, {"cfg_2", "cfg_3"}, ()) == []
    assert copies.remove(models, {"cfg_2"}, ()) == ["drafts-1"]


def test_one_that_a_model_was_given_since_is_held_and_one_of_a_refused_model_is_not(models: Path) -> None:
    (models / "drafts-3").mkdir()
    (models / "drafts-4").mkdir()
    assert copies.remove(models, {"cfg_1", "cfg_2"}, {"drafts-3"}) == ["drafts-4"]


async def test_while_it_is_not_known_what_an_engine_of_an_earlier_worker_reads_what_it_may_read_stays(models: Path) -> None:
    (models / "drafting" / "cfg_1").unlink()
    desired, shelf = Desired(node="n1", models=MODELS, instances=ASLEEP), Opening()
    shelf.done.set()
    drafts = PreparedCopies(models.parent, shelf, lambda: desired, list)
    drafts.follow()
    await settled(drafts)
    assert left(models) == ["drafts-1", "hf-1"], "the other is known to be of a configuration that nobody uses"
    await drafts.close()


def test_models_that_are_not_retired_and_all_instances_count() -> None:
    assert read(Desired(node="n1", models=MODELS)) == {"cfg_1"}
    assert read(Desired(node="n1", models=RETIRED)) == frozenset()
    assert read(Desired(node="n1", models=RETIRED, instances=ASLEEP)) == {"cfg_1"}


class Opening(Shelf):
    """A source is being prepared until `done` is set."""

    def __init__(self, *found: Shelved) -> None:
        super().__init__(None, "/nowhere")  # type: ignore[arg-type]
        self._shelved = {one.goal: one for one in found}
        self.waited, self.done = asyncio.Event(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        self.waited.set()
        await self.done.wait()
        yield


async def settled(drafts: PreparedCopies) -> None:
    sweeping: Any = drafts._sweeping
    await asyncio.wait_for(sweeping, 20)


async def test_they_are_looked_at_when_a_model_goes_and_again_when_its_last_engine_does(models: Path) -> None:
    desired, shelf = Desired(node="n1", models=MODELS, instances=ASLEEP), Opening()
    shelf.done.set()
    drafts = PreparedCopies(models.parent, shelf, lambda: desired, list)
    drafts.follow()
    await settled(drafts)
    assert left(models) == ["drafts-1", "hf-1"], "nobody has used the other one since the worker began"
    desired = replace(desired, models=RETIRED)
    drafts.follow()
    assert (models / "drafts-1").is_dir(), "its engine may be told to read it"
    desired = replace(desired, instances=Map())
    drafts.follow()
    await settled(drafts)
    assert left(models) == ["hf-1"]
    await drafts.close()


async def test_what_was_asked_for_while_a_source_was_prepared_counts(models: Path) -> None:
    """Registered, and given its copy, before the plane knows what it is made of."""
    desired = Desired(node="n1", models=RETIRED)
    again = replace(MODEL, revision=2, facts=None)
    shelf = Opening(Shelved(goal=Goal("a", 2), source=models, facts=FACTS, model=again, draft=models / "drafts-1"))
    drafts = PreparedCopies(models.parent, shelf, lambda: desired, list)
    drafts.follow()
    await asyncio.wait_for(shelf.waited.wait(), 20)
    desired = replace(desired, models=Map({"a": again}))
    shelf.done.set()
    await settled(drafts)
    assert left(models) == ["drafts-1", "hf-1"]
    await drafts.close()
