"""Whether a prompt is too long for its model, found out before anything is loaded for it."""

from typing import Final

import msgspec
import nats.errors
import structlog

from controlplane.bus import Bus
from controlplane.fleet import Fleet, Model
from controlplane.rungs import Rung
from controlplane.subjects import Measure, Measured, measure
from web.attempt import Ask
from web.errors import ApiError

_log = structlog.get_logger(__name__)

MEASURE_S: Final = 5.0
"""A node may have to load a tokenizer first."""
MESSAGE_TOKENS: Final = 16
"""Template tokens around one message, at most; beyond it the node counts."""


async def check_length(bus: Bus, fleet: Fleet, ask: Ask, messages: int) -> None:
    """Refuse what can't fit the model's context. Raises ApiError (400).

    A tokenizer makes at most one token of a byte, so most prompts need no counting. When counting isn't possible the
    frontend, which counts anyway, has the last word; so it has when the model is up: nothing would be loaded.
    """
    model = fleet.resolve(ask.model)
    if model is None or model.facts is None:
        return
    context = model.facts.context_tokens
    if ask.max_tokens is not None and ask.max_tokens >= context:
        raise too_long(model, 1, ask.max_tokens, "max_tokens")
    answer = ask.max_tokens or 1
    if ask.prompt_bytes + model.facts.template_bytes + MESSAGE_TOKENS * messages + answer <= context:
        return
    if any(i.rung is Rung.UP and i.model == model.model for i in fleet.instances.values()):
        return
    if (tokens := await _count(bus, fleet, model, ask)) is not None and tokens + answer > context:
        raise too_long(model, tokens, answer if ask.max_tokens else 0, "messages" if ask.kind == "chat" else "prompt")


def too_long(model: Model, prompt: int, answer: int, param: str) -> ApiError:
    assert model.facts is not None
    context = model.facts.context_tokens
    if answer >= context:  # without counting the prompt
        asked, cure = f"{answer} for the answer leave no room for a prompt", f"ask for fewer in '{param}'"
    else:
        sizes = f"{prompt} prompt tokens" + (f" and {answer} for the answer" if answer else "")
        asked, cure = f"{sizes} are too many", "shorten the prompt or the answer"
    message = f"model '{model.model}' has a context of {context} tokens; {asked}: {cure}"
    return ApiError(400, "too_long", message, param=param, details={"context_tokens": context, "prompt_tokens": prompt})


async def _count(bus: Bus, fleet: Fleet, model: Model, ask: Ask) -> int | None:
    """Tokens of the prompt; None: no node can tell."""
    if not bus.nc.is_connected:
        return None
    request = msgspec.json.encode(Measure(model=model.model, kind=ask.kind, body=msgspec.Raw(ask.body)))
    for node in (node.node for node in fleet.nodes.values() if node.heard):
        try:
            reply = await bus.nc.request(measure(node), request, timeout=MEASURE_S)
            measured = msgspec.json.decode(reply.data, type=Measured)
        except (nats.errors.Error, TimeoutError, OSError, msgspec.DecodeError) as error:
            _log.info("not_measured", node=node, model=model.model, reason=repr(error))
            continue
        if measured.error:
            raise ApiError(400, measured.code, measured.error, param="messages" if ask.kind == "chat" else "prompt")
        if measured.prompt_tokens is not None:
            return measured.prompt_tokens
    return None
