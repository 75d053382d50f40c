"""Weights of 4 bits with a power of two per 32 of them (Open Compute Project 2023, MX formats), as in GPT-OSS: unpacked
when they are read. A file has them as two tensors of bytes, `NAME_blocks` and `NAME_scales`."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.errors import InteropError
from weft.storage.tensors import StoredTensor

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
BYTES, BIAS = 16, 127  # bytes of a block, the lower four bits first; bias of its exponent


@dataclass(frozen=True)
class PackedTensor(StoredTensor):
    """Blocks (experts, outputs, blocks, 16) with their scales, read as a tensor (experts, inputs, outputs)."""

    scales: StoredTensor | None = None

    def read(self) -> Tensor:
        assert self.scales is not None
        blocks = StoredTensor(self.file, f"{self.name}_blocks", (), "U8", self.mapped)
        table = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.bfloat16)
        unpacked = torch.empty(self.shape, dtype=torch.bfloat16)
        for expert, (packed, scales) in enumerate(zip(blocks.read(), self.scales.read(), strict=True)):
            values = table[torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).int()]
            unpacked[expert] = torch.ldexp(values, scales.int()[..., None] - BIAS).flatten(-2).mT
        return unpacked


def unpack(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Replace the two tensors of each packed one; others are kept."""
    tensors = dict(stored)
    for name in [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]:
        blocks, scales = tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales", None)
        fits = blocks.dtype == "U8" and len(blocks.shape) == 4 and blocks.shape[-1] == BYTES
        if scales is None or not fits or (scales.dtype, scales.shape) != ("U8", blocks.shape[:-1]):
            raise InteropError(f"{blocks.file}: '{blocks.name}' is not made of blocks of {BYTES} bytes with '_scales'")
        experts, outputs, count, _ = blocks.shape
        shape = (experts, 2 * BYTES * count, outputs)
        tensors[name] = PackedTensor(blocks.file, name, shape, "BF16", blocks.mapped, scales=scales)
    return tensors
