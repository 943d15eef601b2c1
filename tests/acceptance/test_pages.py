"""The pages in a real browser: live, by keyboard, on a phone, in both themes, under the strict policy, and without scripts."""

import asyncio
import re
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Dialog, Page, Route, expect

from controlplane.commands import PinImage, RemoveImage
from controlplane.events import ImageBuilt, ImageFailed, ImagePinned, ImageRefused, ModelCleared, OperationFailed
from controlplane.moments import utc
from controlplane.refusal import Code, Refused
from tests.acceptance.browser import browsing, opened
from tests.busyplane import busy, measured
from tests.staged import StagedPlane
from tests.stagehouse import Stagehouse
from web.views.figures import clock, slug

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one browser for all of them

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


OUTSIDE = """panels => panels.flatMap(panel => [...panel.querySelectorAll("button:not([hidden]), input, select, dd, span.num")]
  .filter(one => one.getBoundingClientRect().right > panel.getBoundingClientRect().right + 1).map(one => one.outerHTML))"""
"""What sticks out of its panel; beside another one that does not widen the page."""


@pytest.fixture(name="plane")
def _plane() -> StagedPlane:
    return busy(StagedPlane(time.time_ns() // 1_000_000))


@pytest_asyncio.fixture(name="house", loop_scope="module")
async def _house(plane: StagedPlane) -> AsyncIterator[Stagehouse]:
    async with Stagehouse(plane).open() as house:
        yield house


@pytest_asyncio.fixture(name="browser", scope="module", loop_scope="module")
async def _browser() -> AsyncIterator[Browser]:
    async with browsing() as browser:
        yield browser


async def test_times_are_the_logs_whatever_the_browsers_clock_says(house: Stagehouse, browser: Browser) -> None:
    async with opened(browser, "about:blank", timezone_id="UTC") as (page, _):
        await page.add_init_script("const ours = Date.now; Date.now = () => ours() - 300_000;")
        await page.goto(house.url)
        shown = page.locator("#events time[data-clock]").first
        at_ms = int(await shown.get_attribute("data-clock") or 0)
        await expect(shown).to_have_attribute("title", re.compile("."))  # the script has been at it
        await expect(shown).to_have_text(clock(at_ms))


async def connected(house: Stagehouse, readers: int = 1) -> None:
    async with asyncio.timeout(30):
        while len(house.stage.hub.readers) != readers:
            await asyncio.sleep(0.01)


async def test_what_happens_arrives_by_itself(house: Stagehouse, plane: StagedPlane, browser: Browser) -> None:
    async with opened(browser, house.url) as (page, complaints):
        await connected(house)
        row = page.locator("#model-sql-coder")
        await expect(row.locator(".pill")).to_have_text("backing off")
        plane.emit(ModelCleared(model="sql-coder"))
        await expect(row.locator(".pill")).to_have_text("cold")
        plane.beat(measured(plane, done=200 << 20))
        await expect(page.locator("#device-dev-n1-cpu1 .doing .num")).to_have_text("200 MiB / 258 MiB")
        request = plane.request("tiny-qwen", instance="ins_01JDXB4M9S7QKC2W5T8C")
        await expect(page.locator(f"#row-{request.replace('_', '_5f_')} .pill")).to_have_text("running")
        plane.end(request)
        await expect(page.locator(f"#row-{request.replace('_', '_5f_')} .pill")).to_have_text("finished")
        plane.synced = False
        plane.tell(None)
        await expect(page.locator("#plane [role=status]")).to_have_text("disconnected from the log")
        assert complaints == []


async def test_focus_open_details_filters_and_typed_text_survive_updates(
    house: Stagehouse, plane: StagedPlane, browser: Browser
) -> None:
    async with opened(browser, house.url) as (page, complaints):
        await connected(house)
        first = page.locator("#events details").first
        await first.locator("summary").click()
        await expect(first.locator("pre.json")).to_contain_text('"position"')
        opened_id = await page.locator("#events li", has=page.locator("details[open]")).get_attribute("id")
        await page.locator("[data-filters=requests] [name=outcome]").select_option("failed")
        await page.locator("#do-sleep-smollm2-135m").focus()
        for n in range(4):
            plane.end(plane.request("smollm2-135m", instance="ins_01JDXB4M9S7QKC2W5T8A"))
            plane.beat(measured(plane, tokens_per_s=60 + n))
            await expect(page.locator("#device-dev-n1-cpu0 .load")).to_contain_text(f"{60 + n} tok/s")
        await expect(page.locator("#events li").first).to_contain_text("RequestFinished")
        await expect(page.locator(f"#{opened_id} pre.json")).to_be_visible()
        assert await page.evaluate("document.activeElement.id") == "do-sleep-smollm2-135m"
        assert await page.locator("#requests tbody tr:visible").count() == 1
        assert await page.locator("#requests tbody tr:visible .pill").text_content() == "failed"
        assert complaints == []


async def test_a_button_is_pressed_by_keyboard_and_shows_its_operation(
    house: Stagehouse, plane: StagedPlane, browser: Browser
) -> None:
    async with opened(browser, house.url) as (page, complaints):
        await connected(house)
        await page.keyboard.press("Tab")
        await expect(page.locator(".skip")).to_be_focused()
        await page.keyboard.press("Enter")
        await page.locator("#do-sleep-smollm2-135m").focus()
        await page.keyboard.press("Enter")
        await expect(page.locator("#said-smollm2-135m")).to_contain_text("sleep requested")
        button = page.locator("#do-sleep-smollm2-135m")
        await expect(button).to_have_attribute("aria-busy", "true")
        await expect(button).to_be_focused()
        await page.keyboard.press("Enter")  # a button that can't apply does nothing, but can be reached and says why
        operation = next(iter(plane.fleet.operations))
        plane.emit(
            OperationFailed(operation=operation, kind="sleep", model="smollm2-135m", code="busy", message="2 requests run")
        )
        await expect(page.locator("#model-smollm2-135m")).to_contain_text("2 requests run")
        await expect(button).to_have_attribute("type", "submit")
        await page.keyboard.press("Enter")
        await expect(button).to_have_attribute("aria-busy", "true")
        assert len(plane.orders) == 2
        assert complaints == []


async def test_a_refused_operation_says_why_and_the_message_stays(
    house: Stagehouse, plane: StagedPlane, browser: Browser
) -> None:
    plane.refusing = Refused(Code.BUSY, "tiny-qwen answers 2 requests; wait for them or cancel them")
    async with opened(browser, house.url) as (page, complaints):
        await connected(house)
        await page.locator("#do-stop-tiny-qwen").click()
        said = page.locator("#said-tiny-qwen")
        await expect(said.get_by_role("alert")).to_have_text("tiny-qwen answers 2 requests; wait for them or cancel them busy")
        plane.request("tiny-qwen", instance="ins_01JDXB4M9S7QKC2W5T8C")
        await expect(page.locator("#model-tiny-qwen .now")).to_contain_text("1 running")
        await expect(said).to_contain_text("tiny-qwen answers 2 requests")
        assert [c for c in complaints if "409" not in c] == []  # the browser itself logs the status


async def test_why_a_button_cannot_apply_is_part_of_its_name(house: Stagehouse, browser: Browser) -> None:
    async with opened(browser, house.url) as (page, _):
        button = page.get_by_role("button", name=re.compile(r"Load\s*: it is up")).first
        await expect(button).to_have_attribute("aria-disabled", "true")
        await button.focus()
        assert await page.evaluate("document.activeElement.id") == "do-load-smollm2-135m"


def with_images(plane: StagedPlane) -> None:
    """One that is as it should be, a pinned one, a failed one and a stale one."""
    for image in ("img_01JDXB4M9S7QKC2W5T8E", "img_01JDXB4M9S7QKC2W5T8F"):
        plane.emit(ImageBuilt(node="n1", image=image, configuration="cfg_2b8c1f0d9e7a6b54", size_bytes=250 << 20))
    plane.emit(ImagePinned(node="n1", image="img_01JDXB4M9S7QKC2W5T8F", pinned=True))
    words = "pages-1.img has 12 bytes, its manifest says 1048576"
    plane.emit(
        ImageFailed(
            node="n1",
            image="img_01JDXB4M9S7QKC2W5T8G",
            configuration="cfg_c4",
            step="restore",
            code="image_corrupt",
            message=words,
        )
    )
    plane.emit(
        ImageRefused(
            node="n1", image="img_01JDXB4M9S7QKC2W5T8H", configuration="cfg_c4", code="engine_changed", message="1.0, now 1.1"
        )
    )


async def test_an_image_is_pinned_and_removed_by_keyboard_and_a_removal_is_asked_about(
    house: Stagehouse, plane: StagedPlane, browser: Browser
) -> None:
    with_images(plane)
    image, slug = "img_01JDXB4M9S7QKC2W5T8E", "image-img_5f_01JDXB4M9S7QKC2W5T8E"
    asked, answers = list[str](), [False, True]

    async def answer(dialog: Dialog) -> None:
        asked.append(dialog.message)
        await (dialog.accept() if answers.pop(0) else dialog.dismiss())

    async with opened(browser, house.url) as (page, complaints):
        await connected(house)
        page.on("dialog", answer)
        pin = page.locator(f"#do-pin-{slug}")
        await pin.focus()
        await page.keyboard.press("Enter")
        await expect(pin).to_have_text("Unpin")
        await expect(pin).to_be_focused()
        await expect(page.locator(f"#said-{slug}")).to_contain_text("pin requested")
        assert [order.body for order in plane.orders] == [PinImage(image=image)]
        await page.locator(f"#do-remove-{slug}").focus()
        await page.keyboard.press("Enter")
        await page.keyboard.press("Enter")
        await expect(page.locator(f"#{slug}")).to_contain_text("its node is about to remove it")
        await expect(page.locator(f"#{slug} button")).to_have_count(0)
        assert [order.body for order in plane.orders[1:]] == [RemoveImage(image=image)], "the first answer was no"
        assert asked == [f"Remove image {image} (250 MiB)?"] * 2
        assert complaints == []


PATHS = ["/", "/requests", "/events", "/events/40", "/past", "/models/smollm2-135m", "/instances/ins_01JDXB4M9S7QKC2W5T8A"]


@pytest.mark.parametrize("path", PATHS)
async def test_no_width_scrolls_sideways(house: Stagehouse, plane: StagedPlane, browser: Browser, path: str) -> None:
    with_images(plane)
    async with opened(browser, house.url + path) as (page, complaints):
        for width in (320, 390, 768, 1080, 1280, 2200):
            await page.set_viewport_size({"width": width, "height": 800})
            assert await page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), width
            assert await page.locator(".panel").evaluate_all(OUTSIDE) == [], width
        assert complaints == []


@pytest.mark.parametrize("width", [390, 430, 520])
async def test_a_name_on_half_a_device_is_whole_on_a_phone(house: Stagehouse, browser: Browser, width: int) -> None:
    async with opened(browser, house.url, viewport={"width": width, "height": 844}) as (page, _):
        names = page.locator(".held.of-4 .name")
        assert await names.count() > 0
        assert await names.evaluate_all("all => all.every(one => one.scrollWidth <= one.clientWidth)")


async def test_touch_targets_on_a_phone_are_large_enough(house: Stagehouse, plane: StagedPlane, browser: Browser) -> None:
    with_images(plane)
    async with opened(browser, house.url, **PHONE) as (page, _):
        sizes = await page.locator(".buttons button").evaluate_all("all => all.map(b => b.getBoundingClientRect().height)")
        assert min(sizes) >= 36


async def ground(page: Page) -> int:
    """Brightness of the page's ground, 0 to 255."""
    text: str = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    return int(text.partition("(")[2].split(",")[0])


async def test_the_theme_follows_the_system_until_one_is_chosen(house: Stagehouse, browser: Browser) -> None:
    async with opened(browser, house.url, color_scheme="dark") as (page, complaints):
        button = page.locator("#theme")
        await expect(button).to_have_text("Theme: auto")
        assert await ground(page) < 50
        await button.click()
        await expect(button).to_have_text("Theme: light")
        assert await ground(page) > 200
        await page.reload()
        assert await ground(page) > 200
        await button.click()
        await expect(button).to_have_text("Theme: dark")
        assert await ground(page) < 50
        assert complaints == []


CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (over) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of over) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.nodeValue.trim());
    const style = getComputedStyle(element);
    if (!own || !element.getClientRects().length || element.closest(".vh, .skip, noscript")) continue;
    const grounds = [];
    for (let e = element; e; e = e.parentElement) grounds.unshift(getComputedStyle(e).backgroundColor);
    const ground = light(rgb(grounds)), text = light(rgb([...grounds, style.color]));
    const ratio = (Math.max(ground, text) + 0.05) / (Math.min(ground, text) + 0.05);
    if (ratio < 4.5) poor.push(`${element.className}: ${element.textContent.slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return poor;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", ["/", "/events", "/past", "/past?at=yesterday", "/models/sql-coder"])
async def test_text_has_enough_contrast(
    house: Stagehouse, plane: StagedPlane, browser: Browser, scheme: str, path: str
) -> None:
    with_images(plane)
    async with opened(browser, house.url + path, color_scheme=scheme) as (page, _):
        assert await page.evaluate(CONTRAST) == []


async def test_reduced_motion_is_respected(house: Stagehouse, browser: Browser) -> None:
    async with opened(browser, house.url, reduced_motion="reduce") as (page, _):
        assert await page.evaluate("document.getAnimations().length") == 0


async def test_everything_is_named_for_assistive_technology(house: Stagehouse, browser: Browser) -> None:
    async with opened(browser, house.url) as (page, _):
        nameless = await page.evaluate(
            """[...document.querySelectorAll("button, a, select, input, [role=img], progress, section")].filter(e => !(
                e.getAttribute("aria-label") || e.getAttribute("aria-labelledby") || e.labels?.length || e.textContent.trim()
            )).map(e => e.outerHTML.slice(0, 80))"""
        )
        assert nameless == []
        assert await page.locator("h1").count() == 1
        assert await page.get_by_role("main").count() == 1
        await expect(
            page.get_by_role("link", name="smollm2-135m on ½ of cpu0, up, 2 running, 41 tokens a second")
        ).to_be_visible()


async def test_it_reads_without_scripts(house: Stagehouse, browser: Browser) -> None:
    async with opened(browser, house.url, java_script_enabled=False) as (page, complaints):
        await expect(page.locator("#model-tiny-qwen .pill")).to_have_text("up")
        await expect(page.locator("#theme")).to_be_hidden()
        await page.locator("#do-sleep-tiny-qwen").click()
        await expect(page).to_have_url(f"{house.url}/models/tiny-qwen")
        await page.get_by_role("link", name="Events", exact=True).click()
        await page.locator("summary").first.click()
        await page.locator("details[open] .links a").first.click()
        await expect(page.locator("pre.json")).to_contain_text('"type": "OperationRequested"')
        assert complaints == []


async def test_ages_in_the_past_are_of_then_and_stand_still(browser: Browser) -> None:
    plane = StagedPlane(time.time_ns() // 1_000_000 - 86_400_000)
    plane.node()
    plane.device("cpu0")
    plane.model("alpha", "cfg_1")
    plane.now_ms += 600_000
    request = plane.request("alpha", reason="waits for a place", ago_ms=0)
    plane.now_ms += 95_000
    plane.emit(ModelCleared(model="alpha"))
    then = plane.fleet.position
    plane.end(request)
    waiter = f"#wait-{slug(request)}"
    async with Stagehouse(plane).open() as house, opened(browser, "about:blank") as (page, complaints):
        await page.clock.install()
        await page.goto(f"{house.url}/past?at={then}")
        await expect(page.locator(f"{waiter} time")).to_have_text("1 min")
        await page.clock.fast_forward(300_000)
        await expect(page.locator(f"{waiter} time")).to_have_text("1 min")
        await page.get_by_role("link", name="1 earlier", exact=True).click()
        await expect(page.locator("h1")).to_contain_text(f"as it was after event {then - 1}, ")
        await expect(page.locator(f"{waiter} time")).to_have_text("0 s")
        assert house.stage.hub.readers == set(), "nothing is followed"
        assert complaints == []


async def test_times_in_the_past_are_in_utc_as_its_moment_is(house: Stagehouse, plane: StagedPlane, browser: Browser) -> None:
    async with opened(browser, f"{house.url}/past?at=40", timezone_id="Asia/Tokyo") as (page, complaints):
        shown = page.locator("#event-40 .tm time")
        await expect(shown).to_have_text(clock(plane.events[39].at_ms))
        await expect(shown).to_have_attribute("title", re.compile(r" UTC$"))
        await page.goto(f"{house.url}/events?before=41")
        await expect(shown).to_have_text(clock(plane.events[39].at_ms + 9 * 3_600_000))
        assert complaints == []


async def test_the_past_is_gone_through_without_scripts(house: Stagehouse, plane: StagedPlane, browser: Browser) -> None:
    async with opened(browser, f"{house.url}/events/40", java_script_enabled=False) as (page, complaints):
        await page.get_by_role("link", name="The plane then").click()
        await expect(page.locator("h1")).to_contain_text("The past: as it was after event 40, ")
        await page.get_by_role("link", name="10 later", exact=True).click()
        await expect(page.locator("h1")).to_contain_text("as it was after event 50, ")
        await page.get_by_label("Event or UTC time").fill(utc(plane.events[0].at_ms))
        await page.get_by_role("button", name="Show").click()
        await expect(page.locator("h1")).to_contain_text("as it was after event ")
        assert complaints == []
        await page.get_by_label("Event or UTC time").fill("yesterday")
        await page.get_by_role("button", name="Show").click()
        await expect(page.get_by_role("alert")).to_contain_text("'yesterday' is no moment")
        await page.get_by_role("link", name="Now").click()
        await expect(page.locator("h1")).to_have_text("The plane, live")


async def test_a_lost_connection_is_told_and_mended(plane: StagedPlane, browser: Browser) -> None:
    async with Stagehouse(plane).open() as house, opened(browser, house.url) as (page, _):
        await connected(house)
        await page.set_viewport_size({"width": 1000, "height": 300})
        await page.evaluate("scrollTo(0, document.body.scrollHeight)")
        house.stage.close()
        await expect(page.locator("#wire")).to_contain_text("No connection to enginehouse")
        await expect(page.locator("#wire")).to_be_in_viewport()
        house.restage()
        plane.emit(ModelCleared(model="sql-coder"))
        await expect(page.locator("#wire")).to_be_hidden()
        await expect(page.locator("#model-sql-coder .pill")).to_have_text("cold")


async def test_who_was_signed_out_is_told_so_and_nothing_is_tried_again(plane: StagedPlane, browser: Browser) -> None:
    async with Stagehouse(plane).open() as house, opened(browser, house.url) as (page, _):
        await connected(house)
        tried = list[str]()

        async def refused(route: Route) -> None:
            tried.append(route.request.url)
            await route.fulfill(status=401, body="{}")

        await page.route("**/live?*", refused)
        house.stage.close()
        await expect(page.locator("#wire")).to_contain_text("You are signed out.")
        await page.clock.install()
        await page.clock.fast_forward(120_000)
        await expect(page.locator("#wire")).to_contain_text("You are signed out.")
        assert len(tried) == 1


async def test_a_silent_connection_is_made_again_and_one_that_beats_is_left(house: Stagehouse, browser: Browser) -> None:
    async with opened(browser, "about:blank") as (page, _):
        await page.clock.install()
        await page.goto(house.url)
        await connected(house)
        reader = next(iter(house.stage.hub.readers))
        await page.evaluate("addEventListener('beat', () => { document.documentElement.dataset.beaten = '1'; })")
        await page.clock.fast_forward(30_000)
        house.stage.hub.beat()
        await expect(page.locator("html")).to_have_attribute("data-beaten", "1")
        await page.clock.fast_forward(30_000)
        await expect(page.locator("#wire")).to_be_hidden()
        assert house.stage.hub.readers == {reader}
        await page.route("**/live?*", lambda route: route.abort())
        await page.clock.fast_forward(45_000)
        await expect(page.locator("#wire")).to_contain_text("No connection to enginehouse")
        await page.unroute("**/live?*")
        await expect(page.locator("#wire")).to_be_hidden()
        assert house.stage.hub.readers != {reader}


ANSWERED = """([pieces, goes_on]) => { window.fetch = async (url, { signal }) => new Response(new ReadableStream({
  start(stream) {
    for (const one of pieces) stream.enqueue(new TextEncoder().encode(`data: ${one}\n\n`));
    if (!goes_on) stream.close();
    signal.addEventListener("abort", () => stream.error(signal.reason));
  },
})); }"""
PIECE = '{"choices": [{"delta": {"content": "a kettle is"}}]}'


@pytest.mark.parametrize(
    ("pieces", "goes_on", "said"),
    [
        ([PIECE], False, "The connection to enginehouse broke off. Send it again."),
        ([PIECE, '{"error": {"message": "the engine died"}}'], True, "the engine died"),
        ([PIECE], True, "Stopped."),
    ],
)
async def test_what_a_model_has_said_stays_whatever_ends_its_answer(
    house: Stagehouse, browser: Browser, pieces: list[str], goes_on: bool, said: str
) -> None:
    async with opened(browser, house.url) as (page, _):
        await page.evaluate(ANSWERED, [pieces, goes_on])
        await page.get_by_label("Message").fill("what is a kettle?")
        await page.get_by_role("button", name="Send").click()
        await expect(page.locator("[data-text]")).to_have_text("a kettle is")
        if said == "Stopped.":
            await page.locator("form[data-try] button").click()
        await expect(page.locator("[data-answer]")).to_contain_text(said)
        await expect(page.locator("[data-text]")).to_have_text("a kettle is")
        await expect(page.locator("form[data-try] button")).to_have_text("Send")


@pytest.mark.parametrize(
    ("status", "said"), [(401, "You are signed out. Load this page again to sign in."), (502, "with HTTP status 502.")]
)
async def test_who_is_asked_through_something_else_is_told_what_that_said(
    house: Stagehouse, browser: Browser, status: int, said: str
) -> None:
    async with opened(browser, house.url) as (page, _):
        await page.route("**/v1/chat/completions", lambda route: route.fulfill(status=status, body="<html>no</html>"))
        await page.get_by_label("Message").fill("what is a kettle?")
        await page.get_by_role("button", name="Send").click()
        await expect(page.locator("[data-bad]")).to_contain_text(said)


async def test_streams_end_at_once_when_the_server_stops(plane: StagedPlane, browser: Browser) -> None:
    async with Stagehouse(plane).open() as house, opened(browser, house.url):
        await connected(house)
        started = time.monotonic()
        await house.stop()
        assert time.monotonic() - started < 20, "the server itself waits half as long again for what is open"


async def test_an_empty_plane_teaches_the_first_step(browser: Browser) -> None:
    plane = StagedPlane(time.time_ns() // 1_000_000)
    async with Stagehouse(plane).open() as house, opened(browser, house.url, **PHONE) as (page, complaints):
        await connected(house)
        await expect(page.locator("#requests pre")).to_contain_text(f"curl {house.url}/v1/chat/completions")
        assert await page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        plane.node()
        plane.device("cpu0")
        await expect(page.locator("#device-dev-n1-cpu0")).to_contain_text("free")
        plane.model("first", "cfg_1")
        await expect(page.locator("#model-first .pill")).to_have_text("cold")
        await expect(page.locator("form[data-try] option")).to_have_text(["first"])
        await expect(page.locator("form[data-try]")).to_be_visible()
        assert complaints == []
