"""The tensors of vLLM's models that lie on a device, by name."""

from collections.abc import Iterator

import torch

from pool.native import Named, Span

_DTYPES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64", torch.uint8: "U8",
    torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def buffers(models: dict[str, torch.nn.Module]) -> Iterator[torch.Tensor]:
    """What a model keeps beside its parameters, on the device."""
    return (buffer for model in models.values() for buffer in model.buffers() if buffer.is_cuda and buffer.numel())


def named(models: dict[str, torch.nn.Module]) -> Iterator[Named]:
    """Parameters and buffers on the device, each place once. Raises ValueError for a parameter that is not."""
    seen: set[tuple[int, int]] = set()
    for before, model in models.items():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            name = before + name
            size = tensor.numel() * tensor.element_size()
            if not size:
                continue
            if not tensor.is_cuda:
                if isinstance(tensor, torch.nn.Parameter):
                    raise ValueError(f"{name} lies on {tensor.device}: weights off the device are not supported")
                continue
            span = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            if span != tensor.numel():
                raise ValueError(f"{name} has gaps (strides {tensor.stride()}): such weights are not supported")
            if (tensor.data_ptr(), size) not in seen:
                seen.add((tensor.data_ptr(), size))
                dtype = _DTYPES.get(tensor.dtype, str(tensor.dtype))
                yield Named(name, dtype, tuple(tensor.shape), Span(tensor.data_ptr(), size))
