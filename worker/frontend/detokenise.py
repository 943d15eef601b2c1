"""Token ids to text, bit by bit: what has been given out never changes, and all of it together is the one-shot decode.

A replacement character comes out only where the bytes really are broken: in the middle of the output if the model wrote
nonsense, at its end if it stopped in mid character.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

REPLACEMENT: Final = "\ufffd"


class Detokeniser(Protocol):
    """One output. `feed` returns the text that is certain now, `flush` what was left at the end."""

    def feed(self, token: int) -> str: ...

    def flush(self) -> str: ...


class ByteDetokeniser:
    """For tokenizers whose tokens are bytes (byte-level BPE, the fake engine): a table and an incremental UTF-8 decoder."""

    def __init__(self, table: Mapping[int, bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return self._decoder.decode(self._table.get(token, b""))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokeniser:
    """For any other tokenizer: decodes the last few tokens together and gives out what the newest one added.

    `decode` turns ids into text, special tokens left out. A window is needed because a decoder may look at its neighbours
    (spaces at the start of a word, bytes of one character over several tokens).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._given_ids = 0
        """Of `_ids`, those whose text has been given out; kept as the context of what follows."""
        self._given = ""

    def feed(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT) or len(text) <= len(self._given):
            return ""
        return self._give(text)

    def flush(self) -> str:
        return self._give(self._decode(self._ids))

    def _give(self, text: str) -> str:
        new_ids = self._ids[self._given_ids :]
        # Broken bytes can break what stood before them, which has been given out: then the new ones count alone.
        new = text[len(self._given) :] if text.startswith(self._given) else self._decode(new_ids)
        # What has just been settled stays as context: with it the next decode begins as the whole would.
        self._ids, self._given_ids = new_ids, len(new_ids)
        self._given = self._decode(new_ids)
        return new


def byte_table(vocabulary: Mapping[str, int], special: set[int]) -> dict[int, bytes]:
    """Return id -> bytes of a byte-level BPE, from its vocabulary; special tokens stand for no bytes."""
    letters = _bytes_of_letters()
    table = {}
    for token, number in vocabulary.items():
        if number in special:
            table[number] = b""
        elif all(letter in letters for letter in token):
            table[number] = bytes(letters[letter] for letter in token)
        else:  # an added token, written as itself
            table[number] = token.encode()
    return table


def _bytes_of_letters() -> dict[str, int]:
    """The 256 letters that byte-level BPE writes bytes as (GPT-2's table): printable ones as themselves, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return letters | {chr(0x100 + nth): byte for nth, byte in enumerate(others)}
