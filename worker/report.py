"""Reports: commands to the decider, sent until they are answered, in order for each subject.

A report about a directive has an id that follows from what it says, so the same report, sent again by this worker or
by the next one, is the same command and gets its first answer.
"""

import asyncio
from collections import deque
from typing import Final, Protocol

import structlog
from blake3 import blake3

from controlplane import ids, subjects
from controlplane.answer import Answer
from controlplane.commands import (
    AnyCommand,
    Order,
    ReportCheckpointed,
    ReportDropped,
    ReportEnded,
    ReportFailed,
    ReportForeign,
    ReportImageBuilt,
    ReportImageFailed,
    ReportImageRefused,
    ReportImageRemoved,
    ReportImageRoom,
    ReportModel,
    ReportSaved,
    ReportSlept,
    ReportStaged,
    ReportUnusable,
    ReportUp,
)
from controlplane.refusal import Code, Refused

OfInstance = ReportUp | ReportSlept | ReportCheckpointed | ReportSaved | ReportEnded | ReportFailed | ReportImageRoom
OfImage = ReportImageBuilt | ReportImageRefused | ReportImageFailed | ReportImageRemoved
Report = OfInstance | OfImage | ReportModel | ReportUnusable | ReportStaged | ReportDropped | ReportForeign

FIRST_WAIT_S: Final = 0.1
LONGEST_WAIT_S: Final = 2.0
"""A decider is replaced within seconds; asking more often would only add to its start."""

log = structlog.get_logger("report")


class Sender(Protocol):
    """`Bus.command`."""

    async def command(self, subject: str, order: Order, *, timeout_s: float = 5.0) -> Answer: ...


class Reporter:
    """One queue per subject (an instance, a model, a weight set), so a slow answer to one holds up no other."""

    def __init__(self, sender: Sender, node: str) -> None:
        self._sender, self._node = sender, node
        self._queues: dict[str, deque[Order]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def report(self, body: Report) -> None:
        """Queue a report; it is on its way until the decider has answered it or refused it for good."""
        subject = _subject(body)
        queue = self._queues.setdefault(subject, deque())
        order = Order(id=_id(self._node, body), actor=f"node:{self._node}", body=body)
        if all(waiting.id != order.id for waiting in queue):
            queue.append(order)
        if subject not in self._tasks:
            self._tasks[subject] = asyncio.create_task(self._send_all(subject), name=f"report:{subject}")

    @property
    def waiting(self) -> int:
        """Reports that have not been answered."""
        return sum(len(queue) for queue in self._queues.values())

    async def close(self) -> None:
        """Stop sending; what is unanswered is found out again by the next worker."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _send_all(self, subject: str) -> None:
        queue = self._queues[subject]
        while queue:
            await self._send(queue[0])
            queue.popleft()
        del self._queues[subject], self._tasks[subject]

    async def _send(self, order: Order) -> None:
        wait_s = FIRST_WAIT_S
        while True:
            try:
                answer = await self._sender.command(subjects.command_node(self._node), order)
            except Refused as refused:
                if refused.code is not Code.UNAVAILABLE:
                    # Stale: a newer directive is on its way here. Anything else won't be mended by sending it again.
                    level = log.info if refused.code is Code.STALE else log.error
                    level("report_refused", report=type(order.body).__name__, code=refused.code, message=refused.message)
                    return
            except Exception:  # a fault of ours must not leave the plane without this word, nor those behind it unsent
                log.exception("report_failed", report=type(order.body).__name__, id=order.id)
            else:
                log.info("reported", report=type(order.body).__name__, id=order.id, position=getattr(answer, "position", 0))
                return
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, LONGEST_WAIT_S)


def _subject(body: Report) -> str:
    match body:
        case (
            ReportUp()
            | ReportSlept()
            | ReportCheckpointed()
            | ReportSaved()
            | ReportEnded()
            | ReportFailed()
            | ReportImageRoom()
        ):
            return body.instance
        case ReportImageBuilt() | ReportImageRefused() | ReportImageFailed() | ReportImageRemoved():
            return f"image:{body.image}"
        case ReportModel() | ReportUnusable():
            return f"model:{body.model}"
        case ReportStaged() | ReportDropped():
            return f"weights:{body.weight_set}"
        case ReportForeign():
            return f"foreign:{body.device}"


def _id(node: str, body: AnyCommand) -> str:
    """An instance has one answer to each directive (an up one also by where it serves); other reports stand alone."""
    parts: tuple[str, ...]
    match body:
        case ReportUp():
            parts = (node, body.instance, str(body.directive), "up", body.endpoint, str(body.pid))
        case ReportSlept() | ReportCheckpointed() | ReportSaved() | ReportEnded() | ReportFailed() | ReportImageRoom():
            parts = (node, body.instance, str(body.directive), type(body).__name__)
        case _:
            return ids.new(ids.COMMAND)
    return f"{ids.COMMAND}_{blake3('/'.join(parts).encode()).hexdigest(length=13).upper()}"
