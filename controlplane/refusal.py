"""Refusals: a stable code, a sentence with both numbers, and what to do. Raised by decisions, answered by the desk."""

from enum import StrEnum
from typing import Final

import msgspec


class Code(StrEnum):
    """Every reason for which the plane says no. Stable: callers and tests match on them."""

    MODEL_UNKNOWN = "model_unknown"
    MODEL_EXISTS = "model_exists"
    MODEL_RETIRED = "model_retired"
    MODEL_UNREADY = "model_unready"
    """Registered, but no node has inspected its source yet."""
    MODEL_UNUSABLE = "model_unusable"
    """Its source can't be read or converted; the message says why."""
    DEVICE_UNKNOWN = "device_unknown"
    NOT_UP = "not_up"
    """The instance serves nobody; only what serves can be moved."""
    ALREADY_THERE = "already_there"
    NO_ROOM = "no_room"
    """There is no free place on the device that was asked for; both numbers are in the message."""
    CANNOT_FIT = "cannot_fit"
    """Needs more than the largest device, or more than the largest pool, has."""
    BACKING_OFF = "backing_off"
    """The last start failed; `retry_after_ms` says when the next is tried."""
    TOO_LONG = "too_long"
    TOO_LARGE = "too_large"
    """What it would have written into the log is larger than one event may be."""
    INVALID = "invalid"
    NOT_AVAILABLE = "not_available"
    """A feature that this version or this machine does not have; never a silent no-op."""
    NO_NODE = "no_node"
    BUSY = "busy"
    """Requests are running; the operation would cut them."""
    QUEUE_FULL = "queue_full"
    IMAGE_UNKNOWN = "image_unknown"
    INSTANCE_UNKNOWN = "instance_unknown"
    REQUEST_UNKNOWN = "request_unknown"
    OPERATION_UNKNOWN = "operation_unknown"
    EVENT_UNKNOWN = "event_unknown"
    """The log has no such event, or what was folded up to it can't be had any more."""
    REQUEST_EXISTS = "request_exists"
    STALE = "stale"
    """The report answers a directive, or comes from an incarnation, that has been superseded."""
    GATEWAY_UNKNOWN = "gateway_unknown"
    UNAVAILABLE = "unavailable"
    """The plane itself (decider, bus, log) does not answer; try again."""
    FAULT = "fault"
    """A mistake of the plane's own; its log has the details under the command's id."""


DISK_FULL: Final = "disk_full"
"""`reason` among the details of an UNAVAILABLE: the log finds no room on its disk."""


class Refused(Exception):
    """A command that is not carried out. It wrote no event.

    Attributes:
        code: stable reason. message: one sentence for the person who can act.
        details: numbers and names, JSON values. retry_after_ms: when it may be worth trying again.
    """

    def __init__(self, code: Code, message: str, *, retry_after_ms: int | None = None, **details: object) -> None:
        super().__init__(message)
        self.code, self.message, self.retry_after_ms, self.details = code, message, retry_after_ms, details


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """A `Refused`, as it travels."""

    code: Code
    message: str
    retry_after_ms: int | None = None
    details: dict[str, object] = {}

    @staticmethod
    def of(error: Refused) -> "Refusal":
        return Refusal(error.code, error.message, error.retry_after_ms, error.details)
