"""Text out of tokens: the joined pieces are the one-shot decode, and no piece ever holds half a character."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from worker.frontend.detokenise import REPLACEMENT, ByteDetokeniser, Detokeniser, WindowDetokeniser, byte_table

HARD = [
    "👩🏽‍🚀 and 👍🏿",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "ภาษาไทยไม่มีช่องว่าง",
    "漢字かな交じり文",
    "a\u0301 \u200d x",
    "end \U0010ffff",
]


def byte_level() -> Any:
    """A byte a token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)} | {"<s>": 256}
    made_of: Any = models.BPE(vocab=vocabulary, merges=[])
    tokenizer = Tokenizer(made_of)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def sentencepiece_like() -> Any:
    """Words with their space in front, and a byte a token for the rest: what Llama 2's decoder has to put together."""
    words = ["▁", "▁the", "▁hare", "▁", "a", "b", "c", "▁bc", "é", "▁漢"]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(["<unk>", "<s>", *words]))}
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    made_of: Any = models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer = Tokenizer(made_of)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


BYTES, PIECES = byte_level(), sentencepiece_like()
TABLE = byte_table(BYTES.get_vocab(), {256})


def decode(tokenizer: Any) -> Callable[[Any], str]:
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))


def of_bytes() -> Detokeniser:
    return ByteDetokeniser(TABLE)


def of_windows() -> Detokeniser:
    return WindowDetokeniser(decode(BYTES))


def of_pieces() -> Detokeniser:
    return WindowDetokeniser(decode(PIECES))


def pieces(detokeniser: Detokeniser, ids: list[int]) -> list[str]:
    return [*map(detokeniser.feed, ids), detokeniser.flush()]


@pytest.mark.parametrize("text", HARD)
@pytest.mark.parametrize(("tokenizer", "make"), [(BYTES, of_bytes), (BYTES, of_windows), (PIECES, of_pieces)])
def test_a_byte_a_token_and_no_broken_character(text: str, tokenizer: Any, make: Callable[[], Detokeniser]) -> None:
    """C31."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) >= len(text)
    got = pieces(make(), ids)
    assert "".join(got) == text
    assert not any(REPLACEMENT in piece for piece in got)


@pytest.mark.parametrize("make", [of_bytes, of_windows])
def test_an_output_that_ends_in_mid_character_says_so_at_its_end_only(make: Callable[[], Detokeniser]) -> None:
    """C31: `max_tokens` after each possible byte."""
    ids = BYTES.encode("ok 👍🏿", add_special_tokens=False).ids
    for length in range(1, len(ids) + 1):
        got = pieces(make(), ids[:length])
        assert "".join(got) == decode(BYTES)(ids[:length])
        assert not any(REPLACEMENT in piece for piece in got[:-1])


@given(st.lists(st.integers(0, 256), max_size=40))
def test_any_bytes_in_any_order_come_out_as_the_one_shot_decode(ids: list[int]) -> None:
    whole = decode(BYTES)(ids)
    assert "".join(pieces(of_bytes(), ids)) == whole
    assert "".join(pieces(of_windows(), ids)) == whole


@given(st.lists(st.text(alphabet="the hare abcé漢👍🏿ไ", max_size=6), max_size=6), st.integers(0, 30))
def test_any_text_in_pieces_and_bytes_cut_anywhere(words: list[str], cut: int) -> None:
    """Cut in mid character, such a tokenizer's own decode breaks the whole run of bytes; here only its end is broken."""
    text = " ".join(words)
    ids = PIECES.encode(text, add_special_tokens=False).ids
    whole = decode(PIECES)(ids)
    got = "".join(pieces(of_pieces(), ids[: max(0, len(ids) - cut)]))
    assert whole.startswith(got.rstrip(REPLACEMENT))
    assert len(got) - len(got.rstrip(REPLACEMENT)) <= 3
    if cut == 0:
        assert got == whole


def test_special_tokens_stand_for_nothing() -> None:
    ids = [256, *BYTES.encode("a").ids, 256, *BYTES.encode("b").ids]
    assert "".join(pieces(of_bytes(), ids)) == "ab"
