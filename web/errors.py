"""Errors as callers see them: one exception, two shapes (OpenAI's under /v1, ours elsewhere), one table of statuses."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from controlplane.refusal import Code, Refusal, Refused

STATUS: Final[Mapping[Code, int]] = {
    Code.MODEL_UNKNOWN: 404,
    Code.MODEL_EXISTS: 409,
    Code.MODEL_RETIRED: 404,
    Code.MODEL_UNREADY: 503,
    Code.MODEL_UNUSABLE: 400,
    Code.CANNOT_FIT: 400,
    Code.BACKING_OFF: 503,
    Code.TOO_LONG: 400,
    Code.TOO_LARGE: 413,
    Code.INVALID: 400,
    Code.NOT_AVAILABLE: 400,
    Code.NO_NODE: 503,
    Code.BUSY: 409,
    Code.DEVICE_UNKNOWN: 404,
    Code.NOT_UP: 409,
    Code.ALREADY_THERE: 409,
    Code.NO_ROOM: 409,
    Code.QUEUE_FULL: 429,
    Code.IMAGE_UNKNOWN: 404,
    Code.INSTANCE_UNKNOWN: 404,
    Code.REQUEST_UNKNOWN: 404,
    Code.OPERATION_UNKNOWN: 404,
    Code.EVENT_UNKNOWN: 404,
    Code.REQUEST_EXISTS: 409,
    Code.STALE: 409,
    Code.GATEWAY_UNKNOWN: 503,
    Code.UNAVAILABLE: 503,
    Code.FAULT: 500,
}

ENDED_STATUS: Final[Mapping[str, int]] = {
    "too_long": 400, "invalid": 400, "cannot_fit": 400, "model_unusable": 400, "model_retired": 404,
    "cancelled": 410, "engine_died": 502, "frontend_lost": 502, "internal": 500,
}  # fmt: skip
"""Codes with which a request that was admitted can fail; any other is 503, and trying again may help."""

RETRY_STATUS: Final = frozenset({429, 503})
DEFAULT_RETRY_MS: Final = 1000


class ApiError(Exception):
    """A request to the API that is not carried out.

    Attributes: status (HTTP), code (stable), message (one sentence), details (JSON values), retry_after_ms,
    param (the request's field that is wrong, if one is).
    """

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after_ms: int | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.retry_after_ms = retry_after_ms if retry_after_ms is not None or status not in RETRY_STATUS else DEFAULT_RETRY_MS
        self.details: Mapping[str, object] = details or {}

    @staticmethod
    def of(refusal: Refused | Refusal) -> "ApiError":
        param = "model" if refusal.code in (Code.MODEL_UNKNOWN, Code.MODEL_RETIRED) else None
        return ApiError(
            STATUS[refusal.code], refusal.code, refusal.message, param=param, retry_after_ms=refusal.retry_after_ms,
            details=refusal.details,
        )  # fmt: skip

    @staticmethod
    def ended(code: str, message: str, retry_after_ms: int | None = None) -> "ApiError":
        """The error of a request that had been admitted and then failed with `code`."""
        return ApiError(ENDED_STATUS.get(code, 503), code, message, retry_after_ms=retry_after_ms)

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"www-authenticate": 'Bearer realm="enginehouse"'}
        if self.retry_after_ms is None:
            return {}
        return {"retry-after": str(max(1, -(-self.retry_after_ms // 1000)))}

    def openai(self) -> bytes:
        """The body under /v1."""
        kind = _openai_type(self.status)
        error: dict[str, Any] = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def plain(self) -> bytes:
        """The body everywhere else."""
        details = {**self.details, "param": self.param} if self.param else dict(self.details)
        return msgspec.json.encode({"code": self.code, "message": self.message, "details": details}, enc_hook=str)

    def body(self, path: str) -> bytes:
        return self.openai() if path.startswith("/v1") else self.plain()


def _openai_type(status: int) -> str:
    match status:
        case 401:
            return "authentication_error"
        case 403:
            return "permission_error"
        case 404:
            return "not_found_error"
        case 429:
            return "rate_limit_error"
        case _ if status < 500:
            return "invalid_request_error"
        case 503:
            return "service_unavailable_error"
        case _:
            return "server_error"
