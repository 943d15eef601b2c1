"""Debian's Chromium for tests of the pages, and a page that remembers what went wrong on it."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from playwright.async_api import Browser, Page, async_playwright, expect

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
SEEN_S = 40.0
"""What is expected of a page is waited for so long; its own deadline, and a click's: two cores draw, serve and decide."""
expect.set_options(timeout=SEEN_S * 1000)


@contextlib.asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield browser
        finally:
            await browser.close()


@contextlib.asynccontextmanager
async def opened(browser: Browser, url: str, **context: Any) -> AsyncIterator[tuple[Page, list[str]]]:
    """A page at `url` and the list of its complaints: errors of scripts, breaches of the content security policy."""
    settings = {"viewport": {"width": 1440, "height": 900}, **context}
    made = await browser.new_context(**settings)
    complaints: list[str] = []
    try:
        page = await made.new_page()
        page.set_default_timeout(SEEN_S * 1000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        await page.goto(url)
        yield page, complaints
    finally:
        await made.close()
