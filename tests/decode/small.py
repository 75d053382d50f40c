"""A small decoder that makes up its mind, for every test that writes."""

from collections.abc import Sequence
from typing import Any

import torch

from weft.decode.config import Sampling
from weft.decode.engine.blocks import Request
from weft.decode.engine.engine import Engine, EngineLimits
from weft.decode.generate import generate
from weft.decode.prompt import Prompt
from weft.decode.text import Completion, gather
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.config import Decoder
from weft.models.transformer import Transformer
from weft.nn.config import Attention, Gated, RMSNorm
from weft.nn.position_config import Rotary
from weft.text.tokenizer import Tokenizer

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


def complete(
    model: LanguageModel,
    tokenizer: Tokenizer,
    texts: Sequence[str | Sequence[int]],
    settings: Sampling | Sequence[Sampling],
    **more: Any,
) -> list[Completion]:
    """What lockstep generation makes of texts, or ids, that keep to a `grammar`; `more` as `generate` takes it."""
    grammar = more.pop("grammar", None)
    prompts = [Prompt.of(tokenizer, text, grammar) for text in texts]
    return gather(generate(model, prompts, settings, **more), prompts)


class Asking(Engine):
    """An engine that is asked for texts after strings, or ids, of a tokenizer."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, limits: EngineLimits = EngineLimits()) -> None:  # noqa: B008
        super().__init__(model, tokenizer.vocab_size, limits)
        self.tokenizer = tokenizer

    def ask(self, text: str | Sequence[int] | Prompt, settings: Sampling, seed: int | None = None) -> Request:
        prompt = text if isinstance(text, Prompt) else Prompt.of(self.tokenizer, text)
        return self.submit(prompt, settings, settings.seed if seed is None else seed)

    def run(self) -> None:
        while self.step():
            pass
