"""Batching of the Transformers engine: what a sequence gets does not depend on what runs beside it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.tinymodels import tiny
from worker.engines.batch import Batch, Sequence
from worker.engines.kv import SlotCache, Unsuited, kv_shape
from worker.engines.messages import Sampling
from worker.engines.skeleton import Skeleton

Make = Callable[[], Batch]
GREEDY = Sampling(max_tokens=24, temperature=0, ignore_eos=True)
PROMPTS = [tuple((n * 37 + at * (n + 3)) % 256 for at in range(5 + 41 * n)) for n in range(5)]


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2"])
def skeleton(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Skeleton:
    source = tiny(tmp_path_factory.mktemp("tiny") / "m", request.param)
    return loaded(source)


def loaded(source: Path) -> Skeleton:
    skeleton = Skeleton(source, torch.float32)
    weights = load_file(source / "model.safetensors")
    chosen = [next(weights[name] for name in names if name in weights) for names in skeleton.names()]
    skeleton.bind([nn.Parameter(tensor, requires_grad=False) for tensor in chosen])
    return skeleton


def batch(skeleton: Skeleton, slots: int = 4) -> Batch:
    shape = kv_shape(skeleton.config, {"max_num_seqs": slots}, 4)
    return Batch(skeleton.forward, SlotCache(shape, torch.float32))


def run(running: Batch) -> dict[str, tuple[int, ...]]:
    ids: dict[str, tuple[int, ...]] = {}
    while len(running):
        for output in running.step():
            ids[output.request] = ids.get(output.request, ()) + output.ids
    return ids


def reference(skeleton: Skeleton, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Transformers' own forward pass, whole, without any cache."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(skeleton.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


def test_alone_and_together_are_the_same_and_what_transformers_says(skeleton: Skeleton) -> None:
    alone = {}
    for n, prompt in enumerate(PROMPTS):
        one = batch(skeleton)
        one.add(Sequence(f"r{n}", prompt, GREEDY))
        alone |= run(one)
    together = batch(skeleton)  # five requests, four slots: one waits, too
    for n, prompt in enumerate(PROMPTS):
        together.add(Sequence(f"r{n}", prompt, GREEDY))
    assert run(together) == alone
    assert alone["r2"] == reference(skeleton, PROMPTS[2], 24)


def test_a_sequence_that_leaves_does_not_disturb_those_that_stay(skeleton: Skeleton) -> None:
    expected = {f"r{n}": reference(skeleton, prompt, 24) for n, prompt in enumerate(PROMPTS)}
    running = batch(skeleton)
    for n, prompt in enumerate(PROMPTS):
        running.add(Sequence(f"r{n}", prompt, GREEDY))
    ids: dict[str, tuple[int, ...]] = {}
    for step in range(6):
        for output in running.step():
            ids[output.request] = ids.get(output.request, ()) + output.ids
        if step == 3:
            assert running.remove("r0")
        if step == 5:
            assert running.remove("r3"), "while its prompt is being read"
            assert not running.remove("r3")
    ids |= {request: ids.get(request, ()) + more for request, more in run(running).items()}
    assert {request: ids[request] for request in ("r1", "r2", "r4")} == {r: expected[r] for r in ("r1", "r2", "r4")}
    assert expected["r0"][: len(ids["r0"])] == ids["r0"]


def test_stop_ids_and_limits(skeleton: Skeleton) -> None:
    says = reference(skeleton, PROMPTS[1], 8)
    running = batch(skeleton)
    running.add(Sequence("stop", PROMPTS[1], Sampling(max_tokens=99, temperature=0, stop_ids=(says[3],))))
    running.add(Sequence("length", PROMPTS[1], Sampling(max_tokens=2, temperature=0)))
    running.add(Sequence("full", tuple(range(250)), Sampling(max_tokens=999, temperature=0, ignore_eos=True)))
    ended, ids = {}, dict[str, tuple[int, ...]]()
    while len(running):
        for output in running.step():
            ids[output.request] = ids.get(output.request, ()) + output.ids
            if output.reason is not None:
                ended[output.request] = output.reason
    assert ended == {"stop": "stop", "length": "length", "full": "length"}
    assert ids["stop"] == says[: says.index(says[3])]
    assert ids["length"] == says[:2]
    assert len(ids["full"]) == 256 - 250 + 1


def test_sampling_with_a_seed_repeats_itself_in_any_company(skeleton: Skeleton) -> None:
    wild = Sampling(max_tokens=20, temperature=1.5, top_p=0.95, top_k=50, seed=7, presence_penalty=0.5, ignore_eos=True)
    one = batch(skeleton)
    one.add(Sequence("r", PROMPTS[1], wild))
    first = run(one)["r"]
    many = batch(skeleton)
    for n, prompt in enumerate(PROMPTS):
        many.add(Sequence(f"r{n}", prompt, wild))
    assert run(many)["r1"] == first
    assert first != reference(skeleton, PROMPTS[1], 20)


def test_arguments_that_can_not_be_name_both_numbers(skeleton: Skeleton) -> None:
    with pytest.raises(Unsuited, match=r"max_model_len is 512.* 256"):
        kv_shape(skeleton.config, {"max_model_len": 512}, 4)
    with pytest.raises(Unsuited, match=r"256 tokens needs [\d.]+ KiB of KV; kv_bytes is 1000 B"):
        kv_shape(skeleton.config, {"kv_bytes": 1000}, 4)
    whole = kv_shape(skeleton.config, {"max_num_seqs": 3}, 4)
    assert whole.slots == 3
    assert kv_shape(skeleton.config, {"kv_bytes": whole.size_bytes - 1}, 4).slots == 2
    with pytest.raises(Unsuited, match=r"max_num_seqs is 3, .* need \d+ bytes of KV; kv_bytes is \d+ bytes and holds 2: lower"):
        kv_shape(skeleton.config, {"max_num_seqs": 3, "kv_bytes": whole.size_bytes - 1}, 4)
    with pytest.raises(
        Unsuited, match=r"max_num_seqs is 100000, .* kv_bytes is 1.0 GiB unless it is given and holds \d+: lower"
    ):
        kv_shape(skeleton.config, {"max_num_seqs": 100_000}, 4)


def test_a_sliding_window_is_refused_beyond_its_reach(tmp_path: Path) -> None:
    from transformers import AutoConfig  # noqa: PLC0415

    config = AutoConfig.for_model(
        "mistral", vocab_size=257, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
        max_position_embeddings=256, sliding_window=64,
    )  # fmt: skip
    with pytest.raises(Unsuited, match="window of 64"):
        kv_shape(config, {}, 4)
    assert kv_shape(config, {"max_model_len": 64}, 4).context_tokens == 64
