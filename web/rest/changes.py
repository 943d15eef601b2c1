"""Operators' commands over REST: models registered, revised, retired, loaded, put to sleep, saved, stopped, retried: 202."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from litestar import Response, delete, post, put
from litestar.params import Body, FromPath

from controlplane.commands import (
    AnyCommand,
    Checkpoint,
    Load,
    Move,
    RegisterModel,
    RetireModel,
    Retry,
    ReviseModel,
    Save,
    Sleep,
    Stop,
)
from controlplane.settings import spec_from_fields
from web.errors import ApiError
from web.rest.asking import Accepted, Ask, Changed, Key, answered, command

Outcome = Response[Changed | Accepted]
Fields = Annotated[dict[str, Any], Body(description="The fields of a `[[model]]` table of the settings file")]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where a move goes."""

    device: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    """Name or id of a device."""


Where = Annotated[Target, Body(description="The device to go to")]


@post("/models", status_code=202, summary="Register a model")
async def register(request: Ask, data: Fields, key: Key = None) -> Outcome:
    return answered(await command(request, RegisterModel(spec=spec_from_fields(data))))


@put("/models/{name:str}", status_code=202, summary="Revise a model: the whole spec as it shall be")
async def revise(request: Ask, name: FromPath[str], data: Fields, key: Key = None) -> Outcome:
    fields: Mapping[str, object] = {"name": name, **data}
    if fields["name"] != name:
        message = f"'name' is {str(fields['name'])[:100]!r} in the body and {name[:100]!r} in the path"
        raise ApiError(400, "invalid", message, param="name")
    return answered(await command(request, ReviseModel(spec=spec_from_fields(fields))))


@delete("/models/{name:str}", status_code=202, summary="Retire a model: no new requests, running ones finish")
async def retire(request: Ask, name: FromPath[str], key: Key = None) -> Outcome:
    return answered(await command(request, RetireModel(model=name)))


@post("/models/{name:str}/load", status_code=202, summary="Bring a model up")
async def load(request: Ask, name: FromPath[str], key: Key = None) -> Outcome:
    return await _operate(request, Load(model=name))


@post("/models/{name:str}/sleep", status_code=202, summary="Take a model's instances to sleep: the skeleton stays")
async def sleep(request: Ask, name: FromPath[str], key: Key = None) -> Outcome:
    return await _operate(request, Sleep(model=name))


@post("/models/{name:str}/checkpoint", status_code=202, summary="Take a model's skeletons off their GPU: needs CUDA")
async def checkpoint(request: Ask, name: FromPath[str], key: Key = None) -> Outcome:
    return await _operate(request, Checkpoint(model=name))


@post("/models/{name:str}/save", status_code=202, summary="Take a model's instances to disk: no process is left")
async def save(request: Ask, name: FromPath[str], key: Key = None) -> Outcome:
    return await _operate(request, Save(model=name))


@post("/models/{name:str}/move", status_code=202, summary="Bring what serves a model to another device of its node")
async def move(request: Ask, name: FromPath[str], data: Where, key: Key = None) -> Outcome:
    return await _operate(request, Move(what=name, device=data.device))


@post("/instances/{name:str}/move", status_code=202, summary="Bring an instance that is up to another device of its node")
async def move_instance(request: Ask, name: FromPath[str], data: Where, key: Key = None) -> Outcome:
    return await _operate(request, Move(what=name, device=data.device))


@post("/models/{name:str}/stop", status_code=202, summary="End the processes of a model's instances")
async def stop(request: Ask, name: FromPath[str], key: Key = None) -> Outcome:
    return await _operate(request, Stop(model=name))


@post("/models/{name:str}/retry", status_code=202, summary="End a model's back-off or rejection and try again")
async def retry(request: Ask, name: FromPath[str], key: Key = None) -> Outcome:
    return await _operate(request, Retry(model=name))


async def _operate(request: Ask, body: AnyCommand) -> Outcome:
    return answered(await command(request, body))
