"""Bodies of the OpenAI API: what counts, what is refused, and by which name."""

from typing import Any

import pytest

from worker.frontend.chat import ByteText, prompt_ids
from worker.frontend.request import Invalid, messages, prompt, wanted


def test_what_is_asked_for() -> None:
    want = wanted(
        {"temperature": 0, "max_completion_tokens": 5, "max_tokens": 9, "stop": "x", "seed": -3, "user": "u", "new": 1}
    )
    assert (want.sampling.temperature, want.max_tokens, want.stops, want.sampling.seed) == (0.0, 5, ("x",), -3)
    nothing = wanted({"stop": None, "n": None, "logprobs": False, "tools": [], "response_format": {"type": "text"}})
    assert (nothing.max_tokens, nothing.stops, nothing.sampling.temperature, nothing.sampling.top_p) == (None, (), 1.0, 1.0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"tools": [{}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_what_is_refused_names_its_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(Invalid) as invalid:
        wanted(body)
    assert invalid.value.param == param
    assert param in invalid.value.message


def test_parts_of_type_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    given = [{"role": "developer", "content": "z"}, {"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    found = messages({"messages": given})
    assert [(message["role"], message["content"]) for message in found] == [("system", "z"), ("user", "ab"), ("assistant", "")]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        (["x"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        (
            [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image_url"}]}],
            "messages[1].content[0].type",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "messages[0].tool_calls"),
    ],
)
def test_messages_that_are_none_name_the_place(given: object, param: str) -> None:
    with pytest.raises(Invalid) as invalid:
        messages({"messages": given})
    assert invalid.value.param == param


def test_prompts() -> None:
    assert prompt({"prompt": "a"}) == prompt({"prompt": ["a"]}) == "a"
    assert prompt({"prompt": [1, 2]}) == prompt({"prompt": [[1, 2]]}) == [1, 2]
    for wrong in (None, [], ["a", "b"], [[1], [2]], [1, "a"], 5):
        with pytest.raises(Invalid, match="prompt"):
            prompt({"prompt": wrong})
    assert prompt_ids(ByteText(), "completion", {"prompt": "é"}, most=100) == [0xC3, 0xA9]
    with pytest.raises(Invalid, match="outside 0 to 256"):
        prompt_ids(ByteText(), "completion", {"prompt": [1, 257]}, most=100)
    with pytest.raises(Invalid, match="empty"):
        prompt_ids(ByteText(), "completion", {"prompt": ""}, most=100)
