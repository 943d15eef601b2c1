"""The text side of a model's directory."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.tinymodels import byte_tokenizer
from worker.frontend.chat import FAKE, LONG_CHARS, TokenizerText, count_tokens, load, vocabulary
from worker.frontend.request import Invalid

CHAT = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Příliš 👩🏽‍🚀 <b>\n"}]}
CHATML = (
    "{%- for message in messages %}\n    {{- '<|end|>' + message['role'] + '\\n' + message['content'] | trim }}\n"
    "    {%- if loop.last %}{% break %}{% endif %}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {%- generation %}{{- 'assistant: ' }}{%- endgeneration %}\n{%- endif %}"
)


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", "named"])
def test_template_and_ids_are_those_of_transformers(tmp_path: Path, place: str) -> None:
    byte_tokenizer(tmp_path)
    settings = {"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if place == "chat_template.jinja":
        (tmp_path / place).write_text(CHATML)
    elif place == "named":
        settings["chat_template"] = [{"name": "tool", "template": "x"}, {"name": "default", "template": CHATML}]  # type: ignore[assignment]
    else:
        settings["chat_template"] = CHATML  # type: ignore[assignment]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [256, 5]}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(CHAT["messages"], chat_template=CHATML, add_generation_prompt=True, tokenize=True)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": {"content": "<|end|>"}}))
    ours = load(tmp_path)
    assert ours.encode(ours.render(CHAT["messages"]), special=False) == expected["input_ids"]
    assert count_tokens(tmp_path, "chat", CHAT, most=500) == len(expected["input_ids"])
    assert ours.stop_ids == (5, 256)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must take turns') }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[7].content }}",
        "{% for n in range(10000000) %}x{% endfor %}",
    ],
)
def test_a_template_can_refuse_but_not_escape(tmp_path: Path, template: str) -> None:
    byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(Invalid, match="chat template refuses") as refused:
        count_tokens(tmp_path, "chat", CHAT, most=500)
    assert refused.value.param == "messages"


def test_models_that_bring_the_same_tokenizer_share_it_and_keep_their_own_templates(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        byte_tokenizer(tmp_path / name)
        template = {"chat_template": f"{name}: {{{{ messages[0].content }}}}"}
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps(template))
    content = (tmp_path / "one" / "tokenizer.json").read_bytes()
    assert vocabulary(content) is vocabulary((tmp_path / "other" / "tokenizer.json").read_bytes())
    chat = [{"role": "user", "content": "x"}]
    assert [load(tmp_path / name).render(chat) for name in ("one", "other")] == ["one: x", "other: x"]


def test_without_a_template_completions_only(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(Invalid, match="/v1/completions"):
        count_tokens(tmp_path, "chat", CHAT, most=500)
    assert count_tokens(tmp_path, "completion", {"prompt": "abc"}, most=3) == 3


def test_a_directory_without_a_tokenizer_says_which_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load(tmp_path)


def test_the_fake_engines_bytes(tmp_path: Path) -> None:
    (tmp_path / FAKE).write_text("{}")
    assert (
        count_tokens(tmp_path, "chat", {"messages": [{"role": "user", "content": "é"}]}, most=99)
        == len(b"user: \nassistant: ") + 2
    )


def test_a_text_that_is_surely_too_long_is_refused_before_it_is_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    byte_tokenizer(tmp_path)
    longest = len("<|end|>")
    assert count_tokens(tmp_path, "completion", {"prompt": "a" * longest * 9}, most=9) == longest * 9
    monkeypatch.setattr(TokenizerText, "encode", None)
    for kind, body in (
        ("completion", {"prompt": "a" * longest * 10}),
        ("chat", {"messages": [{"role": "user", "content": "a" * 80}]}),
    ):
        with pytest.raises(Invalid, match=r"at least 1\d tokens; the model takes at most 9") as refused:
            count_tokens(tmp_path, kind, body, most=9)
        assert refused.value.code == "too_long"


@pytest.mark.parametrize(
    ("part", "written", "most_bytes"),
    [
        ("normalizer", None, 7),
        ("normalizer", {"type": "NFC"}, 21),
        ("normalizer", {"type": "NFKC"}, None),
        ("normalizer", {"type": "Strip", "strip_left": True, "strip_right": True}, None),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}]}, None),
        ("pre_tokenizer", {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}, None),
        ("pre_tokenizer", {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False}, 7),
    ],
)
def test_how_much_a_token_can_stand_for_is_told_only_where_no_byte_gets_lost(
    tmp_path: Path, part: str, written: object, most_bytes: int | None
) -> None:
    byte_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), part: written}))
    assert vocabulary(file.read_bytes()).most_bytes == most_bytes


def test_letters_that_a_tokenizer_drops_do_not_make_a_text_too_long(tmp_path: Path) -> None:
    """SmolLM2's drops some control characters, however often they come."""
    byte_tokenizer(tmp_path)
    without(tmp_path / "tokenizer.json", "Z")
    for prompt in ("Z" * 500 + "b", "Zb" * 7):
        assert count_tokens(tmp_path, "completion", {"prompt": prompt}, most=9) <= 9
    with pytest.raises(Invalid, match="at least 10 tokens"):
        count_tokens(tmp_path, "completion", {"prompt": "Zb" * 70}, most=9)


def test_a_vocabulary_that_may_drop_any_letter_tells_nothing_of_a_text_s_length(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    without(tmp_path / "tokenizer.json", "Ģ")  # byte 0x80
    assert vocabulary((tmp_path / "tokenizer.json").read_bytes()).most_bytes is None


def without(file: Path, token: str) -> None:
    written = json.loads(file.read_text())
    del written["model"]["vocab"][token]
    written["model"]["merges"] = [pair for pair in written["model"]["merges"] if token not in "".join(pair)]
    file.write_text(json.dumps(written))


def test_a_long_text_has_the_ids_of_its_parts(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    text = load(tmp_path)
    short = "words and spaces "
    assert text.encode(short * LONG_CHARS, special=False) == text.encode(short, special=False) * LONG_CHARS
