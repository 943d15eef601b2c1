"""The live page of a whole plane: a login link, a model up by its button, a request, an error, an end at once."""

import re
import time
from collections.abc import Callable

from playwright.async_api import expect

from tests.acceptance.browser import browsing, opened
from tests.plane import NODE, PlaneUnderTest, fake

BROKEN = NODE + fake("alpha", weight_bytes=4 << 20) + fake("broken", share="1/8", fail="start")


async def test_an_operator_works_with_the_page(start_plane: Callable[..., PlaneUnderTest]) -> None:
    plane = start_plane(BROKEN)
    await plane.inspected("alpha", "broken")
    link = re.search(r"http://\S+code=\S+", plane.cli("login").stdout)
    assert link
    async with browsing() as browser, opened(browser, link[0]) as (page, complaints):
        await expect(page).to_have_url(f"{plane.url}/")
        await expect(page.locator("#plane [role=status]")).to_have_text("live")
        await expect(page.locator("#requests pre")).to_contain_text("secrets/admin-token")
        await page.locator("#do-load-alpha").click()
        await expect(page.locator("#model-alpha .pill")).to_have_text("up")
        await expect(page.locator(".run.held")).to_have_count(1)
        await expect(page.locator(".run.held .name")).to_have_text("alpha")
        await expect(page.locator(".sets")).to_contain_text("alpha")

        tried = page.locator("section:has(form[data-try])")
        await tried.get_by_label("Message").fill("what is <b>bold</b>?")
        await tried.get_by_role("button", name="Send").click()
        await expect(tried.locator("[data-text]")).to_contain_text("what is <b>bold</b>?")
        await expect(tried.locator("[data-figures]")).to_contain_text("first token after")
        await expect(tried.get_by_role("button")).to_have_text("Send")
        await expect(page.locator("#requests tbody tr").first.locator(".pill")).to_have_text("finished")
        await page.locator("#requests tbody a").first.click()
        await expect(page.locator("h1")).to_contain_text("Request req_")
        await expect(page.locator(".events")).to_contain_text("RequestFinished")
        await page.go_back()

        await page.locator("#do-load-broken").click()
        row = page.locator("#model-broken")
        await expect(row.locator(".pill")).to_have_text("backing off")
        await expect(row).to_contain_text("told to fail")
        await expect(page.locator("#do-retry-broken")).to_be_enabled()

        await page.locator("#do-sleep-alpha").click()
        await expect(page.locator("#model-alpha .pill")).to_have_text("asleep")
        await expect(page.locator(".pool h4")).to_have_text("Sleeping skeletons")
        assert complaints == []

        started = time.monotonic()
        assert plane.down() == 0
        assert time.monotonic() - started < 30  # an open page holds nobody up
        await expect(page.locator("#wire")).to_contain_text("No connection")
