"""The settings file: `[node]`, `[images]` and `[[model]]` tables in TOML, checked; every error names file, line and key."""

import hashlib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from controlplane.modelfields import invalid, model_name, spec_from_fields, unknown
from controlplane.quantities import duration_ms, size_bytes
from controlplane.refusal import Code, Refused
from controlplane.spec import CELLS, ModelSpec

__all__ = ["DeviceSettings", "NodeSettings", "Settings", "SettingsError", "parse", "read", "spec_from_fields"]

_DEVICE_LEAST: Final = 1 << 20
"""A cell of a smaller device would be less than 32 pages."""
_TABLES: Final = ("node", "images", "model")
_IMAGE_KEYS: Final = ("quota", "pin")
_NODE_KEYS: Final = ("pool_bytes", "checkpoint_bytes", "devices", "gpus", "drain", "criu")
_QUOTA_LEAST: Final = 1 << 20
_GPU: Final = re.compile(r"GPU-[0-9A-Za-z-]{1,60}", re.ASCII)
_FILE_LIMIT: Final = 1 << 20


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
    image_quota_bytes: int = 0
    """`[images] quota`: what saved engines may take of the disk; 0: half of what they could."""
    image_pins: tuple[str, ...] = ()
    """`[images] pin`: models and configurations whose images stay whatever the quota says."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    node: NodeSettings = NodeSettings()
    models: tuple[ModelSpec, ...] = ()

    @property
    def digest(self) -> str:
        """Of what the `[[model]]` tables mean: comments and order of keys don't count."""
        return hashlib.sha256(msgspec.json.encode(self.models, order="deterministic")).hexdigest()


class SettingsError(Exception):
    """The file can't be used as it is; nothing of it was applied.

    Attributes: path; line (1-based, None: unknown); key (dotted, "" for the whole file); code; message.
    """

    def __init__(self, path: str, line: int | None, key: str, message: str, code: Code = Code.INVALID) -> None:
        super().__init__(f"{path}{f':{line}' if line else ''}: {message}")
        self.path, self.line, self.key, self.code, self.message = path, line, key, code, message


def read(path: Path) -> Settings:
    """Read and check a settings file. Raises SettingsError."""
    try:
        with path.open("rb") as file:
            raw = file.read(_FILE_LIMIT + 1)
    except OSError as error:
        raise SettingsError(str(path), None, "", f"can't be read: {error.strerror}") from error
    if len(raw) > _FILE_LIMIT:
        raise SettingsError(str(path), None, "", f"is larger than {_FILE_LIMIT} bytes; this is not a settings file")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise SettingsError(str(path), line, "", "is not UTF-8 text") from error
    return parse(text, str(path))


def parse(text: str, path: str = "settings") -> Settings:
    """Check the text of a settings file; `path` is for messages. Raises SettingsError."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line = int(found[1]) if found else max(text.count("\n"), 1)
        raise SettingsError(path, line, "", f"is not TOML: {error}") from error
    try:
        for key in tables:
            if key not in _TABLES:
                raise unknown(key, _TABLES)
        node = _node(tables.get("node", {}))
    except Refused as refused:
        raise _located(refused, text, path, "node", 0) from refused
    try:
        quota, pins = _images(tables.get("images", {}))
        node = msgspec.structs.replace(node, image_quota_bytes=quota, image_pins=pins)
    except Refused as refused:
        raise _located(refused, text, path, "images", 0) from refused
    models: list[ModelSpec] = []
    entries = tables.get("model", [])
    if not isinstance(entries, list):
        raise SettingsError(path, line_of(text, "model", 0, ""), "model", "model: write [[model]], with two brackets, for each")
    for index, fields in enumerate(entries):
        try:
            models.append(_model(fields, models))
        except Refused as refused:
            raise _located(refused, text, path, "model", index) from refused
    return Settings(node=node, models=tuple(models))


def _model(fields: object, before: list[ModelSpec]) -> ModelSpec:
    if not isinstance(fields, Mapping):
        raise invalid("", "model: write [[model]], with two brackets, for each")
    spec = spec_from_fields(fields)
    taken = {name: other.name for other in before for name in (other.name, *other.aliases)}
    for key, name in (("name", spec.name), *(("aliases", alias) for alias in spec.aliases)):
        if name in taken:
            raise invalid(key, f'"{name}" is taken by model "{taken[name]}" above; each name and alias may stand once')
    return spec


def _node(fields: object) -> NodeSettings:
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


def _images(fields: object) -> tuple[int, tuple[str, ...]]:
    """The quota in bytes (0: none was said) and what is pinned."""
    if not isinstance(fields, Mapping):
        raise invalid("images", "write [images], with one bracket, once")
    for key in fields:
        if key not in _IMAGE_KEYS:
            raise unknown(key, _IMAGE_KEYS, "images.")
    quota = _size(fields["quota"], "images.quota") if "quota" in fields else 0
    if "quota" in fields and quota < _QUOTA_LEAST:
        raise invalid("images.quota", f"{quota} bytes hold no image; the least is {_QUOTA_LEAST} (1MiB)")
    pins = fields.get("pin", [])
    if not isinstance(pins, list):
        raise invalid("images.pin", 'write a list of models or configurations, such as ["sql-32b"]')
    return quota, tuple(dict.fromkeys(model_name(one, "images.pin", "a model or a configuration") for one in pins))


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
        raise invalid("node.devices", f"{size} bytes are too few for {CELLS} cells; the least is {_DEVICE_LEAST} (1MiB)")
    return DeviceSettings(name=model_name(fields["name"], "node.devices", "a name of a device"), size_bytes=size)


def _size(value: object, key: str) -> int:
    try:
        return size_bytes(value)
    except ValueError as error:
        raise invalid(key, str(error)) from None


def _located(refused: Refused, text: str, path: str, table: str, nth: int) -> SettingsError:
    key = str(refused.details.get("param", ""))
    inner = key.removeprefix(f"{table}.") if table in ("node", "images") else key
    return SettingsError(path, line_of(text, table, nth, inner), key, refused.message, refused.code)


_HEADER: Final = re.compile(r"\s*\[+\s*\"?([A-Za-z0-9_-]+)\"?\s*(\.[^\]]*)?\]+")


def line_of(text: str, table: str, nth: int, key: str) -> int | None:
    """Return the 1-based line of `key` (dotted) in the `nth` table of that name, else of the table's header, else None.

    TOML readers in the standard library give no positions, so this looks at headers and at the text before `=`. A key
    outside every table is looked for by itself.
    """
    lines = text.splitlines()
    headers = [(n, found[1], bool(found[2])) for n, line in enumerate(lines) if (found := _HEADER.match(line))]
    own = [n for n, name, inner in headers if name == table and not inner]
    outside = next((n + 1 for n, name, _ in headers if name == key), None)
    if nth >= len(own):
        top = headers[0][0] if headers else len(lines)
        return _key_line(lines, 0, top, key) or outside
    end = next((n for n, name, inner in headers if n > own[nth] and not (name == table and inner)), len(lines))
    return _key_line(lines, own[nth] + 1, end, key) or outside or own[nth] + 1


def _key_line(lines: list[str], begin: int, end: int, key: str) -> int | None:
    first, last = key.split(".", maxsplit=1)[0], key.rsplit(".", maxsplit=1)[-1]
    for name in dict.fromkeys((last, first)) if key else ():
        written = re.compile(rf"(?:^|[{{,.\s]){re.escape(name)}\"?\s*[=.]|^\s*\[+[^\]]*\.\s*{re.escape(name)}\s*\]")
        for number in range(begin, end):
            if written.search(lines[number]):
                return number + 1
    return None
