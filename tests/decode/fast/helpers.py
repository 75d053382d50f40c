"""Transformers with large random weights, so that differences between decoding paths show."""

import platform
from typing import Any, TypeVar

import torch

from weft.decode.fast.quantize import quantize
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.transformer import Transformer

M = TypeVar("M", bound=LanguageModel)


def build_transformer(config: Any) -> Transformer:
    """Build a model with fresh weights, the same for the same config."""
    torch.manual_seed(0)
    model = build(config).eval()
    assert isinstance(model, Transformer)
    return model


@torch.no_grad()
def amplified(config: Any, bits: str | None = None) -> Transformer:
    """Build a model with matrices scaled by 3, and random biases and gains; quantised if there are `bits`."""
    model = build_transformer(config)
    for parameter in model.parameters():
        parameter.mul_(3.0) if parameter.ndim > 1 else parameter.add_(torch.rand_like(parameter))
    if bits is not None:
        quantize(model, bits)
    return model


@torch.no_grad()
def sharpen(model: M, factor: float = 4.0) -> M:
    """Scale matrices: fresh weights give almost uniform logits, and every choice would be a close one."""
    for parameter in model.parameters():
        parameter.mul_(factor if parameter.ndim > 1 else 1.0)
    return model.eval()


# Flags that leave out instructions of newer CPUs, so that the code for older ones is tested too.
OLDER_CPUS = {
    "x86_64": ("-mno-avx512vnni", "-mno-avx512f", "-mno-avx2", "-mno-avx"),
    "aarch64": ("-march=armv8-a",),
}.get(platform.machine(), ())
