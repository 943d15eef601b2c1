"""A model's row says how it stands and which buttons can do something."""

import msgspec
from msgspec.structs import replace

from compose.cli.show import model_row
from controlplane.events import (
    ModelCleared,
    ModelRetired,
    ModelSetBack,
    OperationFailed,
    OperationRequested,
    OperationSucceeded,
)
from tests.busyplane import busy, failed
from tests.staged import MIB, StagedPlane
from tests.unit.decisions.spec import DEVICE, spec, with_models
from tests.unit.decisions.spec import plane as plane_of
from web.rest import portray
from web.views.models import ModelRow, models
from web.views.recent import Recent
from web.views.standing import STEPS
from worker.moves import StepName

NOW = 1_800_000_000_000


def rows(plane: StagedPlane, recent: Recent | None = None) -> dict[str, ModelRow]:
    return {m.model: m for m in models(plane.fleet, plane.beats, (recent or Recent()).failures)}


def able(row: ModelRow) -> set[str]:
    return {a.verb for a in row.actions if not a.why_not and not a.operation}


def test_each_state_has_its_words_and_its_buttons() -> None:
    shown = rows(busy(StagedPlane(NOW)))
    told = {name: (m.state.tone, m.state.words, able(m)) for name, m in shown.items()}
    assert told == {
        "smollm2-135m": ("up", "up", {"sleep", "save", "move:cpu1", "stop"}),
        "smollm2-sailor": ("climb", "starting", {"stop"}),
        "tiny-qwen": ("up", "up", {"sleep", "save", "move:cpu0", "stop"}),
        "sql-coder": ("failed", "backing off", {"retry"}),
        "whale-70b": ("failed", "rejected", {"retry"}),
    }


def test_buttons_that_can_never_do_anything_are_not_there() -> None:
    shown = rows(busy(StagedPlane(NOW)))
    assert {"checkpoint", "retry"}.isdisjoint(a.verb for a in shown["tiny-qwen"].actions)
    assert [a.verb for a in shown["sql-coder"].actions] == ["retry", "load", "sleep", "save", "stop"]


def test_a_gang_is_not_offered_what_gangs_can_not_do() -> None:
    story = with_models(plane_of(devices=3, kind="gpu"), replace(spec("pair", size=2 * DEVICE, gpu=True), gpus=2)).bring_up(
        "pair"
    )
    (row,) = models(story.fleet, {}, {})
    assert able(row) == {"sleep", "stop"}
    why = {action.verb.partition(":")[0]: action.why_not for action in row.actions}
    assert (why["save"], why["move"]) == ("a gang is not saved to disk", "a gang does not move")
    assert "arguments.gang_checkpoint" in why["checkpoint"]


def test_a_rejection_shows_both_numbers_once() -> None:
    message = rows(busy(StagedPlane(NOW)))["whale-70b"].state.message
    assert message.count("140 GiB") == 1
    assert message.count("1.0 GiB") == 1


def test_a_back_off_counts_down_and_says_why() -> None:
    plane = busy(StagedPlane(NOW))
    state = rows(plane)["sql-coder"].state
    assert state.until_ms == NOW + 47_000
    assert state.message.startswith("3 starts failed (start_failed): the engine ended with status 1")
    plane.emit(ModelCleared(model="sql-coder"))
    assert rows(plane)["sql-coder"].state.words == "cold"
    assert able(rows(plane)["sql-coder"]) == {"load"}


def test_a_source_that_can_not_be_opened_is_no_failed_start() -> None:
    plane, why = busy(StagedPlane(NOW)), "the source of sql-coder can't be opened (/m): No such file or directory"
    plane.emit(ModelSetBack(model="sql-coder", failures=1, retry_at_ms=NOW, code="bad_source", message=why))
    assert rows(plane)["sql-coder"].state.message == why


def test_models_of_one_configuration_name_each_other_and_share_a_hue() -> None:
    shown = rows(busy(StagedPlane(NOW)))
    assert shown["smollm2-135m"].shared_with == ("smollm2-sailor",)
    assert shown["smollm2-sailor"].shared_with == ("smollm2-135m",)
    assert shown["smollm2-135m"].hue == shown["smollm2-sailor"].hue != shown["tiny-qwen"].hue


def test_a_sleeping_skeleton_of_the_configuration_is_told() -> None:
    plane = busy(StagedPlane(NOW))
    plane.sleep("ins_01JDXB4M9S7QKC2W5T8A")
    failed(plane, "ins_01JDXB4M9S7QKC2W5T8B")
    shown = rows(plane)
    assert (shown["smollm2-135m"].state.words, able(shown["smollm2-135m"])) == ("asleep", {"load", "save", "stop"})
    assert (shown["smollm2-sailor"].state.words, able(shown["smollm2-sailor"])) == ("skeleton asleep", {"load"})


def test_rest_and_the_command_line_say_of_every_model_what_the_page_says() -> None:
    plane = busy(StagedPlane(NOW))
    for change in (
        lambda: None,
        lambda: plane.sleep("ins_01JDXB4M9S7QKC2W5T8A"),
        lambda: failed(plane, "ins_01JDXB4M9S7QKC2W5T8B"),
    ):
        change()
        told = {one.model: one for one in portray.models(plane.fleet, plane.beats)}
        for name, row in rows(plane).items():
            assert (told[name].words, told[name].why) == (row.state.words, row.state.message), name
            assert model_row(msgspec.to_builtins(told[name]))[1] == row.state.words, name
    assert (told["smollm2-sailor"].state, told["smollm2-sailor"].words) == ("skeleton_asleep", "skeleton asleep")


def test_a_model_that_is_retired_and_gone_is_told_as_that() -> None:
    plane = busy(StagedPlane(NOW))
    plane.emit(ModelRetired(model="sql-coder"))
    told = portray.model(plane.fleet, plane.beats, plane.fleet.models["sql-coder"])
    assert (told.state, told.words) == ("retired", "retired")


def test_an_open_operation_is_shown_on_its_button_and_a_failed_one_beside_it() -> None:
    plane, recent = busy(StagedPlane(NOW)), Recent()
    told = plane.emit(OperationRequested(operation="op_1", kind="sleep", model="smollm2-135m"))
    recent.add(told)
    button = next(a for a in rows(plane, recent)["smollm2-135m"].actions if a.verb == "sleep")
    assert button.operation == "op_1"
    recent.add(
        plane.emit(OperationFailed(operation="op_1", kind="sleep", model="smollm2-135m", code="busy", message="2 requests run"))
    )
    failure = rows(plane, recent)["smollm2-135m"].failure
    assert failure is not None
    assert (failure.kind, failure.code, failure.message) == ("sleep", "busy", "2 requests run")
    recent.add(plane.emit(OperationRequested(operation="op_2", kind="sleep", model="smollm2-135m")))
    recent.add(plane.emit(OperationSucceeded(operation="op_2", kind="sleep", model="smollm2-135m")))
    assert rows(plane, recent)["smollm2-135m"].failure is None


def test_a_model_that_no_node_has_opened_says_so() -> None:
    plane = StagedPlane(NOW)
    plane.model("later", "cfg_1", weight_bytes=MIB)
    assert rows(plane)["later"].state.words == "cold"
    fleet_model = plane.fleet.models["later"]
    assert fleet_model.facts is not None
    bare = StagedPlane(NOW)
    bare.emit(plane.events[0].event)
    row = rows(bare)["later"]
    assert (row.state.words, row.state.message, able(row)) == ("inspecting", "waits for a node to join", set())


def test_a_retired_model_disappears_once_nothing_of_it_is_left() -> None:
    plane = busy(StagedPlane(NOW))
    plane.emit(ModelRetired(model="whale-70b"))
    plane.emit(ModelRetired(model="smollm2-135m"))
    shown = rows(plane)
    assert "whale-70b" not in shown
    assert shown["smollm2-135m"].state.words == "retired, up"
    assert able(shown["smollm2-135m"]) == {"sleep", "save", "stop"}


def test_every_step_of_a_worker_has_words() -> None:
    assert {step.value for step in StepName} <= STEPS.keys()
