"""Stack of Transformer blocks, as encoder or decoder."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.models.config import Encoder, TransformerConfig
from weft.nn import norm, position
from weft.nn.block import Block
from weft.nn.cache import Past
from weft.nn.dropout import Dropout, RowRng
from weft.nn.linear import Linear
from weft.nn.mask import AttentionMask, Mask
from weft.nn.position import Position

SourceCache = list[tuple[Tensor, Tensor]]  # keys and values of the source, per layer
MaskedSource = tuple[SourceCache, AttentionMask]


class Stack(nn.Module):
    """Blocks between embedded tokens and features, with positions, and a last norm unless the blocks end in one."""

    def __init__(self, settings: TransformerConfig, layers: int, *, causal: bool, cross: bool):
        super().__init__()
        d_model, sizes = settings.d_model, settings.sizes(layers, causal)
        self.causal = causal
        self.windows = [kind.reach for kind in settings.kinds(causal)]
        self.chunks = [kind.chunk for kind in settings.kinds(causal)]
        self.position = position.build(settings.position, sizes)
        # position encodings of kinds of layers, by their index in the pattern
        kinds = {str(index): kind.position for index, kind in enumerate(settings.pattern) if kind.position is not None}
        self.positions = nn.ModuleDict({index: position.build(kind, sizes) for index, kind in kinds.items()})
        self.embedding_norm = norm.build(settings.norm, settings.added_width) if settings.embedding_norm else None
        self.dropout = Dropout(settings.dropout)
        self.narrow = isinstance(settings, Encoder)  # positions are as wide as the embeddings, not as d_model
        self.projection = Linear(settings.width, d_model, bias=self.narrow) if settings.factorised else None
        self.sharing = settings.sharing
        self.blocks = nn.ModuleList(
            Block(
                settings,
                cross,
                layer=n * self.sharing,
                kind=n % len(self.windows),
                has_norm=settings.first_norm or n > 0,
                has_globals=settings.attention.global_tokens is not None and not causal,
            )
            for n in range(layers // self.sharing)
        )
        self.norm = norm.build(settings.norm, d_model) if settings.last_norm else None
        self.context: Past | None = None  # set by context parallelism: gathers the keys and values of whole rows
        self.recompute = False  # activation checkpointing of every block

    @property
    def layers(self) -> list[nn.Module]:
        """Block of each layer, from the first; consecutive layers may share one."""
        return [block for block in self.blocks for _ in range(self.sharing)]

    def position_of(self, kind: int) -> Position:
        """Position encoding of a kind of layer."""
        own = str(kind) in self.positions
        return self.positions[str(kind)] if own else self.position  # type: ignore[return-value]

    @property
    def switches(self) -> list[int]:
        """Lengths above which a text has other rotation angles, ascending."""
        return sorted({used.switch for used in (self.position, *self.positions.values()) if used.switch})  # type: ignore[misc]

    def masks(
        self, mask: Mask, queries: Tensor, keys: Tensor, *, dtype: torch.dtype, lengths: Tensor | None = None
    ) -> list[AttentionMask]:
        """Mask for every kind of layer, with its window and position encoding.

        queries (batch or 1, time) and keys (batch or 1, source time) are positions. Angles have this `dtype`; with
        `lengths` (batch,), they are those of texts of these lengths.
        """
        masks = []
        for index, (window, chunk) in enumerate(zip(self.windows, self.chunks, strict=True)):
            used = self.position_of(index)
            by_row = lengths is not None and used.switch is not None
            angles = used.angles(queries, lengths if by_row else keys.shape[1], dtype)  # type: ignore[arg-type]
            chunks = None if chunk is None else (queries // chunk, keys // chunk)
            limited = replace(mask, window=window, chunks=chunks)
            masks.append(AttentionMask(limited, used, queries, keys=keys, angles=angles))
        return masks

    def begin(self, x: Tensor, positions: Tensor, rng: RowRng | None) -> Tensor:
        """Embedded tokens (batch, time, width) → input of the first layer, (batch, time, d_model)."""
        x = x if self.projection is None or self.narrow else self.projection(x)
        x = self.position.embed(x, positions)
        x = self.dropout(_residual_dtype(x if self.embedding_norm is None else self.embedding_norm(x)), rng)
        return self.projection(x) if self.projection is not None and self.narrow else x

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None,
        masks: Sequence[AttentionMask],
        *,
        past: Sequence[Past | None] | None = None,
        source: MaskedSource | None = None,
        rng: RowRng | None = None,
        routing: list[Tensor] | None = None,
    ) -> Tensor:
        """x (batch, time, width) at `positions` → (batch, time, d_model); without positions, x are hidden states.
        `masks` has one mask per kind of layer, `past` one element per layer. Routers append to `routing`."""
        x = _residual_dtype(x) if positions is None else self.begin(x, positions, rng)
        recomputes = self.recompute and torch.is_grad_enabled()
        if recomputes:
            for mask in (*masks, *([] if source is None else [source[1]])):
                mask.prepare()
        for layer, block in enumerate(self.layers):
            arguments: dict[str, Any] = {
                "mask": masks[block.kind],  # type: ignore[call-overload]
                "past": past[layer] if past else None,
                "source": None if source is None else (source[0][layer], source[1]),
                "rng": None if rng is None else rng.for_repeat(layer % self.sharing),
            }
            if recomputes:
                x, *sums = checkpoint(_collecting, block, x, arguments, use_reentrant=False)
                if routing is not None:
                    routing += sums
            else:
                x = block(x, **arguments, routing=routing)
        return x if self.norm is None else self.norm(x)


def _collecting(block: nn.Module, x: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """Output of a block, and the sums of its router if it has one. When the backward pass computes them again, they are
    added to no list of the step."""
    routing: list[Tensor] = []
    return block(x, **arguments, routing=routing), *routing


def _residual_dtype(x: Tensor) -> Tensor:
    """x as bf16 under bf16 autocast, which halves the residual stream; fp16 would overflow in it."""
    device = x.device.type
    narrow = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
    return x.bfloat16() if narrow else x
