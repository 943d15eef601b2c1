"""A model's text side: chat template and tokenizer, from the directory of its source. No torch, no `transformers`."""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from worker.frontend.detokenise import ByteDetokeniser, Detokeniser, WindowDetokeniser, byte_table
from worker.frontend.request import Invalid, messages, prompt
from worker.frontend.template import ChatTemplate

FAKE: Final = "fake.json"
"""A source of the fake engine holds this file."""
FAKE_EOS: Final = 256
SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "pad_token")
MOST_LOADED: Final = 4
"""Tokenizers kept in a frontend: an instance switches between the few models of one configuration."""
LONG_CHARS: Final = 16 * 1024
"""A text of this length takes about 5 ms to tokenise; longer ones are done beside the streams, not between them."""
NFC_SHRINKS: Final = 3
"""To a third of its bytes at the most: three Hangul letters become one syllable."""
_ASCII, _CONTINUING = range(0x80), range(0x80, 0xC0)
"""Bytes of UTF-8: of one a whole letter is made, and each longer letter has one of the others."""


class TextSide(Protocol):
    """What a frontend needs of a model."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""

    @property
    def vocabulary(self) -> int:
        """Ids are below this."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of `text`, with the tokens that the tokenizer puts around it (`special`) or without."""

    def least_tokens(self, text: str) -> int:
        """Return how many ids `text` surely has, without the work of making them; 0 where that can't be told."""

    def render(self, chat: list[dict[str, Any]]) -> str:
        """Return a chat as one text. Raises `Invalid`."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens left out."""

    def detokeniser(self) -> Detokeniser: ...


class ByteText:
    """The fake engine's: a byte is a token."""

    stop_ids: Final[tuple[int, ...]] = (FAKE_EOS,)
    vocabulary: Final = FAKE_EOS + 1

    def encode(self, text: str, *, special: bool) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def least_tokens(self, text: str) -> int:
        return 0  # to make them is no work

    def render(self, chat: list[dict[str, Any]]) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in chat) + "assistant: "

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < FAKE_EOS).decode("utf-8", "replace")

    def detokeniser(self) -> Detokeniser:
        return ByteDetokeniser({byte: bytes([byte]) for byte in range(FAKE_EOS)})


class Vocabulary:
    """A `tokenizer.json`, read once however many models bring the same.

    Reading SmolLM2's takes 0.15 s, and a switch to a sibling would wait for that.
    """

    def __init__(self, content: bytes) -> None:
        """Raises whatever the library raises: bare Exceptions."""
        from tokenizers import Tokenizer  # noqa: PLC0415 (an extra: a node with the fake engine only needs none)

        self.tokenizer: Final[Any] = Tokenizer.from_buffer(content)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.size: Final = int(self.tokenizer.get_vocab_size(with_added_tokens=True))
        written = json.loads(content)
        self.bytes: Final = self._byte_table() if (written.get("decoder") or {}).get("type") == "ByteLevel" else None
        self._alphabet: Final = {piece[0] for piece in (self.bytes or {}).values() if len(piece) == 1}
        self.dropped: Final = [chr(letter) for letter in _ASCII if letter not in self._alphabet]
        """Letters that no token stands for: SmolLM2's has none for some control characters, and its model leaves them out."""
        self.most_bytes: Final = self._most_bytes(written)

    def _most_bytes(self, written: dict[str, Any]) -> int | None:
        """Of a text, that one token can stand for; None unless it is sure that no letter but the `dropped` gets lost."""
        added = self.tokenizer.get_added_tokens_decoder().values()
        if self.bytes is None or any(token.lstrip or token.rstrip for token in added) or not _keeps_all(written):
            return None
        if not self._alphabet.issuperset(_CONTINUING):
            return None
        pieces = {len(piece) for piece in self.bytes.values()} | {len(token.content.encode()) for token in added}
        return max(pieces) * (NFC_SHRINKS if written.get("normalizer") else 1)

    def _byte_table(self) -> dict[int, bytes]:
        added = self.tokenizer.get_added_tokens_decoder()
        special = {number for number, token in added.items() if token.special}
        return byte_table(self.tokenizer.get_vocab(with_added_tokens=True), special)


def _keeps_all(tokenizer: dict[str, Any]) -> bool:
    """Whether a `tokenizer.json` takes nothing out of a text but by composing letters (NFC), and knows no unknown words."""
    if (tokenizer.get("model") or {}).get("type") != "BPE":
        return False
    before, normalizer = tokenizer.get("pre_tokenizer") or {}, tokenizer.get("normalizer")
    steps = before.get("pretokenizers", ()) if before.get("type") == "Sequence" else (before,)
    kinds = {(step.get("type"), step.get("behavior")) for step in steps}
    return kinds <= {("ByteLevel", None), ("Split", "Isolated")} and (normalizer or {"type": "NFC"}).get("type") == "NFC"


@functools.lru_cache(maxsize=MOST_LOADED)
def vocabulary(content: bytes) -> Vocabulary:
    return Vocabulary(content)


class TokenizerText:
    """Of a Hugging Face directory with a `tokenizer.json`."""

    def __init__(self, source: Path) -> None:
        """Raises ValueError naming the file that is missing or wrong."""
        file = source / "tokenizer.json"
        try:
            known = vocabulary(file.read_bytes())
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{file} can't be read: {error}") from error
        self._vocabulary, self._tokenizer, self._bytes = known, known.tokenizer, known.bytes
        self.vocabulary: Final = known.size
        settings = _json(source / "tokenizer_config.json")
        tokens = {name: text for name in SPECIAL if (text := _token(settings.get(name)))}
        template = _template(source, settings)
        self._template = ChatTemplate(template, tokens) if template is not None else None
        self.stop_ids: Final = self._stop_ids(source, tokens.get("eos_token"))

    def encode(self, text: str, *, special: bool) -> list[int]:
        if len(text) > LONG_CHARS:  # the library lets other threads run during a batch only
            return list(self._tokenizer.encode_batch([text], add_special_tokens=special)[0].ids)
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def least_tokens(self, text: str) -> int:
        known = self._vocabulary
        return (len(text) - sum(map(text.count, known.dropped))) // known.most_bytes if known.most_bytes is not None else 0

    def render(self, chat: list[dict[str, Any]]) -> str:
        if self._template is None:
            raise Invalid("this model has no chat template: use /v1/completions", "messages")
        return self._template.render(chat)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def detokeniser(self) -> Detokeniser:
        return ByteDetokeniser(self._bytes) if self._bytes is not None else WindowDetokeniser(self.decode)

    def _stop_ids(self, source: Path, eos: str | None) -> tuple[int, ...]:
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            ids = _json(source / name).get("eos_token_id")
            found |= set(ids) if isinstance(ids, list) else {ids} if isinstance(ids, int) else set()
        if eos is not None and (number := self._tokenizer.token_to_id(eos)) is not None:
            found.add(number)
        return tuple(sorted(found))


@functools.lru_cache(maxsize=MOST_LOADED)
def load(source: Path) -> TextSide:
    """Return the text side of a source's directory. Raises ValueError naming what is wrong with it."""
    return ByteText() if (source / FAKE).exists() else TokenizerText(source)


def prompt_ids(text: TextSide, kind: str, body: Mapping[str, Any], *, most: int) -> list[int]:
    """Return the prompt's ids of a body of `kind` `chat` or `completion`.

    Raises:
        Invalid: with the field's name; `too_long` for a text that surely has more than `most`, before the work is done.
    """
    field = "messages" if kind == "chat" else "prompt"
    given = text.render(messages(body)) if kind == "chat" else prompt(body)
    if isinstance(given, str):
        if (least := text.least_tokens(given)) > most:
            raise Invalid(f"the prompt has at least {least} tokens; the model takes at most {most}", field, "too_long")
        ids = text.encode(given, special=kind != "chat")
    elif all(0 <= token < text.vocabulary for token in given):
        ids = given
    else:
        raise Invalid(f"'prompt' has token ids outside 0 to {text.vocabulary - 1}", "prompt")
    if not ids:
        raise Invalid("the prompt is empty", field)
    return ids


def count_tokens(source_dir: Path, kind: str, body: Mapping[str, Any], *, most: int) -> int:
    """Return the exact number of tokens that a body's prompt has for the model in `source_dir`.

    Raises:
        Invalid: the body is wrong, or surely has more than `most`. ValueError: the source is.
    """
    return len(prompt_ids(load(source_dir), kind, body, most=most))


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no JSON object")
    return found


def _token(value: object) -> str | None:
    """A special token is written as a text or as an object with its `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template(source: Path, settings: dict[str, Any]) -> str | None:
    file = source / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    match settings.get("chat_template"):
        case str(text):
            return text
        case [*named]:
            return next((str(one["template"]) for one in named if isinstance(one, dict) and one.get("name") == "default"), None)
        case _:
            return None
