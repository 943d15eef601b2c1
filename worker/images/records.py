"""CRIU's image files, as far as we read and write them: two magic numbers, then records of protocol buffers.

Only what is asked for is decoded. What a newer CRIU adds is kept or passed over, never misread: fields have numbers.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_COMMON: Final = 0x54564319
_HEAD: Final = struct.Struct("<II")
_SIZE: Final = struct.Struct("<I")
_VARINT, _BYTES = 0, 2
_FIXED: Final = {1: 8, 5: 4}

Field = tuple[int, int | bytes]
"""Number and value: an unsigned integer, or bytes (a message within the message)."""


class RecordsUnknown(Exception):
    """A file that is not what CRIU 4 writes."""


def read(path: Path) -> tuple[bytes, list[bytes]]:
    """The head of an image file, and its records. Raises OSError, RecordsUnknown."""
    data = path.read_bytes()
    if len(data) < _HEAD.size or _HEAD.unpack_from(data)[0] != _COMMON:
        raise RecordsUnknown(f"{path.name} does not begin as an image of CRIU's")
    records, at = [], _HEAD.size
    while at < len(data):
        if at + _SIZE.size > len(data):
            raise RecordsUnknown(f"{path.name} ends within a record")
        (size,) = _SIZE.unpack_from(data, at)
        at += _SIZE.size
        if at + size > len(data):
            raise RecordsUnknown(f"{path.name} ends within a record")
        records.append(data[at : at + size])
        at += size
    return data[: _HEAD.size], records


def write(path: Path, head: bytes, records: list[bytes]) -> None:
    """Raises OSError."""
    path.write_bytes(head + b"".join(_SIZE.pack(len(record)) + record for record in records))


def fields(record: bytes) -> Iterator[Field]:
    """Every field of a message, in its order. Raises RecordsUnknown."""
    at, end = 0, len(record)
    try:
        while at < end:
            key, at = _varint(record, at)
            number, kind = key >> 3, key & 7
            if kind == _VARINT:
                value, at = _varint(record, at)
                yield number, value
                continue
            if kind == _BYTES:
                size, at = _varint(record, at)
            elif kind in _FIXED:
                size = _FIXED[kind]
            else:
                raise RecordsUnknown(f"a field of kind {kind} in a record of {end} bytes")
            if at + size > end:
                raise IndexError
            part = record[at : at + size]
            yield number, part if kind == _BYTES else int.from_bytes(part, "little")
            at += size
    except IndexError:
        raise RecordsUnknown(f"a record of {end} bytes ends within a field") from None


def numbers(record: bytes) -> dict[int, int]:
    """The integers of a message by field number; of a repeated one the last."""
    return {number: value for number, value in fields(record) if isinstance(value, int)}


def messages(record: bytes, number: int) -> Iterator[bytes]:
    """The messages within a message that are its fields of that number."""
    for found, value in fields(record):
        if found == number and isinstance(value, bytes):
            yield value


def message(values: list[tuple[int, int]]) -> bytes:
    """A message of unsigned integers."""
    return b"".join(_encoded(number << 3 | _VARINT) + _encoded(value) for number, value in values)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
