"""Chat templates: Jinja from a model's source. They come from strangers, so they run in an immutable sandbox."""

import datetime
import json
from typing import Any, Final

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from worker.frontend.request import Invalid

MOST_TEMPLATE_BYTES: Final = 2**20


class _Generation(Extension):
    """`{% generation %}` marks an assistant's text for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **_: Any) -> str:
    """Jinja's own escapes HTML, which a prompt is not."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


_environment: Final = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
)
_environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
_environment.filters["tojson"] = _tojson


class ChatTemplate:
    """One model's. `tokens`: names that templates use for special tokens (`bos_token`, ...)."""

    def __init__(self, text: str, tokens: dict[str, str]) -> None:
        """Raises ValueError if it is no template."""
        if len(text) > MOST_TEMPLATE_BYTES:
            raise ValueError(f"a chat template of {len(text)} characters, over {MOST_TEMPLATE_BYTES}")
        try:
            self._template = _environment.from_string(text)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template can't be read: {error}") from error
        self._tokens = tokens

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Return the prompt's text, ready for the assistant's turn.

        Raises:
            Invalid: the template refuses these messages (a role it does not know, an order it does not take).
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, documents=None, **self._tokens
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            raise Invalid(f"the model's chat template refuses these messages: {error}", "messages") from error
