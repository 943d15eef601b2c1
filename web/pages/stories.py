"""Pages about one thing: a request, an operation, a model, an instance. Its facts, then what happened to it."""

from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Request, Response, get
from litestar.exceptions import NotFoundException
from litestar.params import FromPath

from controlplane.envelope import Recorded
from controlplane.events import OperationFailed, OperationRequested, OperationSucceeded
from controlplane.fleet import Fleet, Instance
from controlplane.spec import Idle
from web.pages.answers import page, stage_of
from web.pages.logs import PAGE, Before, pages
from web.views.devicenames import names_of
from web.views.events import row
from web.views.figures import count, share, size, span
from web.views.requests import RequestRow, ended, opened
from web.views.standing import shown_model, standing

ENDS = {"stop": "the model ended its answer", "length": "the answer is as long as it may be"}
TONES = {"running": "climb", "queued": "sleep", "finished": "up", "failed": "failed", "cancelled": "cold"}


class Fact(msgspec.Struct, frozen=True):
    name: str
    text: str = ""
    href: str = ""
    at_ms: int = 0


def _story(request: Request[Any, Any, Any], events: Sequence[Recorded], before: int | None, **values: object) -> Response[str]:
    shown: dict[str, Any] = {"tone": "", "words": "", "lead": "", "facts": (), "card": None, "mark": "", **values}
    links = pages(request.url.path, events, before)
    names = names_of(stage_of(request).sight.fleet)
    return page(stage_of(request), "story.html", rows=[row(r, names) for r in events[:PAGE]], **links, **shown)


@get("/requests/{name:str}", include_in_schema=False)
async def request_story(request: Request[Any, Any, Any], name: FromPath[str]) -> Response[str]:
    stage = stage_of(request)
    events = await stage.history.page_of_events(before=None, limit=PAGE + 1, stream=f"request:{name}")
    known = stage.sight.fleet.requests.get(name)
    shown = next((found for r in events if (found := ended(r)) is not None), opened(known) if known else None)
    if shown is None and not events:
        raise NotFoundException(f"There is no request {name}. Its id is in the answer's headers and in the request log.")
    if shown is None:
        return _story(request, events, None, title=f"Request {name}", here="requests")
    return _story(
        request, events, None, title=f"Request {name}", here="requests", tone=TONES[shown.outcome], words=shown.outcome,
        lead=why_words(shown), facts=_request_facts(shown),
    )  # fmt: skip


def why_words(shown: RequestRow) -> str:
    if shown.outcome == "finished" and (ended := ENDS.get(shown.reason)) is not None:
        return f"{ended} ({shown.reason})"
    if shown.outcome == "failed" and shown.message:
        return f"{shown.message} ({shown.reason})"
    return " ".join(filter(None, (shown.reason, shown.message)))


def _request_facts(shown: RequestRow) -> tuple[Fact, ...]:
    facts = [
        Fact("model", shown.model, f"/models/{shown.model}"), Fact("accepted", at_ms=shown.at_ms),
        Fact("kind", f"{shown.kind}, {'streamed' if shown.streamed else 'in one answer'}"),
        Fact("queued", span(shown.queued_ms)), Fact("first token", span(shown.first_token_ms)),
        Fact("total", span(shown.took_ms)),
        Fact("tokens in, out", f"{count(shown.prompt_tokens)}, {count(shown.completion_tokens)}"),
        Fact("attempts", count(shown.attempts)),
    ]  # fmt: skip
    return (*facts, Fact("instance", shown.instance, f"/instances/{shown.instance}")) if shown.instance else tuple(facts)


@get("/operations/{name:str}", include_in_schema=False)
async def operation_story(request: Request[Any, Any, Any], name: FromPath[str], before: Before = None) -> Response[str]:
    events = await stage_of(request).history.page_of_operation(name, before=before, limit=PAGE + 1)
    own = await stage_of(request).history.page_of_events(before=None, limit=10, stream=f"operation:{name}")
    if not events and before is None:
        raise NotFoundException(f"There is no operation {name}.")
    if not own:  # what a request caused carries an operation's id too, and nobody asked for an operation
        subject = next((str(asked) for r in events if (asked := getattr(r.event, "request", None))), "")
        cause = (Fact("request", subject, f"/requests/{subject}"),) if subject else ()
        return _story(request, events, before, title="What a request caused", facts=cause, here="requests")
    tone, words, lead, facts = "climb", "open", "", list[Fact]()
    for recorded in own:
        match recorded.event:
            case OperationSucceeded() as e:
                tone, words, lead = "up", "succeeded", e.note
                facts.append(Fact("took", span(e.took_ms)))
            case OperationFailed() as e:
                tone, words, lead = "failed", "failed", f"{e.message} ({e.code})"
            case OperationRequested() as e:
                facts += [Fact("asked for", e.kind), Fact("by", recorded.actor), Fact("at", at_ms=recorded.at_ms)]
                if e.model:
                    facts.append(Fact("model", e.model, f"/models/{e.model}"))
            case _:
                pass
    return _story(request, events, before, title=f"Operation {name}", tone=tone, words=words, lead=lead, facts=facts, here="")


@get("/models/{name:str}", include_in_schema=False)
async def model_story(request: Request[Any, Any, Any], name: FromPath[str], before: Before = None) -> Response[str]:
    stage = stage_of(request)
    model = stage.sight.fleet.resolve(name)
    if model is None:
        raise NotFoundException(f"There is no model {name}.")
    events = await stage.history.page_of_events(before=before, limit=PAGE + 1, stream=f"model:{model.model}")
    mark = stage.hub.mark
    card = next((m for m in stage.painter.scene().models if m.model == model.model), None)
    facts = [
        Fact("source", model.spec.source), Fact("engine", model.spec.engine), Fact("revision", str(model.revision)),
        Fact("registered", at_ms=model.registered_ms), Fact("from", model.origin),
        Fact("arguments", ", ".join(f"{k} = {v}" for k, v in sorted(model.spec.arguments.items())) or "defaults"),
        Fact("idle", idle_words(model.spec.idle)),
        Fact("requests", "of this model", f"/requests?model={model.model}"),
    ]  # fmt: skip
    if (known := model.facts) is not None:
        facts += [
            Fact("architecture", known.architecture), Fact("parameters", count(known.parameters)), Fact("dtype", known.dtype),
            Fact("weights", size(known.weight_bytes)), Fact("KV cache", size(known.kv_bytes)),
            Fact("context", f"{count(known.context_tokens)} tokens"),
            Fact("configuration", known.configuration, f"/events?stream=configuration:{known.configuration}"),
        ]  # fmt: skip
    facts += [Fact("instance", i, f"/instances/{i}") for i in (card.instances if card else ())]
    return _story(request, events, before, title=model.model, facts=facts, card=card, mark=mark, here="")


def idle_words(idle: Idle) -> str:
    """What becomes of a model that nobody asks for; rungs that are not taken are left out."""
    steps = {"asleep": idle.sleep_ms, "off its GPU": idle.checkpoint_ms, "saved": idle.saved_ms, "cold": idle.cold_ms}
    taken = [f"{what} after {span(after_ms)}" for what, after_ms in steps.items() if after_ms is not None]
    return ", then ".join(taken) or "stays up"


@get("/instances/{name:str}", include_in_schema=False)
async def instance_story(request: Request[Any, Any, Any], name: FromPath[str], before: Before = None) -> Response[str]:
    stage = stage_of(request)
    events = await stage.history.page_of_events(before=before, limit=PAGE + 1, stream=f"instance:{name}")
    fleet = stage.sight.fleet
    instance = fleet.instances.get(name)
    if instance is None:
        if not events:
            raise NotFoundException(f"There is no instance {name}.")
        return _story(request, events, before, title=f"Instance {name}", tone="cold", words="gone", here="")
    stands = standing(fleet, stage.sight.beats, instance)
    facts = _instance_facts(fleet, instance)
    return _story(
        request,
        events,
        before,
        title=f"Instance {name}",
        tone=stands.tone,
        words=stands.words,
        lead=stands.why,
        facts=facts,
        here="",
    )


def _instance_facts(fleet: Fleet, instance: Instance) -> list[Fact]:
    facts = [
        Fact("node", instance.node), Fact("rung", instance.rung.value, at_ms=0), Fact("since", at_ms=instance.since_ms),
        Fact("running", count(instance.running)), Fact("served since up", count(instance.served)),
        Fact("bytes used", size(instance.bytes_used)), Fact("bytes mapped", size(instance.bytes_mapped)),
        Fact("configuration", instance.configuration, f"/events?stream=configuration:{instance.configuration}"),
        Fact("process", str(instance.pid or "–")), Fact("created", at_ms=instance.created_ms),
    ]  # fmt: skip
    if instance.host_bytes:
        facts.insert(7, Fact("bytes of the host", size(instance.host_bytes)))
    if (model := shown_model(instance)) is not None:
        facts.insert(0, Fact("model", model, f"/models/{model}"))
    if (grant := fleet.grants.get(instance.grant or 0)) is not None:
        device = fleet.devices.get(grant.device)
        where = f"{share(grant.cells)} of {device.name if device else grant.device}, from cell {grant.offset}"
        facts.insert(1, Fact("holds", where, f"/events/{grant.number}"))
    return facts
