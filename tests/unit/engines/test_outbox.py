"""What an engine keeps for its frontend, and the messages that carry it."""

from worker.engines.interface import Output
from worker.engines.messages import Ack, Connected, Ended, Tokens
from worker.engines.outbox import Outbox


def test_a_step_is_one_message_however_many_requests_it_adds_to() -> None:
    outbox = Outbox()
    for name in "abc":
        outbox.open(name)
    assert list(outbox.add([Output("a", (1, 2)), Output("b", (3,)), Output("c", ())])) == [
        Tokens(requests=("a", "b"), starts=(0, 0), ids=((1, 2), (3,)))
    ]
    assert list(outbox.add([Output("a", (4,)), Output("b", (), "stop"), Output("c", (5,), "length")])) == [
        Tokens(requests=("a", "c"), starts=(2, 0), ids=((4,), (5,))),
        Ended(request="b", reason="stop", count=1),
        Ended(request="c", reason="length", count=1),
    ]
    assert list(outbox.add([])) == []


def test_a_greeting_has_all_that_was_not_acknowledged_and_no_more() -> None:
    outbox = Outbox()
    for name in "ab":
        outbox.open(name)
    assert list(outbox.greeting(7)) == [Connected(pid=7, requests={"a": 0, "b": 0})]
    list(outbox.add([Output("a", (1, 2, 3)), Output("b", (4,), "stop")]))
    outbox.acknowledge(Ack(request="a", count=2))
    assert list(outbox.greeting(7)) == [
        Connected(pid=7, requests={"a": 2, "b": 0}),
        Tokens(requests=("a", "b"), starts=(2, 0), ids=((3,), (4,))),
        Ended(request="b", reason="stop", count=1),
    ]
    outbox.acknowledge(Ack(request="b", count=1, ended=True))
    assert "b" not in outbox and "a" in outbox
