"""Transformers with large random weights, so that differences between decoding paths show."""

import platform
from typing import Any

import torch

from weft.models.build import build
from weft.models.transformer import Transformer


def build_transformer(config: Any) -> Transformer:
    """Build a model with fresh weights, the same for the same config."""
    torch.manual_seed(0)
    model = build(config).eval()
    assert isinstance(model, Transformer)
    return model


@torch.no_grad()
def amplified(config: Any) -> Transformer:
    """Build a model with matrices scaled by 3, and random biases and gains."""
    model = build_transformer(config)
    for parameter in model.parameters():
        parameter.mul_(3.0) if parameter.ndim > 1 else parameter.add_(torch.rand_like(parameter))
    return model


@torch.no_grad()
def sharpen(model: Transformer) -> Transformer:
    """Scale matrices by 4: fresh weights give almost uniform logits, and every choice would be a close one."""
    for parameter in model.parameters():
        parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return model.eval()


# Flags that leave out instructions of newer CPUs, so that the code for older ones is tested too.
OLDER_CPUS = {
    "x86_64": ("-mno-avx512vnni", "-mno-avx512f", "-mno-avx2", "-mno-avx"),
    "aarch64": ("-march=armv8-a",),
}.get(platform.machine(), ())
