"""Bodies in, chunks out, errors."""

import json

import msgspec
import pytest

from controlplane.decisions.limits import OVERDUE_MS, QUEUE_DEADLINE_MS
from controlplane.refusal import Code, Refused
from web.attempt import Ask
from web.errors import STATUS, ApiError
from web.frontend import Finish
from web.openai import bodies
from web.openai.chunks import Chunks, comment, whole
from web.openai.routes import Prefer
from worker.frontend import request

FINISH = Finish(finish_reason="stop", prompt_tokens=3, completion_tokens=2, chars=5)


def ask(kind: str = "chat") -> Ask:
    make = bodies.chat if kind == "chat" else bodies.completion
    text = {"messages": [{"role": "user", "content": "x"}]} if kind == "chat" else {"prompt": "x"}
    return make(json.dumps({"model": "m", "stream": True, **text}).encode())[1]


def data(event: bytes) -> dict[str, object]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    return json.loads(event[6:])  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("text", ["plain", 'quote " and \\', "line\nline\u2028", "\0", "ü🦜", ""])
def test_a_chunk_is_json_that_holds_the_text(kind: str, text: str) -> None:
    chunks = Chunks("req_1", ask(kind), include_usage=False)
    choice = data(chunks.text(text))["choices"][0]  # type: ignore[index]
    assert (choice["delta"]["content"] if kind == "chat" else choice["text"]) == text
    assert b"\n" not in chunks.text(text)[:-2]


def test_with_usage_every_chunk_names_it_and_the_last_has_it() -> None:
    chunks = Chunks("req_1", ask(), include_usage=True)
    assert data(chunks.text("x"))["usage"] is None
    last, usage, done = chunks.closing(FINISH).rstrip().split(b"\n\n")
    assert json.loads(last[6:])["choices"][0]["finish_reason"] == "stop"
    assert json.loads(usage[6:])["usage"]["total_tokens"] == 5
    assert json.loads(usage[6:])["choices"] == []
    assert done == b"data: [DONE]"


def test_a_comment_stays_one_line() -> None:
    assert comment("a\nb\r\ndata: x") == b": a b  data: x\n\n"


def test_an_answer_in_one_piece() -> None:
    body = json.loads(whole("req_1", ask(), "hello", FINISH))
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert (body["id"], body["object"]) == ("chatcmpl-1", "chat.completion")


@pytest.mark.parametrize(
    ("content", "size"),
    [("abc", 3 + 4), ("ü🦜", 6 + 4), ([{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}], 3 + 4)],
)
def test_prompt_bytes_bound_the_tokens(content: object, size: int) -> None:
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    assert bodies.chat(raw)[1].prompt_bytes == size


@pytest.mark.parametrize("prompt", ["abc", ["abc"], [1, 2, 3], [[1, 2, 3]]])
def test_prompts_of_every_form_count(prompt: object) -> None:
    assert bodies.completion(json.dumps({"model": "m", "prompt": prompt}).encode())[1].prompt_bytes == 3


@pytest.mark.parametrize("prompt", [[], ["a", "b"], [[1], [2]], ["a", 1], [[]]])
def test_prompts_that_are_several_or_none_are_refused(prompt: object) -> None:
    with pytest.raises(ApiError) as caught:
        bodies.completion(json.dumps({"model": "m", "prompt": prompt}).encode())
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def refused(**fields: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        bodies.chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}).encode())
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [("stop", ""), ("stop", [""]), ("seed", 2**63), ("tool_choice", "required"), ("prediction", {"type": "content"})],
)
def test_what_a_frontend_would_refuse_is_refused_before_a_model_is_loaded_for_it(field: str, value: object) -> None:
    error = refused(**{field: value})
    assert error.status == 400
    assert (error.param or "").startswith(field)


def test_web_and_frontends_refuse_the_same_fields() -> None:
    assert bodies.UNSUPPORTED.keys() == request.REFUSED.keys()
    for name, harmless in request.REFUSED.items():
        assert all(value in bodies.UNSUPPORTED[name] for value in harmless), name
        assert all(value in harmless for value in bodies.UNSUPPORTED[name]), name


def test_brackets_without_end_are_no_fault_of_ours() -> None:
    with pytest.raises(ApiError, match="not JSON") as caught:
        bodies.chat(b'{"model": "m", "x": ' + b"[" * 100_000)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("code", "status"), [("cannot_fit", 400), ("model_unusable", 400), ("model_retired", 404), ("load_failed", 503)]
)
def test_a_request_that_can_never_be_served_is_not_to_be_tried_again(code: str, status: int) -> None:
    error = ApiError.ended(code, "x")
    assert error.status == status
    assert (status == 503) == ("retry-after" in error.headers)


def test_every_refusal_has_a_status_and_retries_say_when() -> None:
    assert set(STATUS) == set(Code)
    for code in Code:
        error = ApiError.of(Refused(code, "x"))
        assert (error.status in (429, 503)) == ("retry-after" in error.headers), code
    assert ApiError.of(Refused(Code.BACKING_OFF, "x", retry_after_ms=1500)).headers == {"retry-after": "2"}


@pytest.mark.parametrize(
    ("field", "value", "cure"),
    [
        ("n", 2, "leave it out, or give 1"),
        ("logprobs", True, "leave it out, or give false"),
        ("response_format", {"type": "json_object"}, 'leave it out, or give {"type":"text"}'),
        ("prediction", {"type": "content"}, "leave it out"),
    ],
)
def test_a_field_that_is_not_supported_is_named_with_a_value_in_json_that_is(field: str, value: object, cure: str) -> None:
    with pytest.raises(ApiError, match=f"'{field}' is not supported; ") as refused:
        bodies.chat(msgspec.json.encode({"model": "a", "messages": [{"role": "user", "content": "x"}], field: value}))
    assert refused.value.param == field
    assert refused.value.message.endswith(cure)


def test_what_callers_are_told_of_their_patience_is_what_the_plane_has() -> None:
    told = str(Prefer.__metadata__[0].description)
    assert f"{QUEUE_DEADLINE_MS // 1000} s in the queue ({OVERDUE_MS // 1000} s where its model climbs)" in told
