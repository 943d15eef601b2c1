"""What a spec may say of an engine, and what it is told when it says something else."""

import pytest

from controlplane.arguments import check, shaping
from controlplane.refusal import Code, Refused


def test_what_is_allowed_is_normalised() -> None:
    given = {"threads": 2, "kv_bytes": "1.5GiB", "dtype": "bfloat16"}
    assert check("transformers", given) == {"dtype": "bfloat16", "kv_bytes": 1610612736, "threads": 2}
    assert check("fake", {"tokens_per_s": 5, "fail": "start:1"}) == {"fail": "start:1", "tokens_per_s": 5.0}


@pytest.mark.parametrize(
    ("arguments", "name", "said"),
    [
        ({"trust_remote_code": True}, "trust_remote_code", "takes no argument"),
        ({"threads": 0}, "threads", "outside 1 to 1024"),
        ({"threads": True}, "threads", "is bool, not int"),
        ({"threads": "2"}, "threads", "is str, not int"),
        ({"dtype": "int8"}, "dtype", "not one of float32, bfloat16"),
        ({"kv_bytes": "many"}, "kv_bytes", "is not a size"),
        ({"kv_bytes": 1}, "kv_bytes", "outside 65536"),
    ],
)
def test_everything_else_is_refused_by_name(arguments: dict[str, object], name: str, said: str) -> None:
    with pytest.raises(Refused, match=said) as refused:
        check("transformers", arguments)
    assert (refused.value.code, refused.value.details["param"]) == (Code.INVALID, f"arguments.{name}")


@pytest.mark.parametrize("fail", ["", "never", "start:", "start:x", "wake:-1"])
def test_a_failure_is_told_in_one_form(fail: str) -> None:
    with pytest.raises(Refused, match="argument 'fail'"):
        check("fake", {"fail": fail})


def test_bytes_of_the_weights_do_not_shape_a_skeleton() -> None:
    assert shaping("fake", {"weight_bytes": 5, "wake_ms": 1}) == {"wake_ms": 1}
