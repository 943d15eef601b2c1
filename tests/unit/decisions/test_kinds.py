"""Which kind of device an engine runs on, and what is said where there is none."""

from controlplane.commands import Load, RegisterModel, ReportModel
from controlplane.refusal import Code
from controlplane.spec import ModelFacts, ModelSpec
from tests.unit.decisions.spec import plane, spec, with_models

VLLM = ModelSpec(name="v", source="/models/v", engine="vllm")
FACTS = ModelFacts(configuration="cfg_v", architecture="Llama", weight_bytes=300, kv_bytes=0, context_tokens=64)


def test_without_a_gpu_a_model_that_needs_one_is_refused_with_the_cure() -> None:
    story = plane()
    story.when(RegisterModel(spec=VLLM)).then_refused(Code.NOT_AVAILABLE, param="engine")
    assert "enginehouse[gpu]" in str(story.refused)


def test_it_is_placed_on_a_gpu() -> None:
    story = plane(kind="gpu").given(RegisterModel(spec=VLLM))
    story.given(ReportModel(node="n1", model="v", revision=1, facts=FACTS, engine="vllm", arguments={})).bring_up("v")
    assert story.instance_of("v").device == "dev0"


def test_an_engine_of_the_processors_is_not_placed_on_one() -> None:
    story = plane(kind="gpu")
    refused = story.when(RegisterModel(spec=ModelSpec(name="t", source="/models/t"))).then_refused(Code.NOT_AVAILABLE)
    assert "share of host memory" in str(story.refused), refused


def test_the_fake_engine_runs_on_either() -> None:
    for kind in ("cpu", "gpu"):
        with_models(plane(kind=kind), spec("a")).given(Load(model="a")).bring_up("a")
