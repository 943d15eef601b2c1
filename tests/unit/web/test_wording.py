"""What is wrong with a body, in words that name the field and what is allowed."""

import msgspec
import pytest

from web.errors import ApiError
from web.openai import bodies
from web.wording import reworded

GOOD = {"model": "a", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_tokens": 0}, "max_tokens", "'max_tokens' must be a whole number, at least 1"),
        ({"max_tokens": "5"}, "max_tokens", "'max_tokens' must be a whole number, not a text"),
        ({"max_tokens": 1.5}, "max_tokens", "'max_tokens' must be a whole number, not a number with a fraction"),
        ({"temperature": 3}, "temperature", "'temperature' must be a number, at most 2"),
        ({"stream": 1}, "stream", "'stream' must be true or false, not a whole number"),
        ({"stop": list("abcde")}, "stop", "'stop' must have at most 4 entries"),
        ({"messages": []}, "messages", "'messages' must not be empty"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "'messages[0].role' is missing"),
        (
            {"messages": [{"role": "user", "content": 5}]}, "messages[0].content",
            "'messages[0].content' must be a text or a list, not a whole number",
        ),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_what_it_may_be(fields: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        bodies.chat(msgspec.json.encode({**GOOD, **fields}))
    error = msgspec.json.decode(caught.value.openai())["error"]
    assert error == {"message": message, "type": "invalid_request_error", "param": param, "code": "invalid"}


def test_a_body_that_is_none_and_a_field_that_is_left_out_are_told() -> None:
    for raw, param, message in (
        (b"[]", None, "the body must be a JSON object, not a list"),
        (b"{}", "model", "'model' is missing"),
    ):
        with pytest.raises(ApiError) as caught:
            bodies.chat(raw)
        assert (caught.value.param, caught.value.message) == (param, message)


def test_a_parameters_name_is_that_of_the_caller() -> None:
    assert reworded("Expected `int` >= 1", "limit") == ("limit", "'limit' must be a whole number, at least 1")
    assert reworded("Object contains unknown field `to`") == ("to", "there is no field 'to'")
    assert reworded("Invalid enum value 'x'", "state") == ("state", "'state' can't be 'x'")


def test_what_nobody_has_words_for_is_passed_on_with_the_place() -> None:
    assert reworded("Invalid RFC3339 encoded datetime - at `$.at`") == ("at", "'at': Invalid RFC3339 encoded datetime")
    assert reworded("something new") == (None, "something new")
