"""A settings file is seen to change, by whatever way it was replaced."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from compose import settingswatch
from compose.settingschecks import settings_check
from compose.settingsfile import stamp
from compose.settingswatch import SettingsWatch
from controlplane.answer import Answer, Done
from controlplane.bus import Bus
from controlplane.commands import ApplySettings, Order
from controlplane.events import ModelRegistered, NodeLimits
from controlplane.fleet import Fleet, fold
from controlplane.plane import Plane
from controlplane.refusal import Code, Refused
from controlplane.settings import NodeSettings, parse
from tests.chronicle import Chronicle

# What is written in place is never as long as it was: to older kernels all that is written within 4 ms has one time.
MODEL = '[[model]]\nname = "{}"\nsource = "fake:"\nengine = "fake"\n'


class FakeBus:
    def __init__(self) -> None:
        self.applied: list[tuple[str, ...]] = []
        self.answers: list[Refused] = []
        self.orders: list[Order] = []
        self.fleet = Fleet()

    async def command(self, subject: str, order: Order, *, timeout_s: float = 5.0) -> Answer:
        self.orders.append(order)
        if self.answers:
            raise self.answers.pop(0)
        assert isinstance(order.body, ApplySettings)
        self.applied.append(tuple(model.name for model in order.body.models))
        return Done(position=1)

    async def state(self) -> Fleet:
        return self.fleet


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> FakeBus:
    monkeypatch.setattr(settingswatch, "POLL_S", 0.01)
    return FakeBus()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def plane(path: Path) -> Plane:
    made = Plane(data=str(path.parent), postgres_url="", nats_url="", pool_bytes=1 << 30)
    made.write()
    made.settings_unapplied.parent.mkdir(exist_ok=True)
    return made


async def watched(path: Path, bus: FakeBus, said: list[str]) -> asyncio.Task[None]:
    return asyncio.create_task(SettingsWatch(path, cast(Bus, bus), plane(path), said.append).follow(stamp(path)))


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_file_that_is_taken_away_changes_nothing_and_is_missed_once(tmp_path: Path, bus: FakeBus) -> None:
    path, said = tmp_path / "1.toml", list[str]()
    path.write_text(MODEL.format("a"))
    task = await watched(path, bus, said)
    path.unlink()
    await until(lambda: said)
    assert said == [f"settings file {path} is gone, empty, or can't be read: what was applied from it stays"]
    assert bus.applied == []
    path.write_text(MODEL.format("b"))
    await until(lambda: len(said) == 2)  # what was applied is told after it
    assert bus.applied == [("b",)]
    await end(task)


async def test_a_file_that_is_emptied_before_it_is_written_retires_nobody(tmp_path: Path, bus: FakeBus) -> None:
    path, said = tmp_path / "1.toml", list[str]()
    path.write_text(MODEL.format("a"))
    task = await watched(path, bus, said)
    path.write_text("")
    await until(lambda: said)
    assert bus.applied == []
    path.write_text(MODEL.format("b"))
    await until(lambda: bus.applied)
    path.write_text("# no models\n")
    await until(lambda: len(bus.applied) == 2)
    assert bus.applied == [("b",), ()], "who means none says so"
    await end(task)


async def test_a_file_that_is_written_replaced_or_relinked_is_applied(tmp_path: Path, bus: FakeBus) -> None:
    first, second, link = tmp_path / "1.toml", tmp_path / "2.toml", tmp_path / "link.toml"
    first.write_text(MODEL.format("a"))
    second.write_text(MODEL.format("b"))
    link.symlink_to(first)
    task = await watched(link, bus, [])
    first.write_text(MODEL.format("aa"))
    await until(lambda: bus.applied == [("aa",)])
    swap = tmp_path / "swap"
    swap.symlink_to(second)
    swap.replace(link)
    await until(lambda: bus.applied == [("aa",), ("b",)])
    await end(task)


async def test_a_mounted_config_map_is_seen_to_change(tmp_path: Path, bus: FakeBus) -> None:
    """`file -> ..data/file`, `..data -> a directory`, and the latter link is swapped."""
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "e.toml").write_text(MODEL.format(name))
        os.utime(tmp_path / name / "e.toml", (1, 1))
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "e.toml").symlink_to("..data/e.toml")
    task = await watched(tmp_path / "e.toml", bus, [])
    (tmp_path / "..new").symlink_to("v2")
    (tmp_path / "..new").replace(tmp_path / "..data")
    await until(lambda: bus.applied == [("v2",)])
    await end(task)


async def test_a_broken_or_missing_file_changes_nothing_and_says_where(tmp_path: Path, bus: FakeBus) -> None:
    path, said = tmp_path / "e.toml", list[str]()
    path.write_text(MODEL.format("a"))
    task = await watched(path, bus, said)
    path.write_text(MODEL.format("a") + "nonsense\n")
    await until(lambda: said)
    assert f"{path}:5" in said[0]
    [line] = settings_check(tmp_path, running=True)
    assert line.verdict == "bad" and f"{path}:5" in line.found
    assert list(settings_check(tmp_path, running=False)) == []
    path.unlink()
    path.write_text(MODEL.format("b"))
    await until(lambda: bus.applied == [("b",)])
    await until(lambda: not list(settings_check(tmp_path, running=True)))
    await end(task)


async def test_a_decider_that_is_away_is_waited_for_with_the_same_order(tmp_path: Path, bus: FakeBus) -> None:
    path = tmp_path / "e.toml"
    path.write_text(MODEL.format("a"))
    bus.answers = [Refused(Code.UNAVAILABLE, "away"), Refused(Code.UNAVAILABLE, "away")]
    task = await watched(path, bus, [])
    path.write_text(MODEL.format("bb"))
    await until(lambda: bus.applied == [("bb",)])
    assert len({order.id for order in bus.orders}) == 1
    await end(task)


async def test_a_refusal_is_told(tmp_path: Path, bus: FakeBus) -> None:
    path, said = tmp_path / "e.toml", list[str]()
    path.write_text(MODEL.format("a"))
    bus.answers = [Refused(Code.CANNOT_FIT, "needs 2 GiB, the largest device has 1 GiB")]
    task = await watched(path, bus, said)
    path.write_text(MODEL.format("bb"))
    await until(lambda: said)
    assert "needs 2 GiB" in said[0]
    await end(task)


async def test_lines_that_count_from_the_next_start_are_named(tmp_path: Path, bus: FakeBus) -> None:
    path, said = tmp_path / "e.toml", list[str]()
    watch = SettingsWatch(path, cast(Bus, bus), plane(path), said.append)
    await watch.apply(parse('[node]\npool_bytes = "1GiB"\n'))
    assert said == []
    await watch.apply(parse('[node]\npool_bytes = "2GiB"\ndrain = "9s"\n' + MODEL.format("a")))
    later = (
        f"{path}: [node] pool_bytes, [node] drain: changed, but these lines count from the next start of `enginehouse up` on"
    )
    assert said == [later]
    await watch.apply(parse('[node]\npool_bytes = "2GiB"\ndrain = "9s"\n' + MODEL.format("b")))
    assert said == [later], "said once"
    await watch.apply(parse('[node]\npool_bytes = "1GiB"\n'))
    assert said == [later], "it is as it runs"
    assert bus.applied == [(), ("a",), ("b",), ()]


async def test_limits_count_at_once_and_the_next_worker_reads_them(tmp_path: Path, bus: FakeBus) -> None:
    path, said = tmp_path / "e.toml", list[str]()
    watch = SettingsWatch(path, cast(Bus, bus), plane(path), said.append)
    text = '[node]\ncheckpoint_bytes = "3GiB"\n[images]\nquota = "2GiB"\npin = ["a"]\n'
    await watch.apply(parse(text + MODEL.format("a")))
    order = bus.orders[-1].body
    assert isinstance(order, ApplySettings)
    assert order.node == "n1"
    assert order.limits == NodeLimits(image_quota_bytes=2 << 30, image_pins=("a",), checkpoint_bytes=3 << 30)
    written = Plane.read(tmp_path)
    assert (written.image_quota_bytes, written.image_pins, written.checkpoint_bytes) == (2 << 30, ("a",), 3 << 30)
    bus.answers = [Refused(Code.CANNOT_FIT, "no")]
    with pytest.raises(Refused):
        await watch.apply(parse('[images]\nquota = "1GiB"\n'))
    assert Plane.read(tmp_path) == written, "what is refused changes nothing"
    await watch.apply(parse(""))
    order = bus.orders[-1].body
    assert isinstance(order, ApplySettings)
    assert (order.limits.image_quota_bytes, order.limits.image_pins) == (0, ())
    assert order.limits.checkpoint_bytes, "half of what is left beside the pool"
    assert len(said) == 1 and said[0].startswith(f'{path}: [images] pin: no model and no configuration is called "a"')


async def test_a_pin_that_pins_nothing_is_said_once_and_no_more_when_a_model_is_called_so(tmp_path: Path, bus: FakeBus) -> None:
    path, said = tmp_path / "e.toml", list[str]()
    watch = SettingsWatch(path, cast(Bus, bus), plane(path), said.append)
    pins = parse('[images]\npin = ["writer", "writr"]\n' + MODEL.format("writer"))
    story = Chronicle()
    known = story.record(ModelRegistered(model="writer", spec=pins.models[0]))
    bus.fleet = fold(known)
    await watch.apply(pins)
    assert len(said) == 1 and said[0].endswith('pins nothing until one is; did you mean "writer"?')
    await watch.apply(pins)
    assert len(said) == 1, "said once"
    called = msgspec.structs.replace(pins.models[0], name="writr")
    bus.fleet = fold(known + story.record(ModelRegistered(model="writr", spec=called)))
    await watch.apply(pins)
    assert len(said) == 1


async def test_limits_that_cannot_be_kept_count_all_the_same_and_are_kept_once_they_can(
    tmp_path: Path, bus: FakeBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full, say: the plane goes on."""
    path, full = tmp_path / "e.toml", True
    path.write_text(MODEL.format("a"))
    write = Plane.write

    def fails(plane: Plane) -> None:
        if full:
            raise OSError(28, "No space left on device")
        write(plane)

    task = await watched(path, bus, [])
    monkeypatch.setattr(Plane, "write", fails)
    for quota in ("2GiB", "30GiB"):
        path.write_text(f'[images]\nquota = "{quota}"\n' + MODEL.format("a"))
        await until(lambda: bus.applied)
        bus.applied.clear()
    full = False
    await until(lambda: Plane.read(tmp_path).image_quota_bytes == 30 << 30)
    await end(task)


def test_every_line_of_a_node_has_its_name_in_the_file_or_counts_at_once() -> None:
    assert {*settingswatch.KEYS, *NodeLimits.__struct_fields__} == set(NodeSettings.__struct_fields__)
