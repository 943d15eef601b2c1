"""The routes of the pages, without a browser: what they answer, escaped, by page, with errors that say what to do."""

import hashlib
import html
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest
from litestar import Litestar
from litestar.datastructures import State
from litestar.testing import TestClient
from msgspec.structs import replace

from controlplane.commands import Load
from controlplane.events import ImageBuilt, ImageFailed, ImagePinned, ImageRefused, ImageRoomFound, ModelSetBack
from controlplane.refusal import Code, Refused
from controlplane.spec import Idle
from tests.busyplane import busy
from tests.staged import StagedPlane
from web.pages import Site, Stage, router, static
from web.pages.stories import idle_words, why_words
from web.pages.templates import STATIC, TEMPLATES, integrity
from web.rest import portray
from web.views.requests import RequestRow

NOW = 1_800_000_000_000
EVIL = """"><script>alert(1)</script><img src=x onerror=alert(1)>'{{7*7}}</hx-partial>\r\ndata: x"""


@pytest.fixture
def plane() -> StagedPlane:
    return busy(StagedPlane(NOW))


@pytest.fixture
def client(plane: StagedPlane) -> Iterator[TestClient[Litestar]]:
    stage = Stage(plane, plane, plane, plane, Site("http://house:8080", "$TOKEN"))
    stage.painter.recent.refill(plane.events)
    app = Litestar([router, static], state=State({"stage": stage}), openapi_config=None)
    with TestClient(app) as client:
        client.follow_redirects = False
        yield client


class Ids(HTMLParser):
    """Collects ids, elements with inline style or handlers, and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.inline: list[str] = []
        self.scripts: list[dict[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.inline += [tag for name in given if name == "style" or name.startswith(("on", "hx-on"))]
        if tag == "script":
            self.scripts.append(given)
        if tag == "style":
            self.inline.append(tag)


def test_the_live_page_shows_the_plane_and_has_nothing_inline(client: TestClient[Litestar]) -> None:
    answer = client.get("/")
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
    page = Ids(answer.text)
    assert len(page.ids) == len(set(page.ids))
    assert page.inline == []
    assert all(script.get("src") and script.get("integrity") for script in page.scripts)
    for words in ("smollm2-135m", "random weights", "one skeleton with smollm2-sailor", "backing off", "163 MiB / 258 MiB"):
        assert words in answer.text


@pytest.mark.parametrize(
    "path", ["/", "/requests", "/events", "/events/1", "/past", "/models/smollm2", "/instances/ins_01JDXB4M9S7QKC2W5T8A"]
)
def test_pages_answer_in_html(client: TestClient[Litestar], path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert not Ids(answer.text).inline


def test_hostile_names_and_messages_are_text(client: TestClient[Litestar], plane: StagedPlane) -> None:
    plane.model(EVIL, "cfg_evil", aliases=(EVIL,), note=EVIL, architecture=EVIL)
    plane.emit(ModelSetBack(model=EVIL, failures=1, retry_at_ms=NOW, code=EVIL, message=EVIL))
    plane.request(EVIL, reason=EVIL)
    plane.emit(plane.events[0].event, actor=EVIL, operation=EVIL)
    stage: Stage = client.app.state.stage
    stage.painter.recent.refill(plane.events)
    stage.painter.paint(all_lists=True)
    frame = stage.hub.frame(-1).decode()
    shown = [client.get(path).text for path in ("/", "/requests", "/events", f"/events/{plane.fleet.position}", "/past")]
    shown += [client.get("/requests", params={"model": EVIL}).text, client.get("/events", params={"stream": EVIL}).text]
    shown += [client.get("/past", params={"at": EVIL}).text]
    for text in (*shown, frame):
        assert "<script>alert" not in text
        assert "<img src=x" not in text
        assert "49" not in re.findall(r"'(\d+)", text)
    assert all(line.startswith(("id: ", "data: ")) for line in frame.rstrip("\n").split("\n"))
    assert "\r" not in frame
    assert frame.count("<hx-partial") == frame.count("</hx-partial>")


def test_an_empty_plane_teaches_the_first_step() -> None:
    empty = StagedPlane(NOW)
    app = Litestar([router], state=State({"stage": Stage(empty, empty, empty, empty, Site("http://house:8080", "$TOKEN"))}))
    with TestClient(app) as client:
        page = client.get("/").text
    for words in (
        "curl http://house:8080/v1/chat/completions",
        "curl http://house:8080/api/models",
        "Bearer $TOKEN",
        "No device yet",
    ):
        assert words in page


def test_a_button_sends_its_command_and_says_which_operation(client: TestClient[Litestar], plane: StagedPlane) -> None:
    answer = client.post("/models/smollm2-135m/operations", data={"verb": "load"}, headers={"hx-request": "true"})
    assert (answer.status_code, plane.orders[0].body) == (200, Load(model="smollm2-135m"))
    assert plane.orders[0].actor == "operator:browser"
    assert "load requested" in answer.text
    (operation,) = plane.fleet.operations
    assert f'href="/operations/{operation}"' in answer.text


def test_a_refusal_is_shown_beside_the_button_with_what_to_do(client: TestClient[Litestar], plane: StagedPlane) -> None:
    plane.refusing = Refused(Code.BACKING_OFF, "sql-coder backs off: <b>use retry</b>", retry_after_ms=47_000)
    answer = client.post("/models/sql-coder/operations", data={"verb": "load"}, headers={"hx-request": "true"})
    assert answer.status_code == 503
    assert "&lt;b&gt;use retry&lt;/b&gt;" in answer.text
    assert "backing_off" in answer.text
    assert "Try again in 47 s" in answer.text
    assert "<html" not in answer.text


@pytest.mark.parametrize(
    ("path", "verb", "status"), [("nobody", "load", 404), ("tiny-qwen", "explode", 400), ("tiny-qwen", "", 400)]
)
def test_wrong_operations_are_refused(
    client: TestClient[Litestar], plane: StagedPlane, path: str, verb: str, status: int
) -> None:
    answer = client.post(f"/models/{path}/operations", data={"verb": verb}, headers={"hx-request": "true"})
    assert answer.status_code == status
    assert 'role="alert"' in answer.text
    assert plane.orders == []


def test_without_scripts_a_button_leads_to_the_model(client: TestClient[Litestar]) -> None:
    answer = client.post("/models/tiny-qwen/operations", data={"verb": "sleep"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/models/tiny-qwen")


def test_what_is_not_there_is_told_on_a_page(client: TestClient[Litestar]) -> None:
    for path in ("/events/99999", "/models/nobody", "/instances/nobody", "/requests/nobody", "/operations/nobody"):
        answer = client.get(path)
        assert (answer.status_code, "Back to the live page" in answer.text) == (404, True), path


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"stream": "smollm2"}, "'smollm2' is no stream; write one as KIND:NAME"),
        ({"stream": "model:smollm2"}, ""),
        ({"type": "InstancUp"}, "did you mean 'InstanceUp'?"),
        ({"type": "x" * 5000}, f"there is no event of type '{'x' * 100}'; there are ConfigurationFound"),
    ],
)
def test_a_filter_that_nothing_can_match_says_so_beside_the_form(
    client: TestClient[Litestar], asked: dict[str, str], said: str
) -> None:
    answered = client.get("/events", params=asked)
    assert answered.status_code == 200 and said in html.unescape(answered.text)
    assert ("No event matches:" in answered.text) is bool(said)
    assert '<form class="filter" action="/events"' in answered.text


def test_a_request_that_has_ended_says_why_in_a_sentence_with_its_code() -> None:
    row = RequestRow(
        request="req_1",
        model="m",
        at_ms=0,
        outcome="failed",
        kind="chat",
        streamed=False,
        reason="engine_died",
        message="it died",
    )
    assert why_words(row) == "it died (engine_died)"
    ended = replace(row, outcome="finished", reason="stop", message="")
    assert why_words(ended) == "the model ended its answer (stop)"
    assert why_words(replace(ended, reason="odd")) == "odd"
    assert (
        why_words(replace(row, outcome="cancelled", reason="by caller", message="while running")) == "by caller while running"
    )


def test_what_no_operator_asked_for_is_no_open_operation(client: TestClient[Litestar], plane: StagedPlane) -> None:
    """Events that a request caused name an operation too, which nothing ends."""
    asked = next(
        r for r in plane.events if r.operation and not any(r.stream == f"operation:{r.operation}" for r in plane.events)
    )
    text = client.get(f"/operations/{asked.operation}").text
    assert "What a request caused" in text
    assert '"words"' not in text and ">open<" not in text


def test_the_request_log_pages_and_filters(client: TestClient[Litestar], plane: StagedPlane) -> None:
    for _ in range(120):
        plane.end(plane.request("smollm2-135m", instance="ins_01JDXB4M9S7QKC2W5T8A"))
    path, seen = "/requests?model=smollm2-135m&outcome=finished", list[str]()
    while path:
        text = client.get(path).text
        seen += re.findall(r'id="row-([^"]+)"', text)
        older = re.search(r'href="([^"]+)" rel="next"', text)
        path = older[1].replace("&amp;", "&") if older else ""
    finished = [r for r in plane.events if r.type == "RequestFinished" and getattr(r.event, "model", "") == "smollm2-135m"]
    assert len(seen) == len(set(seen)) == len(finished)
    assert re.findall(r'class="out-(\w+)"', client.get("/requests?outcome=queued").text) == ["queued", "queued"]


def test_events_are_filtered_by_stream_and_type_and_linked_to_their_cause(
    client: TestClient[Litestar], plane: StagedPlane
) -> None:
    text = client.get("/events?stream=instance:ins_01JDXB4M9S7QKC2W5T8B").text
    assert re.findall(r'class="ty">(\w+)', text) == ["InstanceDirected", "InstanceCreated"]
    assert "/operations/op_01JDXB4MOPERATION" in text
    assert re.findall(r'class="ty">(\w+)', client.get("/events?type=ModelSetBack").text) == ["ModelSetBack"]
    assert set(re.findall(r'class="ty">(\w+)', client.get("/events?aggregate=node").text)) == {"NodeJoined"}
    directed = next(r for r in plane.events if r.type == "InstanceDirected" and r.operation)
    one = client.get(f"/events/{directed.position}").text
    assert f'href="/events/{directed.because}"' in one
    assert "&#34;type&#34;: &#34;InstanceDirected&#34;" in one
    assert client.get(f"/events/{directed.position}/document").text.startswith('<pre class="json"')


@pytest.mark.parametrize("query", ["before=0", "before=-1", "before=x", f"before={2**70}"])
def test_a_wrong_page_number_is_refused(client: TestClient[Litestar], query: str) -> None:
    assert client.get(f"/requests?{query}").status_code == 400


def test_any_page_of_100_000_requests_is_made_in_200_ms(client: TestClient[Litestar], plane: StagedPlane) -> None:
    # the share of the page in N30; the query's share is measured against the real log
    for _ in range(200):
        plane.end(plane.request("smollm2-135m", instance="ins_01JDXB4M9S7QKC2W5T8A"))
    client.get("/requests")
    times = []
    for _ in range(5):
        started = time.perf_counter()
        client.get("/requests?outcome=finished")
        times.append(time.perf_counter() - started)
    assert min(times) < 0.2


def test_vendored_files_are_what_the_checksums_say() -> None:
    vendor = STATIC / "vendor"
    lines = [line.split() for line in (vendor / "CHECKSUMS").read_text().splitlines() if not line.startswith("#")]
    assert {name for name, _, _ in lines} == {path.name for path in vendor.iterdir()} - {"CHECKSUMS"}
    for name, sha256, sri in lines:
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == sha256
        assert integrity(f"vendor/{name}") == sri


def test_static_files_may_be_kept_for_ever(client: TestClient[Litestar]) -> None:
    href = re.search(r'href="(/static/plane.css[^"]+)"', client.get("/").text)
    assert href
    answer = client.get(href[1])
    assert answer.status_code == 200
    assert "immutable" in answer.headers["cache-control"]
    assert client.get("/static/../pages/stage.py").status_code == 404


def test_no_template_holds_inline_scripts_or_styles_or_turns_escaping_off() -> None:
    for path in TEMPLATES.glob("*.html"):
        text = path.read_text()
        assert "|safe" not in text.replace(" ", ""), path
        assert "autoescape" not in text, path
        assert not re.search(r"\s(style|on\w+|hx-on[^=]*)=", text), path
        assert not re.search(r"https?://", text), path


def test_skeletons_on_disk_are_shown_with_size_age_and_what_is_wrong(plane: StagedPlane, client: TestClient[Litestar]) -> None:
    assert "Skeletons on disk" not in client.get("/").text
    plane.emit(ImageBuilt(node="n1", image="img_1", configuration="cfg_1", size_bytes=250 << 20))
    plane.emit(ImageFailed(node="n1", image="img_2", configuration="cfg_1", step="restore", code="image_corrupt", message=EVIL))
    page = client.get("/").text
    assert "Skeletons on disk" in page
    assert "250 MiB" in page
    assert "<b>failed</b> (image_corrupt: " in page
    assert "images rebuild img_2" in page
    plane.emit(ImageRefused(node="n1", image="img_1", configuration="cfg_1", code="engine_changed", message="so"))
    plane.emit(ImagePinned(node="n1", image="img_1", pinned=True))
    page = client.get("/").text
    assert "<b>stale</b> (engine_changed: so)" in page
    assert "<b>pinned</b>" in page
    assert EVIL not in page


def test_an_engine_that_found_no_room_on_disk_says_so_wherever_it_is_shown(
    plane: StagedPlane, client: TestClient[Litestar]
) -> None:
    lacks = "an image needs about 9.0 GiB of room; /data/images has 8.0 GiB <b>"
    plane.model("writer", "cfg_w")
    plane.instance("ins_w", "cfg_w")
    plane.climb("ins_w", "writer", plane.device("cpu9"), 0, 8)
    plane.up("ins_w", weight_set="ws_w")
    assert portray.nodes(plane.fleet, {})[0].unsaved == []
    plane.sleep("ins_w", code="no_space", message=lacks)
    told = f"not on disk (no_space): {lacks}"
    assert portray.nodes(plane.fleet, {})[0].unsaved == [f"ins_w (writer) is {told}"]
    [model] = [m for m in portray.models(plane.fleet, {}) if m.model == "writer"]
    assert (model.state, model.why) == ("sleep", told)
    assert client.get("/").text.count(html.escape(told)) >= 2, "at the model, and at the skeleton"
    plane.emit(ImageRoomFound(node="n1", instance="ins_w"))
    assert portray.nodes(plane.fleet, {})[0].unsaved == [f"ins_w (writer) is {told}; there is room by now"]
    plane.emit(ImageBuilt(node="n1", image="img_9", configuration="cfg_w", size_bytes=1))
    assert portray.nodes(plane.fleet, {})[0].unsaved == [], "it has no image to write any more"


@pytest.mark.parametrize(
    ("idle", "told"),
    [
        (Idle(), "asleep after 5 min, then cold after 30 min"),
        (Idle(checkpoint_ms=600_000, saved_ms=900_000, cold_ms=None),
         "asleep after 5 min, then off its GPU after 10 min, then saved after 15 min"),
        (Idle(sleep_ms=None, cold_ms=None), "stays up"),
    ],
)  # fmt: skip
def test_every_rung_that_an_idle_model_takes_is_told(idle: Idle, told: str) -> None:
    assert idle_words(idle) == told
