"""The engine's two wires, both unix sockets that the engine connects *out* to.

Frames are 4-byte little-endian lengths and msgpack.

control: the holder listens (`control.sock`); commands in, one reply each, in order.
tokens:  the frontend listens (`tokens.sock`); token ids in and token ids out, nothing else.
"""

import msgspec

# ---- control ------------------------------------------------------------------------------------------------


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Map a weight set: the engine asks the pool daemon at `pool_socket` for descriptors and stays connected while mapped.

    Engines on a GPU make their KV memory meanwhile, and take another set also while awake, once nothing runs.
    """

    pool_socket: str
    weight_set: str


class Detach(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Unmap it (address space stays reserved), and give up weights in memory of its own."""


class Wake(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Allocate KV memory and accept requests. Needs an attached weight set."""

    model: str


class Sleep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Free KV memory. Refused while requests run: drain first."""


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer once no request runs, or with a `Fault` (`drain_timeout`) after `deadline_ms`."""

    deadline_ms: int


class Check(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Generate `tokens` ids greedily after `prompt`; answered by `Checked`."""

    prompt: tuple[int, ...]
    tokens: int


class Stage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Have a source's weights in the pool, in the layout in which this engine maps them; answered by `Stocked`.

    For engines that make a layout of their own; asleep and detached only. Others are staged by the pool from their files.
    """

    pool_socket: str
    source: str
    """Directory of safetensors files of this engine's architecture."""
    form: str
    """Name of what this engine makes of files: its configuration's id."""


class Health(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered by `State`."""


class Park(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forget every caller's text, answer, close everything, and wait for `release` in directory `place`.

    What is parked can be written to disk. The file's text is the directory of the instance that the engine is from then on.
    """

    place: str


class Moved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The process has been brought to another device; asleep and detached only. `device`: its UUID."""

    device: str


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Exit in order."""


class State(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine's own word of where it is, answered to every command but Check."""

    attached: str | None
    """Weight set."""
    awake: bool
    running: int
    bytes_mapped: int
    bytes_kv: int
    bytes_private: int
    """Anonymous resident memory of the process, or its memory on the GPU (0: the driver does not say); KV included."""
    took_ms: float = 0.0
    bytes_device: int | None = None
    """What the driver says this process has taken of its GPU; the pool's memory counts as the pool's. None: no GPU."""
    bytes_own: int = 0
    """Weights in memory of its own, from a load or a start: they go when others are attached, or with `Detach`."""
    bytes_copied: int = 0
    """Sent to the device for the last `Attach`, 0 if all was there."""
    copy_ms: float = 0.0
    copy_links: dict[str, int] = {}
    """UUID of the GPU whose link it went over -> bytes."""
    graphs: int | None = None
    """CUDA graphs that the process (all ranks of it) captured when it started; None: none can be."""
    graphs_again: int = 0
    """Captured since then, over all its sleeps, moves and restores."""


class Stocked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    weight_set: str
    size_bytes: int
    read_bytes: int
    """0: the pool had it already."""
    took_ms: float = 0.0


class Checked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    ids: tuple[int, ...]


class Fault(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The command failed; the engine is as it was before, unless `fatal`."""

    code: str
    message: str
    fatal: bool = False


ControlCommand = Attach | Detach | Wake | Sleep | Drain | Check | Stage | Health | Park | Moved | Shutdown
ControlReply = State | Checked | Stocked | Fault

# ---- tokens -------------------------------------------------------------------------------------------------


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()
    """End-of-sequence ids; generation ends with `stop` and the id is not emitted as text."""
    ignore_eos: bool = False


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    request: str
    prompt: tuple[int, ...]
    sampling: Sampling


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    request: str


class Ack(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The frontend has recorded the first `count` output ids; the engine may forget them."""

    request: str
    count: int
    ended: bool = False
    """It has recorded the end, too: the engine may forget the request."""


class Connected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First message of an engine on a (new) connection: requests it knows, with ids from their first unacknowledged one."""

    pid: int
    requests: dict[str, int]
    """request -> index of the first id that follows again."""


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """What one step of the engine has added: a column each, one entry a request.

    One message for all of them: 256 requests in messages of their own cost the engine's one thread a millisecond a step.
    """

    requests: tuple[str, ...]
    starts: tuple[int, ...]
    """Index of the first of `ids` within the request's output."""
    ids: tuple[tuple[int, ...], ...]


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    request: str
    reason: str
    """`stop`, `length`, `aborted` or `failed`."""
    count: int
    """Output ids in all: a request that ends has had exactly these."""
    message: str = ""


FrontendToEngine = Submit | Abort | Ack
EngineToFrontend = Connected | Tokens | Ended
