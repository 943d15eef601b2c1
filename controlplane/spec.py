"""What an operator says of a model, and what a node found out about it."""

from typing import Annotated, Literal

import msgspec

CELLS = 8
"""A device is a buddy tree down to eighths; a cell is one eighth, the unit of exclusion."""

EngineName = Literal["transformers", "vllm", "fake"]
Argument = str | int | float | bool
ModelName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?$", max_length=100)]


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """How long an instance may stay idle on a rung, in milliseconds; None: for ever."""

    sleep_ms: int | None = 300_000
    """`up` -> `sleep` after this long without a request."""
    checkpoint_ms: int | None = None
    """`sleep` -> `checkpoint` after this long asleep."""
    cold_ms: int | None = 1_800_000
    """The lowest of those that are set -> `cold` after this long there."""
    saved_ms: int | None = None
    """`sleep` (or `checkpoint`) -> `saved` after this long there."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[model]]` of the settings, or the body of `POST /api/models`, checked and normalised."""

    name: ModelName
    source: str
    """`hf:org/name@<40 hex>`, an absolute directory, an absolute GGUF file, or `fake:` for the fake engine."""
    engine: EngineName = "transformers"
    arguments: dict[str, Argument] = {}
    """From the engine's allow-list (arguments.py), never passed on unchecked."""
    cells: int | None = None
    """1, 2, 4 or 8 cells of one device; None: worked out from measured bytes (`share = "auto"`)."""
    gpus: int = 1
    """Whole devices of one node that an instance takes; more than one: a gang."""
    idle: Idle = Idle()
    aliases: tuple[ModelName, ...] = ()
    note: str = ""
    """Shown beside the name, e.g. that the weights are random."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a node learned by opening a model's source; everything that admission and placement need."""

    configuration: str
    """`cfg_<16 hex>`: digest of engine, architecture and the arguments that shape a skeleton; its models share skeletons."""
    architecture: str
    """The class name of the source's config, e.g. `LlamaForCausalLM`; `fake` for the fake engine."""
    weight_bytes: int
    kv_bytes: int
    context_tokens: int
    parameters: int = 0
    dtype: str = ""
    template_bytes: int = 512
    """Upper bound of the tokens that the chat template adds to a prompt's own bytes (for the cheap length bound)."""
    tokenizer: str = ""
    """Digest of the tokenizer's files."""
