"""What a directory of safetensors files holds, without reading a weight. Every number of a header is distrusted.

The file format: 8 bytes little-endian header length, a JSON object `{name: {dtype, shape, data_offsets: [begin, end)}}`,
then the data, which the tensors cover without gap or overlap (the format demands it, so that nothing can hide in a file).
"""

import os
import stat
import struct
from pathlib import Path
from typing import Annotated

import msgspec

HEADER_LIMIT = 100_000_000
"""Bytes; the limit of the reference implementation."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LENGTH = struct.Struct("<Q")
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class BadSource(Exception):
    """The source is not a directory of sound safetensors files; the message says which file and why."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    """Index into the source's files."""
    offset: int
    """Of the first byte, from the start of the file."""
    size_bytes: int


class SourceFile(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    size_bytes: int
    mtime_ns: int


class Source(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    """Absolute, without symbolic links."""
    files: tuple[SourceFile, ...]
    """By name."""
    entries: tuple[Entry, ...]


class _Described(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


_header = msgspec.json.Decoder(dict[str, msgspec.Raw])
_described = msgspec.json.Decoder(_Described)
_metadata = msgspec.json.Decoder(dict[str, str])


def parse_header(header: bytes, data_bytes: int, *, file: int = 0, data_start: int = 0) -> list[Entry]:
    """The tensors of one file. Raises BadSource unless they cover exactly `[0, data_bytes)`."""
    try:
        fields = _header.decode(header)
        _metadata.decode(fields.pop("__metadata__", b"{}"))
        described = {name: _described.decode(raw) for name, raw in fields.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadSource(f"its header is not one: {error}") from error
    entries = [_entry(name, of, file, data_start) for name, of in described.items()]
    at = data_start
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.size_bytes)):
        if entry.offset != at:
            what = (
                "overlaps the tensor before it" if entry.offset < at else f"leaves {entry.offset - at} bytes unused before it"
            )
            raise BadSource(f"tensor {entry.name!r} {what}")
        at += entry.size_bytes
    if at != data_start + data_bytes:
        raise BadSource(f"its tensors take {at - data_start} bytes, its data is {data_bytes}")
    return entries


def _entry(name: str, of: _Described, file: int, data_start: int) -> Entry:
    begin, end = of.data_offsets
    if (bits := _BITS.get(of.dtype)) is None:
        raise BadSource(f"tensor {name!r} has the unknown dtype {of.dtype[:40]!r}")
    for dimension in of.shape:
        bits *= dimension
        if bits > 8 << 62:
            raise BadSource(f"tensor {name!r} is larger than any file")
    if bits % 8 or bits // 8 != end - begin:
        raise BadSource(
            f"tensor {name!r} of {of.dtype}{list(of.shape)} needs {bits / 8:g} bytes, its offsets span {end - begin}"
        )
    return Entry(name=name, dtype=of.dtype, shape=of.shape, file=file, offset=data_start + begin, size_bytes=end - begin)


def read_source(path: str) -> Source:
    """Headers of all files of a directory. Raises BadSource."""
    if not os.path.isabs(path):
        raise BadSource(f"{path!r} is not an absolute directory")
    try:
        directory = Path(path).resolve(strict=True)
        owner = _index(directory)
        names = sorted(set(owner.values())) if owner else _names(directory)
        files, entries = [], []
        for number, name in enumerate(names):
            fd, state = open_file(str(directory), name)
            try:
                files.append(state)
                entries += _read_file(fd, state, number)
            finally:
                os.close(fd)
    except OSError as error:
        raise BadSource(f"{path}: {error.strerror or error}") from error
    _check_names(entries, names, owner)
    return Source(path=str(directory), files=tuple(files), entries=tuple(entries))


def _names(directory: Path) -> list[str]:
    names = sorted(item.name for item in directory.iterdir() if item.name.endswith(".safetensors"))
    if SINGLE in names:
        return [SINGLE]
    if not names:
        raise BadSource(f"{directory} holds no .safetensors file")
    return names


def _index(directory: Path) -> dict[str, str]:
    """Tensor -> file by the index; empty where there is none."""
    if not (directory / INDEX).is_file():
        return {}
    fd, state = open_file(str(directory), INDEX)
    try:
        if state.size_bytes > HEADER_LIMIT:
            raise BadSource(f"{INDEX} has {state.size_bytes} bytes; at most {HEADER_LIMIT} are taken")
        owner = msgspec.json.decode(_exactly(fd, state.size_bytes, 0), type=_Index).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadSource(f"{INDEX}: {error}") from error
    finally:
        os.close(fd)
    if not owner:
        raise BadSource(f"{INDEX} names no tensor")
    return owner


def _check_names(entries: list[Entry], names: list[str], owner: dict[str, str]) -> None:
    found: dict[str, str] = {}
    for entry in entries:
        if entry.name in found:
            raise BadSource(f"tensor {entry.name!r} is in {found[entry.name]} and in {names[entry.file]}")
        found[entry.name] = names[entry.file]
    if not found:
        raise BadSource("its files hold no tensor")
    for name, file in owner.items():
        if found.get(name) != file:
            raise BadSource(f"{INDEX} says that tensor {name!r} is in {file}, which does not hold it")


def _read_file(fd: int, state: SourceFile, number: int) -> list[Entry]:
    try:
        (length,) = _LENGTH.unpack(_exactly(fd, _LENGTH.size, 0))
        if length > HEADER_LIMIT or _LENGTH.size + length > state.size_bytes:
            raise BadSource(
                f"its header claims {length} bytes; the file has {state.size_bytes}, at most {HEADER_LIMIT} are taken"
            )
        start = _LENGTH.size + length
        return parse_header(_exactly(fd, length, _LENGTH.size), state.size_bytes - start, file=number, data_start=start)
    except BadSource as error:
        raise BadSource(f"{state.name}: {error}") from None


def _exactly(fd: int, size: int, offset: int) -> bytes:
    if len(got := os.pread(fd, size, offset)) != size:
        raise BadSource(f"{len(got)} bytes at {offset} where {size} were due")
    return got


def open_file(directory: str, name: str) -> tuple[int, SourceFile]:
    """A regular file of the directory itself, for reading: links that lead out of it are refused. Raises BadSource, OSError."""
    if name != os.path.basename(name) or name in {"", ".", ".."} or "\0" in name:
        raise BadSource(f"{name!r} is not the name of a file of the directory")
    real = os.path.realpath(os.path.join(directory, name), strict=True)
    if os.path.dirname(real) != directory:
        raise BadSource(f"{name} is a link that leads out of the directory: copy or hard-link the file")
    fd = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    state = os.fstat(fd)
    if not stat.S_ISREG(state.st_mode):
        os.close(fd)
        raise BadSource(f"{name} is not a regular file")
    return fd, SourceFile(name=name, size_bytes=state.st_size, mtime_ns=state.st_mtime_ns)
