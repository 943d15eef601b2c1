"""Routes under /v1."""

from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from litestar import Request, Response, Router, get, post
from litestar.openapi import ResponseSpec
from litestar.openapi.spec import OpenAPIMediaType, Operation, RequestBody, Schema
from litestar.openapi.spec.enums import OpenAPIType
from litestar.params import FromPath, HeaderParameter
from msgspec.structs import replace

from controlplane.fleet import Fleet, Model
from web.attempt import Ask
from web.openai import bodies
from web.openai.length import check_length
from web.openai.responses import CallResponse
from web.services import Services

Prefer = Annotated[
    str | None,
    HeaderParameter(
        name="Prefer",
        max_length=200,
        description="`wait=0`: 503 with Retry-After at once if the model is not up, and nothing is loaded for this caller; "
        "`wait=N`: likewise after N seconds in the queue. Whatever N is, the plane gives a request up after "
        "120 s in the queue (600 s where its model climbs).",
    ),
]

_OBJECT: Final = ResponseSpec(dict[str, object], False, "As OpenAI's API has it")


def _services(request: Request[Any, Any, Any]) -> Services:
    services: Services = request.app.state.services
    return services


def _body(*required: str) -> RequestBody:
    fields = {"model": Schema(type=OpenAPIType.STRING), "stream": Schema(type=OpenAPIType.BOOLEAN)}
    fields |= {"max_tokens": Schema(type=OpenAPIType.INTEGER, minimum=1)}
    fields |= {name: Schema(type=OpenAPIType.ARRAY if name == "messages" else OpenAPIType.STRING) for name in required}
    schema = Schema(type=OpenAPIType.OBJECT, required=["model", *required], properties={**fields})
    return RequestBody(content={"application/json": OpenAPIMediaType(schema=schema)}, required=True)


@dataclass
class _ChatOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _body("messages")


@dataclass
class _CompletionOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _body("prompt")


@post("/chat/completions", status_code=200, operation_class=_ChatOperation, summary="Chat completion, streamed or not")
async def chat_completions(request: Request[Any, Any, Any], prefer: Prefer = None) -> CallResponse:
    services = _services(request)
    body, ask = bodies.chat(await request.body())
    await check_length(services.bus, services.view.fleet, ask, len(body.messages))
    return _call(request, body, ask, prefer)


@post("/completions", status_code=200, operation_class=_CompletionOperation, summary="Text completion, streamed or not")
async def completions(request: Request[Any, Any, Any], prefer: Prefer = None) -> CallResponse:
    services = _services(request)
    body, ask = bodies.completion(await request.body())
    await check_length(services.bus, services.view.fleet, ask, 1)
    return _call(request, body, ask, prefer)


def _call(
    request: Request[Any, Any, Any], body: bodies.ChatBody | bodies.CompletionBody, ask: Ask, prefer: str | None
) -> CallResponse:
    ask = replace(ask, patience_s=bodies.patience(prefer))
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    return CallResponse(_services(request).gateway, ask, include_usage=include_usage)


@get("/models", summary="Models that can be asked for", responses={200: _OBJECT})
async def models(request: Request[Any, Any, Any]) -> Response[bytes]:
    fleet = _services(request).view.fleet
    names = [model.model for model in fleet.models.values() if not model.retired] + list(fleet.aliases)
    return _json({"object": "list", "data": [_entry(name, fleet) for name in sorted(names)]})


@get("/models/{model:str}", summary="One model, by name or alias", responses={200: _OBJECT})
async def model(request: Request[Any, Any, Any], model: FromPath[str]) -> Response[bytes]:
    fleet = _services(request).view.fleet
    known = fleet.resolve(model)
    if known is None or known.retired:
        raise bodies.unknown_model(model)
    return _json(_entry(model, fleet))


def _entry(name: str, fleet: Fleet) -> dict[str, object]:
    known: Model | None = fleet.resolve(name)
    assert known is not None
    entry: dict[str, object] = {
        "id": name, "object": "model", "created": known.registered_ms // 1000, "owned_by": "enginehouse",
    }  # fmt: skip
    if name != known.model:
        entry["root"] = known.model
    if known.facts is not None:
        entry["max_model_len"] = known.facts.context_tokens
    return entry


def _json(body: object) -> Response[bytes]:
    return Response(msgspec.json.encode(body), media_type="application/json")


router = Router(path="/v1", route_handlers=[chat_completions, completions, models, model], tags=["OpenAI"])
