"""A Transformers model without weights: parameters stand on `meta` until a weight set's tensors are put in their place.

Buffers that no checkpoint holds (rotary frequencies) are computed for real: they follow from the configuration alone, so they
are the skeleton's and not the weight set's.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from pool.messages import Tensor
from worker.engines.interface import EngineFault

DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64, "BOOL": torch.bool}
NAMED: Final = 3
"""Tensors that a refusal names of each kind; their number is always given."""


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within, every parameter that a module registers goes to `meta` at once: no memory, no initialisation."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class Skeleton:
    """`config`: Transformers' own. `model`: its causal language model."""

    def __init__(self, source: Path, dtype: torch.dtype) -> None:
        """Raises OSError or ValueError: `source` has no usable config.json."""
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 (2 s, and only here)

        self.config: Any = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        with _parameters_on_meta():
            make: Any = AutoModelForCausalLM.from_config
            self.model: Any = make(self.config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False)
        self.model.eval()
        self._places: list[tuple[tuple[str, ...], torch.Size, torch.dtype, list[tuple[nn.Module, str]]]] = []
        self._find_places()
        self._cache_name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"

    def names(self) -> list[tuple[str, ...]]:
        """Return each tensor's names: one, or several where weights are tied."""
        return [names for names, *_ in self._places]

    def chosen(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensor for each of `names()`.

        Raises:
            EngineFault: `layout`, naming what differs.
        """
        there = {tensor.name: tensor for tensor in tensors}
        chosen, missing, unlike = [], [], []
        for names, shape, dtype, _ in self._places:
            tensor = next((there[name] for name in names if name in there), None)
            if tensor is None:
                missing.append(names[0])
                continue
            if tuple(tensor.shape) != tuple(shape) or DTYPES.get(tensor.dtype) != dtype:
                wanted = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
                unlike.append(f"{tensor.name} is {tensor.dtype} {list(tensor.shape)} where the skeleton has {wanted}")
            chosen.append(tensor)
        known = {name for names, *_ in self._places for name in names}
        foreign = [name for name in there if name not in known]
        if missing or unlike or foreign:
            parts = [
                f"{len(found)} {what}: {', '.join(found[:NAMED])}{', ...' if len(found) > NAMED else ''}"
                for what, found in (("missing", missing), ("unlike", unlike), ("unknown to the skeleton", foreign))
                if found
            ]
            raise EngineFault("layout", f"these weights are not this architecture's; {'; '.join(parts)}")
        return chosen

    def bind(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put parameters (as `chosen` ordered them) in their places."""
        for parameter, (*_, places) in zip(parameters, self._places, strict=True):
            for module, attribute in places:
                if attribute in module._parameters:
                    module._parameters[attribute] = parameter
                else:
                    module._buffers[attribute] = parameter.data

    def unbind(self) -> None:
        """Back to `meta`: a forward pass without weights is an error, not a segmentation fault."""
        self.bind(
            [
                nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
                for _, shape, dtype, _ in self._places
            ]
        )

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: object) -> torch.Tensor:
        """Return the logits after each row's last token, [rows, vocabulary], float32.

        ids, positions: [rows, tokens]. mask: [rows, 1, tokens, length], True where a token may look.
        """
        with torch.inference_mode():
            output = self.model(
                input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, logits_to_keep=1,
                **{self._cache_name: cache},
            )  # fmt: skip
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _find_places(self) -> None:
        modules: Mapping[str, nn.Module] = dict(self.model.named_modules())
        found: dict[int, tuple[list[str], torch.Tensor, list[tuple[nn.Module, str]]]] = {}
        for name, tensor in self._stored():
            parent, _, attribute = name.rpartition(".")
            names, _, places = found.setdefault(id(tensor), ([], tensor, []))
            names.append(name)
            places.append((modules[parent], attribute))
        self._places = [(tuple(names), tensor.shape, tensor.dtype, places) for names, tensor, places in found.values()]

    def _stored(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What a checkpoint holds: parameters, and buffers that are not computed."""
        yield from self.model.named_parameters(remove_duplicate=False)
        persistent = self.model.state_dict().keys()
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        named_buffers: Callable[..., Any] = self.model.named_buffers
        yield from ((name, buffer) for name, buffer in named_buffers(remove_duplicate=False) if name in persistent - parameters)
