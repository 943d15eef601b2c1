"""How requests move through the state: waiting, on an instance, gone.

Keeps the index `Fleet.waiting` and the instances' counts.
"""

from msgspec.structs import replace

from controlplane.events import (
    RequestAccepted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestQueued,
    RequestRouted,
)
from controlplane.fleet.callers import Request
from controlplane.fleet.members import Instance
from controlplane.fleet.state import Fleet


def accepted(fleet: Fleet, e: RequestAccepted, at: int, position: int) -> Fleet:
    request = Request(
        request=e.request, model=e.model, gateway=e.gateway, kind=e.kind, streamed=e.streamed,
        prompt_bytes=e.prompt_bytes, max_tokens=e.max_tokens, accepted_ms=at, order=position,
    )  # fmt: skip
    waiting = fleet.waiting.set(e.model, (*fleet.waiting.get(e.model, ()), e.request))
    return replace(fleet, requests=fleet.requests.set(e.request, request), waiting=waiting)


def queued(fleet: Fleet, e: RequestQueued, at: int) -> Fleet:
    known = fleet.requests[e.request]
    return replace(fleet, requests=fleet.requests.set(e.request, replace(known, code=e.code, reason=e.reason, queued_ms=at)))


def routed(fleet: Fleet, e: RequestRouted, at: int) -> Fleet:
    request = replace(
        fleet.requests[e.request], instance=e.instance, grant=e.grant, routed_ms=at, attempts=e.attempt, code="", reason="",
        lost_ms=None,
    )  # fmt: skip
    instance = fleet.instances[e.instance]
    return replace(
        _not_waiting(fleet, request),
        requests=fleet.requests.set(e.request, request),
        instances=fleet.instances.set(e.instance, replace(instance, running=instance.running + 1)),
    )


def interrupted(fleet: Fleet, e: RequestInterrupted, at: int) -> Fleet:
    left = _off(fleet, fleet.requests[e.request], at)
    request = replace(
        left.requests[e.request], instance=None, grant=None, routed_ms=None, lost_ms=None, interrupted_on=e.instance,
        interrupted_ms=at,
    )  # fmt: skip
    ids = list(left.waiting.get(request.model, ()))
    place = next((i for i, other in enumerate(ids) if left.requests[other].order > request.order), len(ids))
    ids.insert(place, request.request)  # where it was: it has waited longer than those who came later
    return replace(
        left,
        requests=left.requests.set(e.request, request),
        waiting=left.waiting.set(request.model, tuple(ids)),
    )


def ended(fleet: Fleet, e: RequestFinished | RequestFailed | RequestCancelled, at: int) -> Fleet:
    request = fleet.requests[e.request]
    left = _not_waiting(fleet, request) if request.instance is None else _off(fleet, request, at)
    if request.lease_on is not None:
        left = _unleased(left, request)
    return replace(left, requests=left.requests.delete(e.request))


def leased(fleet: Fleet, request: str, instance: str) -> Fleet:
    """The instance climbs for that request: no victim until the request has ended."""
    known = fleet.requests[request]
    left = _unleased(fleet, known) if known.lease_on not in (None, instance) else fleet
    return replace(left, requests=left.requests.set(request, replace(known, lease_on=instance)))


def stranded(fleet: Fleet, instance: Instance, at: int) -> Fleet:
    """The instance no longer runs what was routed to it: those requests await the word of their gateways."""
    if not instance.running:
        return fleet
    requests = fleet.requests
    for request in fleet.requests.values():
        if request.instance == instance.instance and request.lost_ms is None:
            requests = requests.set(request.request, replace(request, lost_ms=at))
    idle = replace(fleet.instances[instance.instance], running=0, idle_since_ms=at)
    return replace(fleet, requests=requests, instances=fleet.instances.set(instance.instance, idle))


def set_back(fleet: Fleet, model: str) -> Fleet:
    """A climb of the model failed while these waited for it."""
    requests = fleet.requests
    for waiting in fleet.waiting.get(model, ()):
        known = requests[waiting]
        requests = requests.set(waiting, replace(known, failed_climbs=known.failed_climbs + 1))
    return replace(fleet, requests=requests)


def _not_waiting(fleet: Fleet, request: Request) -> Fleet:
    ids = fleet.waiting.get(request.model, ())
    if ids == (request.request,):
        return replace(fleet, waiting=fleet.waiting.delete(request.model))
    rest = tuple(other for other in ids if other != request.request)
    return replace(fleet, waiting=fleet.waiting.set(request.model, rest)) if rest != ids else fleet


def _off(fleet: Fleet, request: Request, at: int) -> Fleet:
    """Take a request off its instance, unless that one lost it before."""
    instance = fleet.instances.get(request.instance or "")
    if instance is None or request.lost_ms is not None:
        return fleet
    left = replace(instance, running=instance.running - 1, served=instance.served + 1, idle_since_ms=at)
    return replace(fleet, instances=fleet.instances.set(left.instance, left))


def _unleased(fleet: Fleet, request: Request) -> Fleet:
    instance = fleet.instances.get(request.lease_on or "")
    if instance is None or request.request not in instance.leased_to:
        return fleet
    left = replace(instance, leased_to=instance.leased_to - {request.request})
    return replace(fleet, instances=fleet.instances.set(left.instance, left))
