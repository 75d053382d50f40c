"""Sampling from a model: continue prompts in lockstep, one token of every text per step, or by the engine.

Rows of a batch are independent: a text depends on its prompt, seed and settings only. When the model's window is full,
the last part of each text is read again and generation continues from there.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from weft.decode.config import Sampling
from weft.decode.engine.engine import Engine, EngineLimits
from weft.decode.fast.cuda_graphs import DeviceSampler
from weft.decode.fast.path import positions_change
from weft.decode.fast.stepper import FIRST_CAPACITY, Stepper
from weft.decode.prompt import Prompt, Prompts, as_prompts, check_prompts, context_window, output_vocab_size
from weft.decode.text import Chunk, Completion, GeneratedText, adjust_logits, extend_texts, gather
from weft.errors import ModelError
from weft.models.base import EncoderInput, LanguageModel, device_of, read_in_steps
from weft.models.transformer import Transformer
from weft.progress import pause

MAX_ENGINE_ROWS = 256  # texts that the engine generates at a time
BLOCK_SIZE = 16  # tokens per KV block
MIN_ENGINE_TEXTS = 32  # in one batch; below this, lockstep is faster
MAX_ENGINE_LENGTH = 1 << 16  # tokens of prompt and text, all of which the engine keeps in KV blocks


def generate(
    model: LanguageModel,
    prompts: Prompts,
    settings: Sampling | Sequence[Sampling],
    *,
    seeds: Sequence[int] | None = None,
    source: EncoderInput | None = None,
) -> Iterator[Chunk]:
    """Continue prompts, or lists of ids, of one vocabulary; yield chunks step by step, rows in order within a step.

    All prompts share the settings, or each has its own. Row i draws with seeds[i], by default its settings' seed + i.
    `StopCondition` decides when a text ends; with a `source`, a text never slides. Equal prompts are read once.
    """
    checked = as_prompts(prompts)
    rows = [settings] * len(checked) if isinstance(settings, Sampling) else list(settings)
    rows = rows if source is None else [each.model_copy(update={"slide": False}) for each in rows]
    check_prompts(model, checked, rows)
    seeds = [each.seed + row for row, each in enumerate(rows)] if seeds is None else seeds
    window = context_window(model)
    texts = [
        GeneratedText(prompt, each, window, seed=seed, row=row)
        for row, (prompt, each, seed) in enumerate(zip(checked, rows, seeds, strict=True))
    ]
    return _generate(model, texts, source)


Chunks = Generator[Chunk, None, list[GeneratedText]]  # yields chunks, returns the unfinished texts


@torch.inference_mode()  # as a decorator: a `with` would stay in force in the caller, between two chunks
def _generate(model: LanguageModel, texts: list[GeneratedText], source: EncoderInput | None) -> Iterator[Chunk]:
    while texts:
        for text in texts:
            if text.full:
                text.slide()
        texts = yield from _until_full(model, texts, source)


def _until_full(model: LanguageModel, texts: list[GeneratedText], source: EncoderInput | None) -> Chunks:
    """Prefill the texts and generate until all have ended or one exceeds the window."""
    vocab_size, device = output_vocab_size(model, texts[0].prompt.vocab_size), device_of(model)
    # rows step together and the cache is as wide as the longest text, so the two maxima add up
    max_tokens = max(text.settings.max_tokens - text.written for text in texts)
    ids = [text.ids for text in texts]
    stepper, logits = prefill(model, ids, max_length(ids, max_tokens, model), source=source)
    if stepper.runs_ahead and not any(text.needs_host for text in texts):
        return (yield from _run_ahead(stepper, texts, logits, vocab_size=vocab_size))
    while True:
        logits = logits[:, :vocab_size]
        chunks = extend_texts(texts, logits, adjust_logits(texts, logits), agree=model.agree)
        yield from chunks
        pause()
        live = [row for row, chunk in enumerate(chunks) if chunk.finish is None]
        ended = len(live) < len(texts)
        texts = [texts[row] for row in live] if ended else texts
        if not texts or any(text.full for text in texts):
            return texts
        if ended:
            stepper.reorder(torch.tensor(live, device=device))
            # drops no token: it frees the capacity of the texts that have ended for the others
            stepper.truncate(max(len(text.ids) - 1 for text in texts))
        logits = stepper.step(torch.tensor([chunks[row].id for row in live], device=device))


def _run_ahead(stepper: Stepper, texts: Sequence[GeneratedText], logits: Tensor, *, vocab_size: int) -> Chunks:
    """Generate with tokens chosen on the device; rows that have ended continue, unseen, until all have."""
    steps = min([max(text.left for text in texts), *(text.until_full for text in texts if text.until_full < text.left)])
    settings, rngs = [text.settings for text in texts], [text.rng for text in texts]
    sampler = DeviceSampler(settings, rngs, steps, vocab_size=vocab_size, device=logits.device)
    live = list(enumerate(texts))
    for tokens in stepper.run_ahead(logits, sampler, steps):
        chunks = [text.push(tokens[row]) for row, text in live]
        yield from chunks
        pause()
        live = [each for each, chunk in zip(live, chunks, strict=True) if chunk.finish is None]
        if not live:
            break
    return [text for _, text in live]


def prefill(
    model: LanguageModel, prompts: Sequence[Sequence[int]], limit: int, *, source: EncoderInput | None
) -> tuple[Stepper, Tensor]:
    """Return a stepper that has read the prompts and can grow to `limit` tokens, and logits (B, V) after each prompt.

    The LM head computes the last positions only. Equal prompts are read once, unless rows have different sources.
    """
    device = device_of(model)
    keys = [tuple(ids) if source is None else (row,) for row, ids in enumerate(prompts)]
    distinct = dict(zip(keys, prompts, strict=True))
    rows = [torch.tensor(ids) for ids in distinct.values()]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths, longest = [len(row) for row in rows], tokens.shape[1]
    last = torch.tensor(lengths, device=device)
    stepper = Stepper(model, len(rows), longest, limit=limit, source=source)
    if longest == 1 and device.type == "cpu":
        logits = stepper.step(tokens[:, 0])  # the same kernels as in every later step
    else:
        features, ragged = torch.empty(0), min(lengths) < longest
        for part in read_in_steps(model, longest, len(rows)):
            size, rest = part.stop - part.start, (last - part.start).clamp(min=0)
            read = stepper.read(tokens[:, part].to(device), rest.clamp(max=size) if ragged else None)
            read = read[torch.arange(len(rows), device=device), rest.clamp(1, size) - 1]
            features = torch.where((rest > 0).view(-1, *[1] * (read.dim() - 1)), read, features) if part.start else read
        logits = model.head(features.unsqueeze(1))[:, 0]
    if len(rows) < len(prompts):
        row_of = {key: row for row, key in enumerate(distinct)}
        index = torch.tensor([row_of[key] for key in keys], device=device)
        stepper.reorder(index)
        logits = logits[index]
    return stepper, logits


def max_length(prompts: Sequence[Sequence[int]], max_tokens: int, model: LanguageModel) -> int:
    """Return the maximum number of tokens that a row can hold: prompt and text, or the window if that is smaller."""
    longest, window = max(map(len, prompts)) + max_tokens, context_window(model)
    return longest if window is None else min(longest, window)


def complete(
    model: LanguageModel, prompts: Sequence[Prompt], settings: Sampling, *, source: EncoderInput | None = None
) -> list[Completion]:
    """Continue prompts and return the new text of each; prompt i draws with settings.seed + i."""
    if not prompts:
        return []
    if source is not None:
        return gather(generate(model, prompts, settings, source=source), prompts)
    seeds = range(settings.seed, settings.seed + len(prompts))
    return list(completions(model, prompts, settings, seeds=seeds, rows=len(prompts)))


def completions(
    model: LanguageModel, prompts: Sequence[Prompt], settings: Sampling, *, seeds: Sequence[int], rows: int
) -> Iterator[Completion]:
    """Yield the new text of each prompt, in order, as soon as it is complete; `rows` are generated at a time."""
    if engine_is_faster(model, prompts, settings, rows=rows):
        yield from engine_completions(model, prompts, settings, seeds=seeds, limits=EngineLimits(rows=rows))
        return
    for first in range(0, len(prompts), rows):
        batch = prompts[first : first + rows]
        yield from gather(generate(model, batch, settings, seeds=seeds[first : first + rows]), batch)


def engine_completions(
    model: LanguageModel, prompts: Sequence[Prompt], settings: Sampling, *, seeds: Sequence[int], limits: EngineLimits
) -> Iterator[Completion]:
    """Yield the new text of each prompt, in order, with an engine that has KV blocks for these texts.

    Only `rows` and `bits` of the limits are used. Only the engine can quantise the KV cache.
    """
    ids, rows = [prompt.ids for prompt in prompts], min(limits.rows, MAX_ENGINE_ROWS)
    longest = max_length(ids, settings.max_tokens, model)
    check_quantized_cache(model, longest)
    assert isinstance(model, Transformer)
    # all of them, before any text is generated, so that errors have the prompts' numbers
    check_prompts(model, prompts, [settings] * len(prompts))
    typical = max_length(ids, min(settings.max_tokens, FIRST_CAPACITY), model)
    blocks = max(-(-longest // BLOCK_SIZE), min(rows, len(prompts)) * -(-typical // BLOCK_SIZE))
    sized = EngineLimits(blocks=blocks, block_size=BLOCK_SIZE, rows=rows, bits=limits.bits)
    engine = Engine(model, output_vocab_size(model, prompts[0].vocab_size), sized)
    requests = [engine.submit(prompt, settings, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    for request in requests:
        while not request.ended:
            engine.step()
        yield request.completion()


def engine_is_faster(model: LanguageModel, prompts: Sequence[Prompt], settings: Sampling, *, rows: int) -> bool:
    """Return whether the engine generates these texts, `rows` at a time, faster than lockstep batches do.

    It is faster for many prompts of different lengths (measured with `benchmarks/engine.py`): lockstep pads them, can't
    use the CPU fast path, and its batch shrinks while the last texts end, whereas the engine admits the next ones.
    Lockstep is faster for few prompts, for prompts of one length, and for recurrent and n-gram models, which have no KV
    cache. It also takes texts that may grow very long, since its cache grows with them.
    """
    ids, many = [prompt.ids for prompt in prompts], len(prompts) > rows or len(prompts) >= MIN_ENGINE_TEXTS
    longest = max_length(ids, settings.max_tokens, model)
    return many and len(set(map(len, ids))) > 1 and engine_supports(model, longest)


def engine_supports(model: LanguageModel, longest: int) -> TypeGuard[Transformer]:
    """Return whether the engine can generate texts of `longest` tokens with a model.

    It needs a decoder-only Transformer that isn't sharded and whose position encoding doesn't change while a text
    grows: keys in a KV block stay as they were rotated.
    """
    if not isinstance(model, Transformer) or model.encoder is not None or model.shards > 1:
        return False
    return longest <= MAX_ENGINE_LENGTH and not positions_change(model, longest)


def check_quantized_cache(model: LanguageModel, longest: int) -> None:
    """Refuse a quantised KV cache where the engine, which implements it, doesn't support the model."""
    if not engine_supports(model, longest):
        supported = f"a decoder that isn't sharded can, for texts of up to {MAX_ENGINE_LENGTH:,} tokens"
        raise ModelError(f"quantize_cache: this model can't keep {longest:,} tokens in fewer bits; {supported}")
