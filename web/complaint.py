"""What is wrong with a request that the framework refused, with the caller's own names for its parts."""

from typing import Any, Final, get_args

from litestar import Request
from litestar.datastructures import Headers
from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException, ValidationException

from web.head import USED_UP
from web.wording import reworded

BODY: Final = "data"
"""The framework's name for a body."""
SHOWN: Final = 100
NO_JSON: Final = ("JSON is malformed", "Input data was truncated", "Invalid UTF-8")
ENUM: Final = "Invalid enum value"


def for_a_person(request: Request[Any, Any, Any]) -> bool:
    """Whether a browser asks for a page, and no program for data."""
    return "text/html" in request.headers.get("accept", "") and not request.url.path.startswith(("/v1", "/api"))


def complaint(request: Request[Any, Any, Any], error: HTTPException) -> tuple[str | None, str]:
    """Return which parameter is wrong, if one is, and what is wrong."""
    match error:
        case NotFoundException(detail="Not Found"):  # no route; a route that finds nothing says what
            path = request.url.path
            if for_a_person(request):
                return None, f"There is no page {path[:SHOWN]}."
            cure = "it has chat/completions, completions and models" if path.startswith("/v1") else "GET /api/schema lists all"
            return None, f"there is no {request.method} {path[:SHOWN]}; {cure}"
        case MethodNotAllowedException():
            return None, f"{request.url.path[:SHOWN]} takes {', '.join(allowed(request, error))}, not {request.method}"
        case ValidationException(extra=[dict(first), *_]):
            return _invalid(request, str(first.get("key") or ""), str(first.get("message", error.detail)))
        case HTTPException(detail=detail) if detail.startswith(NO_JSON):
            return None, f"the body is not JSON: {detail}"
        case _:
            return None, error.detail


def allowed(request: Request[Any, Any, Any], error: MethodNotAllowedException) -> list[str]:
    """The methods that would be taken: HEAD wherever GET is and changes nothing, which the routes don't know."""
    known = set(Headers(error.headers or {}).get("allow", "").split(", "))
    return sorted(known | {"HEAD"} if "GET" in known and request.url.path not in USED_UP else known)


def _invalid(request: Request[Any, Any, Any], name: str, message: str) -> tuple[str | None, str]:
    if name == BODY:
        return reworded(message) if message != f"'{BODY}'" else (None, "the request has no body; send JSON")  # it is a KeyError
    handler = request.scope.get("route_handler")
    declared = handler.parsed_fn_signature.parameters.get(name) if handler is not None else None
    if declared is None:
        return reworded(message, name or None)
    place, told = reworded(message, getattr(declared.kwarg_definition, "name", None) or name)
    if message.startswith(ENUM):
        choices = [choice for kind in get_args(declared.annotation) for choice in get_args(kind)]
        told = f"{told}; it can be {', '.join(map(str, choices))}" if choices else told
    return place, told
