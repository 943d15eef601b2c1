"""A request that is cancelled just as its answer comes ends all the same."""

import asyncio

import nats.errors
import pytest
from nats.aio.msg import Msg

from controlplane.asker import Asker


class Unconnected(Asker):
    """Sends nothing; `answer` is what a server would do."""

    def __init__(self) -> None:
        super().__init__()
        self._resp_sub_prefix = bytearray(b"_INBOX.test.")

    async def publish(self, *_: object, **__: object) -> None:
        pass

    def answer(self) -> None:
        [awaited] = self._resp_map.values()
        awaited.set_result(Msg(self, "subject", "", b"answer"))


async def test_an_answer_is_returned() -> None:
    asker = Unconnected()
    asking = asyncio.create_task(asker.request("subject", timeout=30))
    await asyncio.sleep(0)
    asker.answer()
    assert (await asking).data == b"answer"


@pytest.mark.parametrize("limit_s", [30, None])
@pytest.mark.parametrize("turns", range(3))
async def test_a_cancellation_that_meets_the_answer_counts(turns: int, limit_s: float | None) -> None:
    asker = Unconnected()
    asking = asyncio.create_task(asker.request("subject", timeout=limit_s))
    await asyncio.sleep(0)
    asker.answer()
    for _ in range(turns):
        await asyncio.sleep(0)
    late = asking.done()
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled() or late


async def test_no_answer_is_the_clients_own_error() -> None:
    with pytest.raises(nats.errors.TimeoutError):
        await Unconnected().request("subject", timeout=0)
