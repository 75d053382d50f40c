"""Small numbers as they are kept in files; weft's own kernels multiply by them, whole numbers `in_bands`."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from weft.decode.fast.rounding import GROUP, Groups

Bits = Literal["bf16", "int8", "int4"]
DTYPES: dict[Bits, torch.dtype] = {"bf16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}


def layout(bits: Bits, K: int) -> tuple[Bits, int]:
    """The width that rows of K numbers are kept in, and how many scales each has; an odd K has no 4 bits."""
    if bits != "int4" or K % 2:
        return "int8" if bits == "int4" else bits, 1
    return "int4", K // GROUP if K % GROUP == 0 else 1


class Packed(NamedTuple):
    """A matrix (N, K) of small numbers.

    numbers: bf16 (N, K), int8 (N, K), or for 4 bits uint8 (N, K/2), counted from −8 up: of each group the first half is
    in the lower halves of its bytes, the second in the upper. scales: float32 (N, 1) for 8 bits, bf16 (N, groups) for
    4. centres: float32 (N, groups), or none.
    """

    numbers: Tensor
    scales: Tensor | None = None
    centres: Tensor | None = None

    @classmethod
    def of(cls, rounded: Groups, bits: Bits) -> "Packed":
        """What was rounded to so many bits."""
        numbers, scales, centres = rounded
        if bits == "bf16":
            return cls(numbers.contiguous())
        if bits == "int8":
            return cls(numbers.contiguous(), scales.float().contiguous())
        N, groups = scales.shape
        codes = (numbers + 8).to(torch.uint8).view(N, groups, 2, -1)
        both = (codes[:, :, 0] | (codes[:, :, 1] << 4)).flatten(1)
        return cls(both, scales.bfloat16().contiguous(), None if centres is None else centres.float().contiguous())

    def unpack(self) -> Groups:
        """The numbers, one by one."""
        if self.scales is None:
            return Groups(self.numbers, torch.ones(len(self.numbers), 1, device=self.numbers.device))
        if self.bits == "int8":
            return Groups(self.numbers, self.scales)
        halves = self.numbers.unflatten(1, (self.scales.shape[1], -1))
        codes = torch.stack((halves & 15, halves >> 4), dim=2).flatten(1)
        return Groups(codes.to(torch.int8) - 8, self.scales.float(), self.centres)

    @property
    def bits(self) -> Bits:
        """How many each number has."""
        return next(bits for bits, dtype in DTYPES.items() if dtype == self.numbers.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        N, width = self.numbers.shape
        return N, width * 2 if self.bits == "int4" else width

    @property
    def groups(self) -> int:
        """How many scales a row has."""
        return 1 if self.scales is None else self.scales.shape[1]

    def is_for(self, bits: Bits, N: int, K: int) -> bool:
        """Whether it is what (N, K) weights become: kernels read as much as that, whatever there is."""
        kept, groups = layout(bits, K)
        wanted = {"numbers": ((N, K // 2 if kept == "int4" else K), DTYPES[kept])}
        if kept != "bf16":
            wanted["scales"] = ((N, groups), torch.float32 if kept == "int8" else torch.bfloat16)
        if kept == "int4" and self.centres is not None:
            wanted["centres"] = ((N, groups), torch.float32)
        found = {name: tensor for name, tensor in self._asdict().items() if tensor is not None}
        return {name: (tuple(each.shape), each.dtype) for name, each in found.items()} == wanted and all(
            each.is_contiguous() for each in found.values()
        )
