"""A small decoder with distinct predictions, and helpers for tests that generate."""

from collections.abc import Sequence

import numpy as np
import torch
from tests.decode.fast.helpers import build_transformer, sharpen

from weft.decode.config import Sampling
from weft.decode.constrain import Grammar
from weft.decode.engine.blocks import Request
from weft.decode.engine.engine import Engine, EngineLimits
from weft.decode.generate import generate
from weft.decode.prompt import Prompt, Prompts
from weft.decode.text import Completion, gather
from weft.models.base import EncoderInput, LanguageModel
from weft.models.config import NGram
from weft.models.ngram import NGram as NGramModel
from weft.models.presets import llama
from weft.models.transformer import Transformer
from weft.text.tokenizer import Tokenizer

VOCAB = 40


def decoder(**changes: object) -> Transformer:
    """A LLaMA with two layers of 16, with `changes`; the weights are always the same."""
    config = llama(2, 16, 2, d_ff=32, context=16, vocab_size=VOCAB, tied=True)
    return sharpen(build_transformer(config.replace(**changes)))


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


@torch.no_grad()
def recompute_greedy(
    model: LanguageModel, prompt: Sequence[int], count: int, window: int | None = None, *, banned: Sequence[int] = ()
) -> list[int]:
    """Continue a prompt greedily without a cache; a full window drops its first half."""
    text, start = list(prompt), 0
    for _ in range(count):
        while window is not None and len(text) - start > window:
            start += window // 2
        logits = model(torch.tensor([text[start:]]))[0, -1]
        logits[list(banned)] = -torch.inf
        text.append(int(logits.argmax()))
    return text[len(prompt) :]


def ngram_model(vocab_size: int, seed: int = 0, **changes: object) -> LanguageModel:
    """A trigram model of random tokens."""
    model = NGramModel(NGram(vocab_size=vocab_size, order=3).replace(**changes))
    model.fit(np.random.default_rng(seed).integers(0, vocab_size, 400))
    return model.eval()


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
