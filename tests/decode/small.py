"""A small decoder that makes up its mind, for every test that writes."""

import torch

from weft.models.build import build
from weft.models.config import Decoder
from weft.models.transformer import Transformer
from weft.nn.config import Attention, Gated, RMSNorm, Rotary

VOCAB = 40


def decoder(**changes: object) -> Transformer:
    """LLaMA's parts in two layers of 16, with `changes`; the same weights each time."""
    torch.manual_seed(0)
    config = Decoder(
        vocab_size=VOCAB,
        context=16,
        layers=2,
        d_model=16,
        attention=Attention(heads=2),
        feedforward=Gated(d_ff=32),
        norm=RMSNorm(),
        position=Rotary(),
    ).replace(**changes)
    model = build(config).eval()
    with torch.no_grad():  # fresh weights give almost even logits; make the choices decided ones
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return model
