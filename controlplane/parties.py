"""Who is who on the bus. Each kind of process has a login of its own, and the server lets it say only what is its to say:

    decider    everything: it alone writes events and keeps the stream
    web        commands of gateways and operators, its beats; asks nodes to count and to see to images
    operator   commands of operators (`up`, for the settings file); asks whether decider and workers live
    reader     asks for the state and follows events (`audit`)
    node.<n>   its own hello, reports and beats; answers what it is asked

So the subject of a command proves its author (`reception.misdirected`). Answers come to an inbox that is the party's own.
"""

from typing import Final

import msgspec

from controlplane import subjects

DECIDER: Final = "decider"
WEB: Final = "web"
OPERATOR: Final = "operator"
READER: Final = "reader"

_FOLLOW: Final = (
    subjects.ASK_STATE, f"$JS.API.STREAM.INFO.{subjects.STREAM}", f"$JS.API.CONSUMER.CREATE.{subjects.STREAM}",
    f"$JS.API.CONSUMER.CREATE.{subjects.STREAM}.>", f"$JS.FC.{subjects.STREAM}.>",
)  # fmt: skip
"""To ask for the state, and to follow events from there: with a consumer of one's own, and flow control answered."""


class Rights(msgspec.Struct, frozen=True, kw_only=True):
    """What a party may publish and subscribe to; `answers`: also, once, to where somebody asked it for an answer."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False


def node(name: str) -> str:
    """The party of a node's worker."""
    return f"node.{name}"


def inbox(party: str) -> str:
    """Prefix of the subjects at which the party alone hears the answers to what it asked."""
    return f"_INBOX_{party}"


def rights(party: str) -> Rights:
    """Raises ValueError for what is no party."""
    own = f"{inbox(party)}.>"
    kind, _, name = party.partition(".")
    match kind, name:
        case "decider", "":
            return Rights(publish=(">",), subscribe=(">",))
        case "web", "":
            asked = (subjects.measure("*"), subjects.images_of("*"))
            said = (subjects.COMMAND_GATEWAY, subjects.COMMAND_OPERATOR, subjects.beat_gateway("*"))
            return Rights(publish=(*_FOLLOW, *said, *asked), subscribe=(own, subjects.BEATS))
        case "operator", "":
            pulses = (subjects.ASK_PULSE, subjects.pulse("*"))
            return Rights(publish=(*_FOLLOW, subjects.COMMAND_OPERATOR, *pulses), subscribe=(own,))
        case "reader", "":
            return Rights(publish=_FOLLOW, subscribe=(own,))
        case "node", name if name and not set(name) & set(".*> \t\r\n"):
            told = (subjects.command_node(name), subjects.beat_node(name))
            return Rights(publish=(*_FOLLOW, *told), subscribe=(own, f"node.{name}.>"), answers=True)
        case _:
            raise ValueError(f"{party!r} is no party of the bus")
