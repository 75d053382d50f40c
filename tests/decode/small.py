"""A small decoder with distinct predictions, and helpers for tests that generate."""

from collections.abc import Sequence

import torch

from weft.decode.config import Sampling
from weft.decode.constrain import Grammar
from weft.decode.engine.blocks import Request
from weft.decode.engine.engine import Engine, EngineLimits
from weft.decode.generate import generate
from weft.decode.prompt import Prompt, Prompts
from weft.decode.text import Completion, gather
from weft.models.base import EncoderInput, LanguageModel
from weft.models.build import build
from weft.models.config import Decoder
from weft.models.transformer import Transformer
from weft.nn.config import Attention, Gated, RMSNorm
from weft.nn.position_config import Rotary
from weft.text.tokenizer import Tokenizer

VOCAB = 40


def decoder(**changes: object) -> Transformer:
    """A LLaMA with two layers of 16, with `changes`; the weights are always the same."""
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
    assert isinstance(model, Transformer)
    with torch.no_grad():  # initial weights give almost uniform logits; make the distribution sharper
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return model


def complete(
    model: LanguageModel,
    tokenizer: Tokenizer,
    texts: Sequence[str | Sequence[int]],
    settings: Sampling | Sequence[Sampling],
    *,
    grammar: Grammar | None = None,
    seeds: Sequence[int] | None = None,
) -> list[Completion]:
    """Continue texts, or ids, in lockstep."""
    prompts = [Prompt.of(tokenizer, text, grammar) for text in texts]
    return gather(generate(model, prompts, settings, seeds=seeds), prompts)


def token_ids(
    model: LanguageModel,
    prompts: Prompts,
    settings: Sampling | Sequence[Sampling],
    *,
    seeds: Sequence[int] | None = None,
    source: EncoderInput | None = None,
) -> list[list[int]]:
    """Continue prompts in lockstep; return the new ids of each."""
    rows: list[list[int]] = [[] for _ in prompts]
    for chunk in generate(model, prompts, settings, seeds=seeds, source=source):
        rows[chunk.row].append(chunk.id)
    return rows


def recompute_greedy(model: LanguageModel, prompt: Sequence[int], count: int, window: int | None = None) -> list[int]:
    """Continue a prompt greedily without a cache; a full window drops its first half."""
    text, start = list(prompt), 0
    for _ in range(count):
        while window is not None and len(text) - start > window:
            start += window // 2
        with torch.no_grad():
            text.append(int(model(torch.tensor([text[start:]]))[0, -1].argmax()))
    return text[len(prompt) :]


class Asking(Engine):
    """An engine that takes strings, or ids, of a tokenizer."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, limits: EngineLimits = EngineLimits()) -> None:  # noqa: B008
        super().__init__(model, tokenizer.vocab_size, limits)
        self.tokenizer = tokenizer

    def ask(self, text: str | Sequence[int] | Prompt, settings: Sampling, seed: int | None = None) -> Request:
        prompt = text if isinstance(text, Prompt) else Prompt.of(self.tokenizer, text)
        return self.submit(prompt, settings, settings.seed if seed is None else seed)

    def run(self) -> None:
        while self.step():
            pass
