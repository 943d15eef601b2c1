"""Commands of operators: the page's buttons, the REST API, the CLI, the settings file."""

from typing import Literal

import msgspec

from controlplane.events.node import NodeLimits
from controlplane.spec import ModelSpec


class RegisterModel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    spec: ModelSpec


class ReviseModel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    spec: ModelSpec


class RetireModel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    model: str


class ApplySettings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The whole `[[model]]` list of a settings file. Differences to what the *file* registered before are applied."""

    path: str
    digest: str
    models: tuple[ModelSpec, ...]
    node: str = ""
    """The node whose file it is; its `limits` are those of the file. Empty: the file is of models alone."""
    limits: NodeLimits = NodeLimits()


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bring a model `up`. Answer: `Opened`, with the operation's id."""

    model: str


class Sleep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take a model's instances from `up` to `sleep`: the skeleton stays. Running requests are drained first."""

    model: str


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take a model's instances off their device altogether: their processes stay, on the host. Requests are drained first."""

    model: str


class Save(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take a model's instances to disk: no process is left, and they come back in seconds. Requests are drained first."""

    model: str


class Move(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bring what is `up` to another device of its node: it drains, goes there and serves again; new requests wait for it.

    Answer: `Opened`, with the operation's id.
    """

    what: str
    """A model that one instance serves, or the instance."""
    device: str
    """Name or id."""


class RemoveImage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take an image off its node's disk. Instances that were saved to it start cold."""

    image: str
    code: Literal["operator", "quota"] = "operator"


class RebuildImage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Never use an image again, forget its failures, and make a new one as soon as its skeleton sleeps and nobody waits."""

    image: str


class PinImage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Keep an image whatever the quota says, or no longer."""

    image: str
    pinned: bool = True


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the processes of the instances that serve this model, or last did: `cold`. Running requests are drained first."""

    model: str


class Retry(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End a model's back-off (or its rejection) now and try again."""

    model: str
