"""What a settings file may say of its machine: the fields of `[node]`, `[pool]` and `[images]`, checked."""

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from controlplane.modelfields import invalid, model_name, unknown
from controlplane.quantities import duration_ms, human_bytes, need_and_limit, size_bytes
from controlplane.spec import CELLS

_DEVICE_LEAST: Final = 1 << 20
"""A cell of a smaller device would be less than 32 pages."""
_NODE_KEYS: Final = ("pool_bytes", "checkpoint_bytes", "devices", "gpus", "drain", "criu")
_POOL_KEYS: Final = ("ready", "helpers", "beside_decoding")
_LEAST_SHARE: Final = 0.1
"""Of a link's rate: with less a wake would hardly move."""
_IMAGE_KEYS: Final = ("quota", "pin")
_QUOTA_LEAST: Final = 1 << 20
_GPU: Final = re.compile(r"GPU-[0-9A-Za-z-]{1,60}", re.ASCII)


class DeviceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A declared share of host memory."""

    name: str
    size_bytes: int


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """None, or no devices: the file leaves it to `up`."""

    pool_bytes: int | None = None
    checkpoint_bytes: int | None = None
    """Memory of the host that engines off their devices may take, all together."""
    devices: tuple[DeviceSettings, ...] = ()
    gpus: tuple[str, ...] | None = None
    """UUIDs of those that the plane may use; None: all that there are."""
    drain_ms: int | None = None
    """How long requests may go on running on an engine that is to leave its device; then they are cut."""
    criu: str = ""
    """The CRIU to use; empty: whichever is found."""
    pool_ready_bytes: int | None = None
    """`[pool] ready`: memory that may lie ready for the next set; None: a quarter of the pool's."""
    pool_helpers: bool = True
    """`[pool] helpers`: whether a GPU may be filled over the links of others, too."""
    pool_beside_decoding: float | None = None
    """`[pool] beside_decoding`: of a link's rate that a copy takes beside an engine that decodes; None: the pool's default."""
    image_quota_bytes: int = 0
    """`[images] quota`: what saved engines may take of the disk; 0: half of what they could."""
    image_pins: tuple[str, ...] = ()
    """`[images] pin`: models and configurations whose images stay whatever the quota says."""


def node_settings(fields: object) -> NodeSettings:
    """What the `[node]` table says. Raises Refused, with the key."""
    if not isinstance(fields, Mapping):
        raise invalid("node", "write [node], with one bracket, once")
    for key in fields:
        if key not in _NODE_KEYS:
            raise unknown(key, _NODE_KEYS, "node.")
    pool = _size(fields["pool_bytes"], "node.pool_bytes") if "pool_bytes" in fields else None
    off = _size(fields["checkpoint_bytes"], "node.checkpoint_bytes") if "checkpoint_bytes" in fields else None
    devices = fields.get("devices", [])
    if not isinstance(devices, list):
        raise invalid("node.devices", 'write a list such as [{ name = "cpu0", bytes = "1GiB" }]')
    found = tuple(_device(entry) for entry in devices)
    names = [device.name for device in found]
    if len(set(names)) < len(names):
        raise invalid("node.devices", f"{', '.join(names)}: two devices have one name")
    drain = _drain(fields["drain"]) if "drain" in fields else None
    return NodeSettings(
        pool_bytes=pool, devices=found, gpus=_gpus(fields.get("gpus", "all")), drain_ms=drain,
        criu=_program(fields.get("criu", "")), checkpoint_bytes=off,
    )  # fmt: skip


def _gpus(value: object) -> tuple[str, ...] | None:
    if value == "all":
        return None
    if not isinstance(value, list) or not all(isinstance(one, str) and _GPU.fullmatch(one) for one in value):
        raise invalid(
            "node.gpus", f'{value!r} is neither "all" nor a list of UUIDs such as ["GPU-..."] (nvidia-smi -L shows them)'
        )
    return tuple(value)


def pool_settings(fields: object, node: NodeSettings) -> NodeSettings:
    """With what the `[pool]` table says. Raises Refused, with the key."""
    if not isinstance(fields, Mapping):
        raise invalid("pool", "write [pool], with one bracket, once")
    for key in fields:
        if key not in _POOL_KEYS:
            raise unknown(key, _POOL_KEYS, "pool.")
    ready = _size(fields["ready"], "pool.ready") if "ready" in fields else None
    if ready is not None and node.pool_bytes is not None and ready > node.pool_bytes:
        wish, pool = need_and_limit(ready, node.pool_bytes)
        raise invalid("pool.ready", f"{wish} can't lie ready in a pool of {pool} (node.pool_bytes)")
    helpers = fields.get("helpers", True)
    if not isinstance(helpers, bool):
        raise invalid("pool.helpers", f"{helpers!r} is neither true nor false")
    return msgspec.structs.replace(node, pool_ready_bytes=ready, pool_helpers=helpers, pool_beside_decoding=_beside(fields))


def _beside(fields: Mapping[str, object]) -> float | None:
    if "beside_decoding" not in fields:
        return None
    share = fields["beside_decoding"]
    if isinstance(share, bool) or not isinstance(share, int | float) or not _LEAST_SHARE <= share <= 1:
        raise invalid("pool.beside_decoding", f"{share!r} is no part of a link's rate: write a number from {_LEAST_SHARE} to 1")
    return float(share)


def images_settings(fields: object, node: NodeSettings) -> NodeSettings:
    """With what the `[images]` table says. Raises Refused, with the key."""
    if not isinstance(fields, Mapping):
        raise invalid("images", "write [images], with one bracket, once")
    for key in fields:
        if key not in _IMAGE_KEYS:
            raise unknown(key, _IMAGE_KEYS, "images.")
    quota = _size(fields["quota"], "images.quota") if "quota" in fields else 0
    if "quota" in fields and quota < _QUOTA_LEAST:
        raise invalid("images.quota", f"{human_bytes(quota)} hold no image; the least is {human_bytes(_QUOTA_LEAST)}")
    pins = fields.get("pin", [])
    if not isinstance(pins, list):
        raise invalid("images.pin", 'write a list of models or configurations, such as ["sql-32b"]')
    named = dict.fromkeys(model_name(one, "images.pin", "a model or a configuration") for one in pins)
    return msgspec.structs.replace(node, image_quota_bytes=quota, image_pins=tuple(named))


def _program(value: object) -> str:
    if not isinstance(value, str) or (value and not value.startswith("/")) or not value.isprintable():
        raise invalid("node.criu", f"{value!r} is not the absolute path of a program")
    return value


def _drain(value: object) -> int:
    try:
        limit = duration_ms(value)
    except ValueError as error:
        raise invalid("node.drain", str(error)) from None
    if limit is None:
        raise invalid("node.drain", 'it needs an end: write a duration such as "30s"')
    return limit


def _device(fields: object) -> DeviceSettings:
    if not isinstance(fields, Mapping) or set(fields) != {"name", "bytes"}:
        raise invalid("node.devices", f'{fields!r} is not a device; write {{ name = "cpu0", bytes = "1GiB" }}')
    size = _size(fields["bytes"], "node.devices")
    if size < _DEVICE_LEAST:
        raise invalid(
            "node.devices", f"{human_bytes(size)} are too few for {CELLS} cells; the least is {human_bytes(_DEVICE_LEAST)}"
        )
    return DeviceSettings(name=model_name(fields["name"], "node.devices", "a name of a device"), size_bytes=size)


def _size(value: object, key: str) -> int:
    try:
        return size_bytes(value)
    except ValueError as error:
        raise invalid(key, str(error)) from None
