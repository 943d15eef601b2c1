"""Browser sessions: a signed cookie that says until when it is good. Logging out is remembered until then."""

import hashlib
import hmac
import secrets
import time
from collections import deque
from typing import Final

from web.errors import ApiError

COOKIE: Final = "enginehouse_session"
SESSION_S: Final = 12 * 3600
"""A working day."""
ATTEMPTS: Final = 10
WINDOW_S: Final = 60.0
"""At most so many failed log-ins in so long, from everybody together."""


class Sessions:
    """Issues and checks the cookie's value: `<until>.<nonce>.<signature>`."""

    def __init__(self, key: str) -> None:
        self._key = hashlib.sha256(b"enginehouse session " + key.encode()).digest()
        self._revoked: dict[str, int] = {}
        self._failures: deque[float] = deque()

    def issue(self) -> str:
        text = f"{int(time.time()) + SESSION_S}.{secrets.token_urlsafe(18)}"
        return f"{text}.{self._sign(text)}"

    def valid(self, value: str) -> bool:
        text, _, signature = value.rpartition(".")
        until, _, nonce = text.partition(".")
        if not signature.isascii() or not hmac.compare_digest(self._sign(text), signature):
            return False
        return int(until) > time.time() and nonce not in self._revoked

    def revoke(self, value: str) -> None:
        """Log out: this value is void from now on."""
        if not self.valid(value):
            return
        until, nonce, _ = value.split(".")
        now = time.time()
        self._revoked = {nonce: end for nonce, end in self._revoked.items() if end > now}
        self._revoked[nonce] = int(until)

    def allow_attempt(self) -> None:
        """Raises ApiError (429) after too many failed log-ins."""
        now = time.monotonic()
        while self._failures and now - self._failures[0] > WINDOW_S:
            self._failures.popleft()
        if len(self._failures) >= ATTEMPTS:
            wait_ms = round((WINDOW_S - (now - self._failures[0])) * 1000)
            message = f"{ATTEMPTS} log-ins failed within {WINDOW_S:.0f} s; wait a little"
            raise ApiError(429, "too_many_attempts", message, retry_after_ms=wait_ms)

    def failed(self) -> None:
        self._failures.append(time.monotonic())

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()
