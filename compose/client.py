"""A small HTTP client of the plane's REST API, for the CLI. Blocking; one connection."""

import http.client
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from compose.directory import plane_of
from compose.login import ADMIN_TOKEN
from compose.refusal import ApiRefused, EnvironmentRefusal

TIMEOUT_S: Final = 30.0
SHOWN: Final = 100
"""Characters that are said again of a name which can't be one."""
IDLE_S: Final = 10.0
"""A connection that was not used for so long is opened anew: servers, and what lies between, end idle ones without a word."""


class Client:
    """`url` is the plane's, without a path; `token` an API token."""

    def __init__(self, url: str, token: str, timeout_s: float = TIMEOUT_S) -> None:
        tls, host, port = _address(url)
        if not token or not token.isascii() or not token.isprintable():
            cure = "Set ENGINEHOUSE_TOKEN to what `enginehouse token new` printed."
            raise EnvironmentRefusal("token", "The token has characters that none has, or none at all.", cure)
        kind = http.client.HTTPSConnection if tls else http.client.HTTPConnection
        self.url = url.rstrip("/")
        self._connection = kind(host, port, timeout=timeout_s)
        self._used_at = 0.0
        self._token = token

    @staticmethod
    def of(data: Path, timeout_s: float = TIMEOUT_S) -> "Client":
        """The client of the plane in `data`, or of the one that ENGINEHOUSE_URL and ENGINEHOUSE_TOKEN name.

        Raises EnvironmentRefusal when neither says where the plane is.
        """
        url, token = elsewhere(), os.environ.get("ENGINEHOUSE_TOKEN")
        if url is None:
            plane = plane_of(data)
            url = plane.web_url
        if token is None:
            try:
                token = (data / "secrets" / ADMIN_TOKEN).read_text().strip()
            except FileNotFoundError as error:
                raise EnvironmentRefusal(
                    "starting",
                    f"The plane in {data} has not come up yet.",
                    "Wait for `enginehouse up` to say that it is ready, or set ENGINEHOUSE_TOKEN.",
                ) from error
            except OSError as error:
                raise EnvironmentRefusal(
                    "no_token", f"{data / 'secrets' / ADMIN_TOKEN} can't be read: {error.strerror}.", "Set ENGINEHOUSE_TOKEN."
                ) from error
        return Client(url, token, timeout_s)

    def get(self, *path: str, **query: object) -> Any:
        """GET `/path/...`, each part quoted. Raises ApiRefused or EnvironmentRefusal."""
        return self._call("GET", path, {name: value for name, value in query.items() if value is not None})

    def post(self, *path: str, body: object = None, key: str | None = None) -> Any:
        """POST a JSON body. `key`: sent as Idempotency-Key."""
        return self._call("POST", path, {}, body, {"Idempotency-Key": key} if key else {})

    def delete(self, *path: str) -> Any:
        return self._call("DELETE", path, {})

    def close(self) -> None:
        self._connection.close()

    def _call(
        self, method: str, path: tuple[str, ...], query: Mapping[str, object], body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:  # fmt: skip
        for part in path:
            if not part or "/" in part:  # to the server it would be another path
                raise ApiRefused(0, "invalid", f"{part[:SHOWN]!r} is no name that anything here has", None)
        target = "/" + "/".join(quote(part, safe="") for part in path) + (f"?{urlencode(query)}" if query else "")
        content = msgspec.json.encode(body) if body is not None else b""
        sent = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json", **(headers or {})}
        if time.monotonic() - self._used_at > IDLE_S:
            self._connection.close()
        try:
            self._connection.request(method, target, content, sent)
            response = self._connection.getresponse()
            answer = response.read()
            self._used_at = time.monotonic()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise EnvironmentRefusal(
                "away",
                f"The plane at {self.url} does not answer: {error}.",
                "See that ENGINEHOUSE_URL names it, and that it runs there."
                if elsewhere() is not None
                else "Look at `enginehouse status`; start it with `up`.",
            ) from error
        if response.status >= http.client.BAD_REQUEST:
            raise refused(response.status, answer, response.headers.get("Retry-After"))
        return msgspec.json.decode(answer) if answer else None


def elsewhere() -> str | None:
    """URL of a plane that is not looked for in the data directory."""
    return os.environ.get("ENGINEHOUSE_URL")


def _address(url: str) -> tuple[bool, str, int | None]:
    """Whether it takes TLS, host, and port of a plane's URL. Raises EnvironmentRefusal."""
    try:
        parts = urlsplit(url)
        if parts.scheme in {"http", "https"} and parts.hostname and parts.path in {"", "/"} and not parts.query:
            return parts.scheme == "https", parts.hostname, parts.port
    except ValueError:  # a port that is no number or too large, brackets around nothing
        pass
    raise EnvironmentRefusal("url", f"{url!r} is not a plane's address.", "Write http://HOST:PORT in ENGINEHOUSE_URL.")


def refused(status: int, answer: bytes, retry_after: str | None) -> ApiRefused:
    """The refusal that an error answer means, whatever sent it."""
    try:
        fields = msgspec.json.decode(answer)
        error = fields.get("error", fields) if isinstance(fields, dict) else {}
    except msgspec.DecodeError:
        error = {}
    error = error if isinstance(error, dict) else {}
    reasons = "; ".join(map(str, error.get("reasons", ())))  # of /readyz
    message = str(error.get("message") or reasons or answer[:200].decode(errors="replace") or f"status {status}")
    seconds = float(retry_after) if retry_after and retry_after.replace(".", "", 1).isdigit() else None
    return ApiRefused(status, str(error.get("code") or status), message, seconds)
