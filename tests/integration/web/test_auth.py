"""Who may do what: tokens, scopes, sessions, other sites' pages, an outage of the database."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.integration.web.house import DEADLINE_S, House, until
from web import auth, keyring
from web.tokens import issue_login_code, list_tokens, new_token, revoke_token, split


@pytest.fixture
async def browser(house: House) -> AsyncIterator[httpx.AsyncClient]:
    """Logged in by a link."""
    async with httpx.AsyncClient(base_url=house.url, timeout=DEADLINE_S) as client:
        response = await client.get(f"/login?code={issue_login_code(Path(house.plane.data))}")
        assert (response.status_code, response.headers["location"]) == (303, "/")
        cookie = response.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        yield client


async def test_a_login_link_works_once(house: House) -> None:
    code = issue_login_code(Path(house.plane.data))
    async with httpx.AsyncClient(base_url=house.url, timeout=DEADLINE_S) as client:
        assert (await client.get(f"/login?code={code}")).status_code == 303
        assert (await client.get(f"/login?code={code}")).status_code == 403
        assert (await client.get("/login?code=../admin-token")).status_code == 403


async def test_a_person_reads_errors_on_a_page_and_a_program_as_json(house: House, browser: httpx.AsyncClient) -> None:
    person = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    used = await browser.get("/login?code=used", headers=person)
    assert (used.status_code, used.headers["content-type"].partition(";")[0]) == (403, "text/html")
    assert "was used already" in used.text and "<form" in used.text
    assert (await browser.get("/login?code=used")).json()["code"] == "login_code"
    wrong = await browser.post("/login", data={"token": "<b>"}, headers={**person, "sec-fetch-site": "same-origin"})
    assert wrong.status_code == 401 and "not valid" in wrong.text and "<form" in wrong.text
    assert "Authorization" not in wrong.text  # that is for programs
    nowhere = await browser.get("/nowhere", headers=person)
    assert nowhere.status_code == 404 and "Not found" in nowhere.text and "<main" in nowhere.text
    assert (await browser.get("/nowhere")).json()["code"] == "not_found"
    assert (await browser.get("/api/nowhere", headers=person)).json()["code"] == "not_found"
    filtered = await browser.get("/requests?before=-1", headers=person)
    assert filtered.status_code == 400 and "before" in filtered.text and "Validation failed" not in filtered.text


async def test_a_session_reads_and_its_own_pages_change_things(house: House, browser: httpx.AsyncClient) -> None:
    assert (await browser.get("/api/models")).status_code == 200
    own = await browser.post("/api/models/nope/load", headers={"sec-fetch-site": "same-origin"})
    assert own.status_code == 404
    assert own.json()["code"] == "model_unknown"
    for headers in ({}, {"sec-fetch-site": "cross-site"}, {"origin": "http://evil.example"}, {"origin": "null"}):
        response = await browser.post("/api/models/nope/load", headers=headers)
        assert (response.status_code, response.json()["code"]) == (403, "cross_site"), headers
    assert (await browser.post("/api/models/nope/load", headers={"origin": house.url})).status_code == 404


async def test_after_logging_out_the_cookie_is_void(house: House, browser: httpx.AsyncClient) -> None:
    cookie = house.services.sessions.cookie
    value = browser.cookies[cookie]
    response = await browser.post("/logout", headers={"sec-fetch-site": "same-origin"})
    assert response.status_code == 303
    async with httpx.AsyncClient(base_url=house.url, timeout=DEADLINE_S, cookies={cookie: value}) as again:
        assert (await again.get("/api/models")).status_code == 401
    async with httpx.AsyncClient(
        base_url=house.url, timeout=DEADLINE_S, cookies={cookie: f"99999999999.x..{'0' * 64}"}
    ) as forged:
        assert (await forged.get("/api/models")).status_code == 401


@pytest.mark.parametrize("path", ["/live", "/api/events/follow"])
async def test_a_stream_ends_with_the_token_it_was_opened_with(
    house: House, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyring, "TTL_S", 0.0)
    monkeypatch.setattr(auth, "WATCH_S", 0.05)
    lent = await new_token(house.plane.postgres_url, "ada")
    headers = {"authorization": f"Bearer {lent}"}
    async with (
        httpx.AsyncClient(base_url=house.url, timeout=DEADLINE_S) as client,
        client.stream("GET", path, headers=headers) as stream,
    ):
        chunks = stream.aiter_raw()
        await anext(chunks)
        assert await revoke_token(house.plane.postgres_url, (split(lent) or ("",))[0])
        with contextlib.suppress(httpx.RemoteProtocolError):  # cut, not closed
            async with asyncio.timeout(DEADLINE_S):
                async for _ in chunks:
                    pass
        assert (await client.get("/api/models", headers=headers)).status_code == 401


async def test_a_token_logs_a_browser_in_until_it_is_revoked_and_failures_are_limited(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyring, "TTL_S", 0.0)
    lent = await new_token(house.plane.postgres_url, "ada")
    async with httpx.AsyncClient(base_url=house.url, timeout=DEADLINE_S) as client:
        good = await client.post("/login", data={"token": lent}, headers={"x-forwarded-proto": "https"})
        assert good.status_code == 303
        assert {"HttpOnly", "SameSite=strict", "Secure"} <= set(good.headers["set-cookie"].split("; "))
        session = {"cookie": good.headers["set-cookie"].partition(";")[0]}  # its jar keeps it from plain HTTP
        assert (await client.get("/api/models", headers=session)).status_code == 200
        assert await revoke_token(house.plane.postgres_url, (split(lent) or ("",))[0])
        assert (await client.get("/api/models", headers=session)).status_code == 401
        assert (await client.get("/login", headers=session)).status_code == 200
        client.cookies.clear()
        statuses = [(await client.post("/login", data={"token": "eh_a_b"})).status_code for _ in range(11)]
        assert statuses == [401] * 10 + [429]
        assert int((await client.post("/login", data={"token": house.token})).headers["retry-after"]) > 0


async def test_a_browser_that_is_not_logged_in_is_shown_the_way(house: House) -> None:
    async with httpx.AsyncClient(base_url=house.url, timeout=DEADLINE_S) as client:
        page = await client.get("/", headers={"accept": "text/html"})
        assert (page.status_code, page.headers["location"]) == (303, "/login")
        live = await client.get("/live", headers={"accept": "text/html, text/event-stream"})
        assert (live.status_code, live.json()["code"]) == (401, "missing_api_key")
        part = {"accept": "text/html", "hx-request": "true"}
        for told in (
            await client.get("/events/1/document", headers=part),
            await client.post("/models/a/operations", headers=part),
        ):
            assert told.status_code == 401 and told.text.startswith("<p ") and "You are signed out." in told.text
        form = await client.get("/login")
        assert (form.status_code, "text/html" in form.headers["content-type"]) == (200, True)
        api = await client.get("/api/models")
        assert (api.status_code, api.json()["code"]) == (401, "missing_api_key")


async def test_another_host_name_is_refused(house: House) -> None:
    response = await house.client.get("/api/models", headers={"host": "evil.example"})
    assert (response.status_code, response.json()["code"]) == (421, "wrong_host")
    for host in ("localhost:1", "127.0.0.1", "[::1]:80"):
        assert (await house.client.get("/api/models", headers={"host": host})).status_code == 200


async def test_every_answer_carries_the_security_headers(house: House) -> None:
    for path in ("/livez", "/api/models", "/v1/models", "/nowhere", "/login"):
        headers = (await house.client.get(path)).headers
        assert "default-src 'none'" in headers["content-security-policy"], path
        assert headers["x-content-type-options"] == "nosniff"


async def test_an_inference_token_is_for_v1_only(house: House) -> None:
    token = await new_token(house.plane.postgres_url, "app", "inference")
    async with httpx.AsyncClient(
        base_url=house.url, timeout=DEADLINE_S, headers={"authorization": f"Bearer {token}"}
    ) as client:
        assert (await client.get("/v1/models")).status_code == 200
        response = await client.get("/api/models")
        assert (response.status_code, response.json()["code"]) == (403, "scope")
        assert "--scope admin" in response.json()["message"], "what to do"
        assert (await client.get("/metrics")).status_code == 403


async def test_a_revoked_token_stops_working(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("web.keyring.TTL_S", 0.05)
    token = await new_token(house.plane.postgres_url, "short")
    async with httpx.AsyncClient(
        base_url=house.url, timeout=DEADLINE_S, headers={"authorization": f"Bearer {token}"}
    ) as client:
        assert (await client.get("/v1/models")).status_code == 200
        rows = {row.name: row for row in await list_tokens(house.plane.postgres_url)}
        assert await revoke_token(house.plane.postgres_url, rows["short"].id)
        assert not await revoke_token(house.plane.postgres_url, rows["short"].id)

        async def refused() -> bool:
            return (await client.get("/v1/models")).status_code == 401

        await until(refused)


async def test_while_the_database_is_away_known_tokens_work_and_unknown_ones_are_503(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("web.keyring.TTL_S", 0.01)
    other = await new_token(house.plane.postgres_url, "other")
    assert (await house.client.get("/v1/models")).status_code == 200

    async def away(_: str) -> None:
        raise ConnectionRefusedError

    with monkeypatch.context() as outage:
        outage.setattr(house.services.keyring, "_look_up", away)
        await asyncio.sleep(0.05)  # past the time for which a token needs no look-up
        assert (await house.client.get("/v1/models")).status_code == 200
        response = await house.client.get("/v1/models", headers={"authorization": f"Bearer {other}"})
        assert response.status_code == 503
        assert response.headers["retry-after"]
    assert (await house.client.get("/v1/models", headers={"authorization": f"Bearer {other}"})).status_code == 200
