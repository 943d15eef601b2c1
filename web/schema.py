"""The API's schema as it is served: with the errors that are sent, where the framework would announce its own."""

from typing import Any, Final

from litestar import Request
from litestar.openapi.plugins import JsonRenderPlugin

_TEXT: Final = {"type": "string"}
_OURS: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["code", "message", "details"],
    "properties": {
        "code": {**_TEXT, "description": "Stable"},
        "message": {**_TEXT, "description": "For people"},
        "details": {"type": "object", "description": "'param' is the field that is wrong, if one is"},
    },
}
_OPENAI: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _TEXT, "type": _TEXT, "param": {"type": ["string", "null"]}, "code": _TEXT},
        }
    },
}


class Schema(JsonRenderPlugin):
    """`errors.ApiError` has both shapes; they come with any status but an operation's own."""

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        paths = {path: _honest(path, operations) for path, operations in openapi_schema["paths"].items()}
        components = openapi_schema["components"]
        schemas = {**components["schemas"], "Error": _OURS, "OpenAIError": _OPENAI}
        shown = {**openapi_schema, "paths": paths, "components": {**components, "schemas": schemas}}
        return super().render(request, _any_of(shown))


def _honest(path: str, operations: dict[str, Any]) -> dict[str, Any]:
    name = "OpenAIError" if path.startswith("/v1") else "Error"
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    refused = {"description": "Refused, or failed; Retry-After says when to try again, if that may help", "content": content}
    return {
        method: {**one, "responses": {**{k: v for k, v in one["responses"].items() if k != "400"}, "default": refused}}
        for method, one in operations.items()
    }


def _any_of(part: Any) -> Any:
    """A union as such: the framework says `oneOf`, and an answer may fit more than one of its members."""
    match part:
        case dict():
            return {"anyOf" if key == "oneOf" else key: _any_of(value) for key, value in part.items()}
        case list():
            return [_any_of(one) for one in part]
        case _:
            return part
