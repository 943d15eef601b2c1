"""HEAD answers as GET does, without the body."""

import asyncio
from pathlib import Path

import httpx

from tests.integration.web.house import DEADLINE_S, House
from web.tokens import issue_login_code

ALIKE = ("/", "/livez", "/readyz", "/v1/models", "/api/models", "/requests", "/static/base.css", "/nowhere", "/v1/models/none")
STREAMS = ("/live", "/api/events/follow")


async def test_head_has_the_status_and_the_headers_of_get(house: House) -> None:
    async with asyncio.timeout(DEADLINE_S):
        for path in ALIKE:
            got, looked = await house.client.get(path), await house.client.head(path)
            assert (looked.status_code, looked.content) == (got.status_code, b""), path
            assert looked.headers["content-type"] == got.headers["content-type"], path
            assert int(looked.headers["content-length"]) > 0, path


async def test_head_of_a_stream_is_over_at_once_and_nobody_reads_it_on(house: House) -> None:
    async with asyncio.timeout(DEADLINE_S):
        for path in STREAMS:
            looked = await house.client.head(path)
            assert (looked.status_code, looked.content) == (200, b"")
            assert looked.headers["content-type"].startswith("text/event-stream")
        while house.services.stage.hub.readers or house.services._stops:
            await asyncio.sleep(0.01)


async def test_head_needs_a_token_where_get_does_and_finds_no_path_that_only_takes_other_methods(house: House) -> None:
    async with httpx.AsyncClient(base_url=house.url, timeout=DEADLINE_S) as stranger:
        assert (await stranger.head("/livez")).status_code == 200
        assert (await stranger.head("/v1/models")).status_code == 401
        assert (await stranger.head("/", headers={"accept": "text/html"})).headers["location"] == "/login"
    refused = await house.client.head("/v1/chat/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "OPTIONS, POST")
    assert (await house.client.patch("/v1/models")).headers["allow"] == "GET, HEAD, OPTIONS"


async def test_head_uses_no_login_link_up(house: House) -> None:
    link = f"/login?code={issue_login_code(Path(house.plane.data))}"
    for spelt in (link, link.replace("?", "/?"), link.replace("?", "//?")):
        assert (await house.client.head(spelt)).status_code == 405
    async with httpx.AsyncClient(base_url=house.url, timeout=DEADLINE_S) as browser:
        refused = await browser.head(link)
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, OPTIONS, POST")
        assert (await browser.get(link)).status_code == 303
