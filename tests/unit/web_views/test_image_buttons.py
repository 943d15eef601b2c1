"""The buttons of the images: shown when something comes of them, asking before a removal, saying what became of it."""

import re
from collections.abc import Iterator

import pytest
from litestar import Litestar
from litestar.datastructures import State
from litestar.testing import TestClient

from controlplane.commands import PinImage, RebuildImage, RemoveImage
from controlplane.events import ImageBuilt, ImageDismissed, ImageFailed, ImagePinned, ImageRefused, NodeFellSilent
from controlplane.refusal import Code, Refused
from controlplane.subjects import ImageAsk, ImageDone
from tests.busyplane import busy
from tests.staged import StagedPlane
from web.pages import Site, Stage, router
from web.views.images import images

SCRIPTED = {"hx-request": "true"}


@pytest.fixture(name="plane")
def _plane() -> StagedPlane:
    plane = busy(StagedPlane(1_800_000_000_000))
    plane.emit(ImageBuilt(node="n1", image="img_1", configuration="cfg_2b8c1f0d9e7a6b54", size_bytes=250 << 20))
    return plane


@pytest.fixture(name="client")
def _client(plane: StagedPlane) -> Iterator[TestClient[Litestar]]:
    stage = Stage(plane, plane, plane, plane, Site("http://house:8080", "$TOKEN"))
    with TestClient(Litestar([router], state=State({"stage": stage}), openapi_config=None)) as client:
        client.follow_redirects = False
        yield client


def shown(plane: StagedPlane) -> tuple[str, ...]:
    (one,) = images(plane.fleet, "n1")
    return one.actions


def test_only_what_can_do_something_is_shown(plane: StagedPlane) -> None:
    assert shown(plane) == ("verify", "rebuild", "pin", "remove")
    plane.emit(ImagePinned(node="n1", image="img_1", pinned=True))
    assert shown(plane) == ("verify", "rebuild", "unpin", "remove")
    plane.emit(ImageFailed(node="n1", image="img_1", configuration="cfg_1", step="restore", code="hung", message="so"))
    assert shown(plane) == ("rebuild", "unpin", "remove")
    plane.emit(ImageRefused(node="n1", image="img_1", configuration="cfg_1", code="engine_changed", message="so"))
    assert shown(plane) == ("unpin", "remove")
    plane.emit(ImageDismissed(node="n1", image="img_1", code="operator"))
    assert shown(plane) == ()


def test_a_silent_node_is_not_asked_to_verify(plane: StagedPlane) -> None:
    plane.emit(NodeFellSilent(node="n1"))
    assert shown(plane) == ("rebuild", "pin", "remove")


def test_what_the_settings_pin_is_theirs(plane: StagedPlane) -> None:
    plane.node(image_pins=("smollm2-sailor",))
    assert shown(plane) == ("verify", "rebuild", "remove")


def test_who_lets_an_image_go_that_the_settings_pin_is_told_that_it_stays(
    client: TestClient[Litestar], plane: StagedPlane
) -> None:
    plane.node(image_pins=("smollm2-sailor",))
    plane.emit(ImagePinned(node="n1", image="img_1", pinned=True))
    answer = client.post("/images/img_1/operations", data={"verb": "unpin"}, headers=SCRIPTED)
    assert "unpin requested; img_1 stays: the settings pin &#34;smollm2-sailor&#34;" in answer.text


def test_a_button_sends_its_command(client: TestClient[Litestar], plane: StagedPlane) -> None:
    wanted = {
        "pin": PinImage(image="img_1"), "unpin": PinImage(image="img_1", pinned=False),
        "rebuild": RebuildImage(image="img_1"), "remove": RemoveImage(image="img_1"),
    }  # fmt: skip
    for verb, body in wanted.items():
        answer = client.post("/images/img_1/operations", data={"verb": verb}, headers=SCRIPTED)
        assert (answer.status_code, plane.orders[-1].body) == (200, body)
        assert plane.orders[-1].actor == "operator:browser"
        assert f"{verb} requested" in answer.text


def test_a_check_is_the_nodes_and_its_finding_stands_beside_the_button(
    client: TestClient[Litestar], plane: StagedPlane
) -> None:
    plane.answering = ImageDone(images=("img_1",), message="12 files, 262144000 bytes: as written")
    answer = client.post("/images/img_1/operations", data={"verb": "verify"}, headers=SCRIPTED)
    assert (answer.status_code, plane.asks) == (200, [("n1", ImageAsk(verb="verify", image="img_1"))])
    assert "12 files, 262144000 bytes: as written" in answer.text
    plane.answering = ImageDone(images=("img_1",), code="image_corrupt", message="<b>pages-1.img</b> differs")
    answer = client.post("/images/img_1/operations", data={"verb": "verify"}, headers=SCRIPTED)
    assert answer.status_code == 409
    assert "&lt;b&gt;pages-1.img&lt;/b&gt; differs <code>image_corrupt</code>" in answer.text
    assert plane.orders == []


def test_without_scripts_a_page_asks_before_a_removal(client: TestClient[Litestar], plane: StagedPlane) -> None:
    asked = client.post("/images/img_1/operations", data={"verb": "remove"})
    assert "Remove image img_1 (250 MiB)?" in asked.text
    assert plane.orders == []
    sent = dict(re.findall(r'type="hidden" name="(\w+)" value="(\w+)"', asked.text))
    answer = client.post("/images/img_1/operations", data=sent)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert [order.body for order in plane.orders] == [RemoveImage(image="img_1")]


def test_the_question_is_part_of_the_live_page(client: TestClient[Litestar]) -> None:
    text = client.get("/").text
    assert text.count("hx-confirm=") == 1
    assert 'hx-confirm="Remove image img_1 (250 MiB)?"' in text


@pytest.mark.parametrize(("image", "verb", "status"), [("img_9", "pin", 404), ("img_1", "explode", 400), ("img_1", "", 400)])
def test_wrong_operations_are_refused(
    client: TestClient[Litestar], plane: StagedPlane, image: str, verb: str, status: int
) -> None:
    answer = client.post(f"/images/{image}/operations", data={"verb": verb}, headers=SCRIPTED)
    assert answer.status_code == status
    assert 'role="alert"' in answer.text
    assert plane.orders == []


def test_a_refusal_is_shown_with_what_to_do(client: TestClient[Litestar], plane: StagedPlane) -> None:
    plane.refusing = Refused(Code.UNAVAILABLE, "the decider does not answer", retry_after_ms=1000)
    answer = client.post("/images/img_1/operations", data={"verb": "pin"}, headers=SCRIPTED)
    assert answer.status_code == 503
    assert "the decider does not answer" in answer.text and "Try again in 1 s" in answer.text
