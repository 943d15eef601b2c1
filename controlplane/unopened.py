"""A model whose source can't be opened: the words for it, the same wherever they are said."""

from typing import Final

from controlplane.quantities import times
from controlplane.spec import ModelSpec

_CURES: Final = {
    "bad_source": "make sure that the model is there and that its node can read it, or give another source",
    "hub_unreachable": "give its node a way to the hub, or give a directory as the source",
    "corrupt": "it is fetched again",
    "opening_failed": "the log of the node's worker says more",
}
"""Code of a worker that could not open a source -> what to do."""
DRAFT: Final = "draft_model"
_DRAFT: Final = f"{DRAFT}: "
"""How a worker begins what it says of a draft model."""


def named(spec: ModelSpec, code: str, message: str) -> str:
    """What a worker said of a failed start; of a source that it could not open with which one it is, and what to do."""
    if code not in _CURES:
        return message
    of_draft = message.startswith(_DRAFT)
    source = str(spec.arguments.get(DRAFT, "")) if of_draft else spec.source
    said = message.removeprefix(_DRAFT)
    reason = said.removeprefix(f"{source}: ") if source else said
    whose = f"the {DRAFT} of {spec.name}" if of_draft else f"the source of {spec.name}"
    return f"{whose} can't be opened ({source}): {reason}; {_CURES[code]}"


def failed(model: str, failures: int, code: str, message: str) -> str:
    """The beginning of why a model can't be used now. `message`: as `named` gave it."""
    return message if code in _CURES else f"{model} failed to start {times(failures)}, last: {message}"


def unopened(code: str) -> bool:
    """Whether a failure is that of a source that can't be opened: nothing has been started then."""
    return code in _CURES
