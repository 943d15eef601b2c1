"""A header is somebody else's word: sound ones are read as they are, every other is refused before a byte is trusted."""

import contextlib
import os
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.safetensors import BadSource, parse_header, read_source

Header = dict[str, dict[str, Any]]
names = st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 5), max_size=3)
Drawn = dict[str, tuple[tuple[str, int], list[int]]]
dtypes = st.sampled_from([("F32", 4), ("BF16", 2), ("U8", 1), ("F64", 8)])
tensors = st.dictionaries(names, st.tuples(dtypes, shapes), max_size=6)


def header_of(drawn: Drawn) -> tuple[Header, int]:
    header: Header = {}
    at = 0
    for name, ((dtype, width), shape) in drawn.items():
        size = width * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return header, at


def encoded(header: object) -> bytes:
    return msgspec.json.encode(header)


@given(tensors)
def test_a_sound_header_is_read_as_it_is(drawn: Drawn) -> None:
    header, size = header_of(drawn)
    entries = parse_header(encoded({"__metadata__": {"format": "pt"}, **header}), size, data_start=100)
    assert {entry.name: (entry.dtype, list(entry.shape), entry.offset - 100, entry.size_bytes) for entry in entries} == {
        name: (of["dtype"], of["shape"], of["data_offsets"][0], of["data_offsets"][1] - of["data_offsets"][0])
        for name, of in header.items()
    }


@given(tensors.filter(bool), st.data())
def test_a_header_with_one_number_off_is_refused(
    drawn: dict[str, tuple[tuple[str, int], list[int]]], data: st.DataObject
) -> None:
    header, size = header_of(drawn)
    victim = header[data.draw(st.sampled_from(sorted(header)))]
    by = data.draw(st.integers(-9, 9).filter(bool))
    match data.draw(st.sampled_from(["begin", "end", "size"])):
        case "begin":
            victim["data_offsets"][0] += by
        case "end":
            victim["data_offsets"][1] += by
        case _:
            size += by
    with pytest.raises(BadSource):
        parse_header(encoded(header), size)


@given(st.binary(max_size=200), st.integers(0, 1000))
def test_any_bytes_are_a_header_or_refused(header: bytes, size: int) -> None:
    with contextlib.suppress(BadSource):
        parse_header(header, size)


@pytest.mark.parametrize(
    ("header", "size", "why"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
          "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}, 8, "overlaps"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}, 8, "leaves 4 bytes"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, 8, "take 4 bytes, its data is 8"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [-4, 0]}}, 0, "not one"),
        ({"a": {"dtype": "U8", "shape": [-4], "data_offsets": [0, 4]}}, 4, "not one"),
        ({"a": {"dtype": "U8", "shape": [1 << 62, 4], "data_offsets": [0, 4]}}, 4, "larger than any file"),
        ({"a": {"dtype": "U8", "shape": [1 << 70], "data_offsets": [0, 4]}}, 4, "not one"),
        ({"a": {"dtype": "Q7", "shape": [4], "data_offsets": [0, 4]}}, 4, "unknown dtype"),
        ({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, 2, "needs 1.5 bytes"),
        ({"a": {"dtype": "U8", "shape": [4.5], "data_offsets": [0, 4]}}, 4, "not one"),
        ({"a": {"dtype": "U8", "shape": [4]}}, 4, "not one"),
        ({"__metadata__": {"n": 1}}, 0, "not one"),
        ([], 0, "not one"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(header: object, size: int, why: str) -> None:
    with pytest.raises(BadSource, match=why):
        parse_header(encoded(header), size)


def test_a_deep_header_is_refused() -> None:
    with pytest.raises(BadSource):
        parse_header(b'{"a":' + b"[" * 100_000, 0)


# ---- directories --------------------------------------------------------------------------------------------


def put(path: Path, header: object, data: bytes = b"", *, claims: int | None = None) -> None:
    head = encoded(header)
    path.write_bytes(struct.pack("<Q", len(head) if claims is None else claims) + head + data)


ONE = {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}


def refused(directory: Path, why: str) -> None:
    with pytest.raises(BadSource, match=why):
        read_source(str(directory))


def index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_bytes(encoded({"metadata": {}, "weight_map": weight_map}))


def test_a_header_that_claims_more_than_there_is(tmp_path: Path) -> None:
    for claims in (1 << 63, 100_000_001, 1000):
        put(tmp_path / "model.safetensors", ONE, b"abcd", claims=claims)
        refused(tmp_path, f"claims {claims} bytes")
    (tmp_path / "model.safetensors").write_bytes(b"123")
    refused(tmp_path, "3 bytes at 0 where 8 were due")


def test_the_whole_model_in_one_file_hides_other_files(tmp_path: Path) -> None:
    put(tmp_path / "model.safetensors", ONE, b"abcd")
    put(tmp_path / "consolidated.safetensors", {}, b"")
    assert [file.name for file in read_source(str(tmp_path)).files] == ["model.safetensors"]


def test_one_name_in_two_files(tmp_path: Path) -> None:
    for name in ("x.safetensors", "y.safetensors"):
        put(tmp_path / name, ONE, b"abcd")
    refused(tmp_path, r"is in x.safetensors and in y.safetensors")


def test_an_index_that_does_not_hold(tmp_path: Path) -> None:
    put(tmp_path / "x.safetensors", ONE, b"abcd")
    index(tmp_path, {"a": "x.safetensors", "b": "x.safetensors"})
    refused(tmp_path, "tensor 'b' is in x.safetensors, which does not")
    index(tmp_path, {"a": "gone.safetensors"})
    refused(tmp_path, "No such file")
    index(tmp_path, {})
    refused(tmp_path, "names no tensor")
    index(tmp_path, {"a": 1})
    refused(tmp_path, "index.json")


@pytest.mark.parametrize("name", ["../out.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\0b"])
def test_an_index_that_leads_out_of_the_directory(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "in"
    inside.mkdir()
    put(tmp_path / "out.safetensors", ONE, b"abcd")
    index(inside, {"a": name})
    refused(inside, "is not the name of a file")


def test_links_within_are_followed_and_links_out_are_refused(tmp_path: Path) -> None:
    inside = tmp_path / "in"
    inside.mkdir()
    put(inside / "blob", ONE, b"abcd")
    (inside / "model.safetensors").symlink_to("blob")
    assert read_source(str(inside)).entries[0].name == "a"
    (inside / "model.safetensors").unlink()
    put(tmp_path / "out.safetensors", ONE, b"abcd")
    (inside / "model.safetensors").symlink_to("../out.safetensors")
    refused(inside, "leads out of the directory")


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    refused(tmp_path, "not a regular file")


def test_a_directory_of_nothing(tmp_path: Path) -> None:
    refused(tmp_path, "holds no .safetensors file")
    put(tmp_path / "model.safetensors", {})
    refused(tmp_path, "hold no tensor")
