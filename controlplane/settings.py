"""The settings file: `[node]`, `[pool]`, `[images]` and `[[model]]` tables in TOML, checked; errors name file, line and key."""

import hashlib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from controlplane.modelfields import invalid, spec_from_fields, unknown
from controlplane.nodefields import DeviceSettings, NodeSettings, images_settings, node_settings, pool_settings
from controlplane.refusal import Code, Refused
from controlplane.spec import ModelSpec

__all__ = ["DeviceSettings", "NodeSettings", "Settings", "SettingsError", "parse", "read", "spec_from_fields"]

_TABLES: Final = ("node", "pool", "images", "model")
_FILE_LIMIT: Final = 1 << 20


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
        node = node_settings(tables.get("node", {}))
    except Refused as refused:
        raise _located(refused, text, path, "node", 0) from refused
    try:
        node = pool_settings(tables.get("pool", {}), node)
    except Refused as refused:
        raise _located(refused, text, path, "pool", 0) from refused
    try:
        node = images_settings(tables.get("images", {}), node)
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


def _located(refused: Refused, text: str, path: str, table: str, nth: int) -> SettingsError:
    key = str(refused.details.get("param", ""))
    inner = key.removeprefix(f"{table}.") if table in ("node", "pool", "images") else key
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
