"""The main journey with the Transformers engine: tiny real models, greedy, on two devices that can't hold all three."""

from pathlib import Path

from controlplane.rungs import Rung
from tests.plane import PlaneUnderTest, running
from tests.tinymodels import tiny

NODE = '[node]\npool_bytes = "256MiB"\ndevices = [{ name = "cpu0", bytes = "900MiB" }, { name = "cpu1", bytes = "900MiB" }]\n'


def model(name: str, source: Path) -> str:
    return (
        f'\n[[model]]\nname = "{name}"\nsource = "{source}"\nshare = 1\nidle = {{ sleep = "never", cold = "never" }}\n'
        'arguments = { max_model_len = 256, max_num_seqs = 2, kv_bytes = "8MiB" }\n'
    )


async def test_real_models_swap_and_answer_as_before(tmp_path: Path) -> None:
    one, two = tiny(tmp_path / "one", "llama", seed=1), tiny(tmp_path / "two", "llama", seed=2)
    other = tiny(tmp_path / "other", "qwen3", seed=3)
    with running(NODE + model("one", one) + model("two", two) + model("other", other)) as plane:
        names = ("one", "two", "other")
        first = {name: await say(plane, name) for name in names}
        assert len(set(first.values())) == 3, "three models, three answers"
        for name in ("two", "one", "other", "one", "two"):
            assert await say(plane, name) == first[name], f"{name} is what it was"
        fleet = await plane.fleet()
        assert len(fleet.configurations) == 2, "one and two share a skeleton"
        assert sum(instance.rung is Rung.UP for instance in fleet.instances.values()) <= 2
        ups = await plane.events("InstanceUp")
        assert any(event.event.model == "two" for event in ups)  # type: ignore[union-attr]
        slept = plane.cli("sleep", "two")
        assert slept.returncode == 0, slept.stderr
        assert await say(plane, "two") == first["two"], "woken, it is what it was"


async def say(plane: PlaneUnderTest, name: str) -> str:
    async with plane.openai() as client:
        answer = await client.completions.create(model=name, prompt="Once upon a time", max_tokens=12, temperature=0)
    assert answer.usage is not None and answer.usage.completion_tokens > 0
    return answer.choices[0].text
