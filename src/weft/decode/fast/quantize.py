"""Weights in 16, 8 or 4 bits: a decoding step reads every weight once, so smaller weights are faster steps.

A weight w of a row is stored as bf16, or as a whole number q with w ≈ scale · q. In 8 bits a row has one scale; in 4
bits every 32 neighbours have their own, and a centre, w ≈ scale · q + centre, as in GGUF's Q4_1. Only weights are
stored so; tables that are looked up, norms and biases stay as they are, and with 4 bits the table that gives the logits
is stored in 8, because every error in it shows.
"""

import torch
from torch import Tensor, nn

from weft.decode.fast.products import PLAIN, Bits, product
from weft.errors import ConfigError, ModelError
from weft.models import heads
from weft.models.base import LanguageModel
from weft.models.transformer import Transformer
from weft.nn.lora import LowRank
from weft.nn.softcap import capped
from weft.progress import bar


class QuantizedLinear(nn.Module):
    """A linear layer with quantized weights: (…, K) → (…, N)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, bits: Bits):
        super().__init__()
        self.product = product(bits, weight)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.product.N)
        return y if self.bias is None else y + self.bias


class QuantizedHead(heads.WordHead):
    """Features to words through a quantized table, which a tied model has beside its embeddings."""

    def __init__(self, head: heads.WordHead, table: Tensor, bits: Bits):
        nn.Module.__init__(self)
        self.scale, self.softcap, self.weight = head.scale, head.softcap, None
        self.words = QuantizedLinear(table, head.bias, bits)

    def forward(self, features: Tensor, table: Tensor, mask: Tensor | None = None) -> Tensor:
        """(batch, time, d_model) → logits (batch, time, vocab_size)."""
        return capped(self.words(self.prepare(features)), self.softcap)


def check_bits(bits: str) -> Bits:
    """`bits` if it names a width."""
    for known in PLAIN:
        if bits == known:
            return known
    raise ConfigError(f"quantize = '{bits}': expected 'bf16', 'int8' or 'int4'")


@torch.no_grad()
def quantize(model: LanguageModel, bits: str) -> LanguageModel:
    """Quantize a Transformer's weights in place, on the device where they are.

    Afterwards the model can write and be evaluated, but not be trained or saved.
    """
    width = check_bits(bits)
    if not isinstance(model, Transformer):
        kind = getattr(model.config, "kind", type(model).__name__)
        raise ModelError(f"a model of kind '{kind}' can't be quantized; Transformers can")
    found = [
        (parent, name, part)
        for parent in model.modules()
        for name, part in parent.named_children()
        if isinstance(part, nn.Linear)
    ]
    with bar("quantizing", len(found)) as advance:
        for parent, name, part in found:
            whole = part.merge() if isinstance(part, LowRank) else part
            setattr(parent, name, QuantizedLinear(whole.weight, whole.bias, width))
            advance(1)
    if type(model.output) is heads.WordHead:
        table = model.embedding.weight if model.output.weight is None else model.output.weight
        model.output = QuantizedHead(model.output, table, "bf16" if width == "bf16" else "int8")
    return model.eval()
