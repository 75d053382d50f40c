"""Lockstep generation: read the prompts once, then one token of every text at a time.

Rows of a batch are independent: a text follows from its prompt, its seed and its settings, whatever its neighbours are.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from weft.decode.config import Sampling
from weft.decode.fast.cuda_graphs import DeviceSampler
from weft.decode.fast.stepper import Stepper
from weft.decode.prompt import Prompt, check_prompts, choices, context_window
from weft.decode.rules import check_rules
from weft.decode.text import Chunk, Text, adjusted, write
from weft.models.base import LanguageModel, Source, device_of


def generate(
    model: LanguageModel,
    prompts: Sequence[Prompt | Sequence[int]],
    settings: Sampling | Sequence[Sampling],
    seeds: Sequence[int] | None = None,
    source: Source | None = None,
) -> Iterator[Chunk]:
    """Continue `prompts`, of one vocabulary, or lists of ids; chunks come step by step, rows in order within a step.

    Each prompt has settings of its own, or all share one. Row i draws with an rng seeded with seeds[i], by default its
    settings' seed + i. A text ends as `Ending` says. Equal prompts are read once.
    """
    asked = [prompt if isinstance(prompt, Prompt) else Prompt(prompt) for prompt in prompts]
    several = [settings] * len(asked) if isinstance(settings, Sampling) else list(settings)
    assert len(several) == len(asked), "one setting a prompt"
    check_prompts(model, asked)
    check_rules(several, choices(model, asked[0].vocab_size))
    seeds = [each.seed + row for row, each in enumerate(several)] if seeds is None else seeds
    window = context_window(model)
    given = zip(asked, several, seeds, strict=True)
    texts = [Text(prompt, each, window, seed, row) for row, (prompt, each, seed) in enumerate(given)]
    return _steps(model, texts, source)


@torch.inference_mode()  # as a decorator: a `with` would stay in force in the caller, between two chunks
def _steps(model: LanguageModel, texts: list[Text], source: Source | None) -> Iterator[Chunk]:
    size, device = choices(model, texts[0].prompt.vocab_size), device_of(model)
    # rows step together and the cache is as wide as the longest prompt, so the two maxima add up
    limit = max_length([text.prompt for text in texts], max(text.settings.max_tokens for text in texts), model)
    stepper, logits = read_prompts(model, [text.prompt for text in texts], limit, source)
    if stepper.runs_ahead and not any(text.changes_logits or text.settings.logprobs is not None for text in texts):
        yield from run_ahead(stepper, texts, logits, size)
        return
    while True:
        logits = logits[:, :size]
        chunks = write(texts, logits, adjusted(texts, logits))
        yield from chunks
        going = [place for place, chunk in enumerate(chunks) if chunk.finish is None]
        if not going:
            return
        if len(going) < len(texts):
            stepper.reorder(torch.tensor(going, device=device))
            texts = [texts[place] for place in going]
            # forgets nothing: it gives the capacity of the texts that have ended to the others
            stepper.truncate(max(len(text.prompt.ids) + text.written - 1 for text in texts))
        logits = stepper.step(torch.tensor([chunks[place].id for place in going], device=device))


def run_ahead(stepper: Stepper, texts: Sequence[Text], logits: Tensor, vocab_size: int) -> Iterator[Chunk]:
    """The same with steps that choose by themselves; rows that have ended go on unseen until all have."""
    steps = max(text.ending.limit for text in texts)
    settings, rngs = [text.settings for text in texts], [text.rng for text in texts]
    sampler = DeviceSampler(settings, rngs, steps, vocab_size, logits.device)
    going = list(texts)
    for tokens in stepper.run_ahead(logits, sampler, steps):
        chunks = [text.push(tokens[text.row]) for text in going]
        yield from chunks
        going = [text for text, chunk in zip(going, chunks, strict=True) if chunk.finish is None]
        if not going:
            return


def read_prompts(
    model: LanguageModel, prompts: Sequence[Prompt], limit: int, source: Source | None
) -> tuple[Stepper, Tensor]:
    """A stepper that has read the prompts and can grow to `limit`, and logits (B, V) after the last token of each.

    Only these places go through the head, and prompts that are the same are read once.
    """
    device = device_of(model)
    # with a source of its own, each row is read for itself
    keys = [tuple(prompt.ids) if source is None else (row,) for row, prompt in enumerate(prompts)]
    distinct = {key: prompt.ids for key, prompt in zip(keys, prompts, strict=True)}
    rows = list(distinct.values())
    lengths = [len(row) for row in rows]
    longest = max(lengths)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
    last = torch.tensor(lengths, device=device)
    stepper = Stepper(model, len(rows), longest, limit, source)
    features = stepper.read(tokens.to(device), last if min(lengths) < longest else None)
    logits = model.head(features[torch.arange(len(rows), device=device), last - 1].unsqueeze(1))[:, 0]
    if len(rows) < len(prompts):
        place = {key: number for number, key in enumerate(distinct)}
        index = torch.tensor([place[key] for key in keys], device=device)
        stepper.reorder(index)
        logits = logits[index]
    return stepper, logits


def max_length(prompts: Sequence[Prompt], max_tokens: int, model: LanguageModel) -> int:
    """The most tokens that any row can reach."""
    window = context_window(model)
    longest = max(len(prompt.ids) for prompt in prompts) + max_tokens
    return longest if window is None else min(longest, window)
