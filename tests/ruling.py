"""A small `decide` for tests of the desk: gateways, requests that wait, grants; says no on demand."""

import msgspec

from controlplane.commands import Admit, BeginReign, CloseGateway, EndRequests, OpenGateway, Order, Tick
from controlplane.decisions.draft import Decision, Draft
from controlplane.events import GatewayClosed, GatewayOpened, ReignBegan, RequestAccepted, RequestQueued
from controlplane.fleet import Fleet
from controlplane.refusal import Code, Refused


def rule(fleet: Fleet, order: Order, now_ms: int) -> Decision:
    """One or two events a command. Model `never` is refused, `broken` breaks the decision."""
    draft = Draft(fleet, order, now_ms)
    match order.body:
        case BeginReign() as body:
            draft.emit(ReignBegan(host=body.host, pid=body.pid, epoch=body.epoch))
        case OpenGateway() as body if body.gateway in fleet.gateways:
            raise Refused(Code.INVALID, f"{body.gateway} is open")
        case OpenGateway() as body:
            draft.emit(GatewayOpened(**msgspec.structs.asdict(body)))
        case CloseGateway() as body if body.gateway in fleet.gateways:
            draft.emit(GatewayClosed(gateway=body.gateway, code=body.code))
        case Admit() as body if body.model == "never":
            raise Refused(Code.MODEL_UNKNOWN, "no such model", near="ever")
        case Admit() as body if body.model == "broken":
            raise ZeroDivisionError("broken")
        case Admit() as body if body.request in fleet.requests:
            raise Refused(Code.REQUEST_EXISTS, f"{body.request} exists")
        case Admit() as body:
            fields = {name: value for name, value in msgspec.structs.asdict(body).items() if name != "wait"}
            draft.emit(RequestAccepted(**fields))
            place = len(fleet.requests) + 1
            draft.emit(RequestQueued(request=body.request, model=body.model, code="slot_busy", reason="no slot", place=place))
        case CloseGateway() | EndRequests(ends=()) | Tick():
            pass
        case _:
            raise Refused(Code.INVALID, "not in this test")
    return draft.decision()
