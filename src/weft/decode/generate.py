"""Texts that continue prompts: in lockstep, one token of every text at a time, or by the engine where that is faster.

Rows of a batch are independent: a text follows from its prompt, its seed and its settings, whatever its neighbours are.
When the model's window is full, the last part of each text is read again and writing goes on from there.
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
from weft.decode.prompt import Prompt, Prompts, check_prompts, choices, context_window
from weft.decode.text import Chunk, Completion, Text, adjusted, gather, write
from weft.errors import ModelError
from weft.models.base import EncoderInput, LanguageModel, device_of
from weft.models.transformer import Transformer

MAX_ENGINE_ROWS = 256  # texts that the engine writes at a time
BLOCK_SIZE = 16
MIN_ENGINE_TEXTS = 32  # in one batch, from which on the engine is faster
MAX_ENGINE_LENGTH = 1 << 16  # tokens of a text, which the engine has to hold as a whole


def generate(
    model: LanguageModel,
    prompts: Prompts,
    settings: Sampling | Sequence[Sampling],
    seeds: Sequence[int] | None = None,
    source: EncoderInput | None = None,
) -> Iterator[Chunk]:
    """Continue `prompts`, of one vocabulary, or lists of ids; chunks come step by step, rows in order within a step.

    Each prompt has settings of its own, or all share one. Row i draws with an rng seeded with seeds[i], by default its
    settings' seed + i. A text ends as `Ending` says; one that is written from a source never slides: that belongs to
    its beginning. Equal prompts are read once.
    """
    asked = [prompt if isinstance(prompt, Prompt) else Prompt(prompt) for prompt in prompts]
    several = [settings] * len(asked) if isinstance(settings, Sampling) else list(settings)
    several = several if source is None else [each.model_copy(update={"slide": False}) for each in several]
    check_prompts(model, asked, several)
    seeds = [each.seed + row for row, each in enumerate(several)] if seeds is None else seeds
    window = context_window(model)
    given = enumerate(zip(asked, several, seeds, strict=True))
    return _steps(model, [Text(prompt, each, window, seed, row) for row, (prompt, each, seed) in given], source)


Writing = Generator[Chunk, None, list[Text]]  # chunks; then the texts that go on, of which one has to slide


@torch.inference_mode()  # as a decorator: a `with` would stay in force in the caller, between two chunks
def _steps(model: LanguageModel, texts: list[Text], source: EncoderInput | None) -> Iterator[Chunk]:
    while texts:
        for text in texts:
            if text.full:
                text.slide()
        texts = yield from _until_full(model, texts, source)


def _until_full(model: LanguageModel, texts: list[Text], source: EncoderInput | None) -> Writing:
    """Read the texts, and write until all have ended or one no longer fits into the window."""
    size, device = choices(model, texts[0].prompt.vocab_size), device_of(model)
    # rows step together and the cache is as wide as the longest text, so the two maxima add up
    most = max(text.settings.max_tokens - text.written for text in texts)
    ids = [text.ids for text in texts]
    stepper, logits = read_prompts(model, ids, max_length(ids, most, model), source)
    if stepper.runs_ahead and not any(text.needs_host for text in texts):
        return (yield from _run_ahead(stepper, texts, logits, size))
    while True:
        logits = logits[:, :size]
        chunks = write(texts, logits, adjusted(texts, logits), model.agree)
        yield from chunks
        going = [place for place, chunk in enumerate(chunks) if chunk.finish is None]
        ended = len(going) < len(texts)
        texts = [texts[place] for place in going] if ended else texts
        if not texts or any(text.full for text in texts):
            return texts
        if ended:
            stepper.reorder(torch.tensor(going, device=device))
            # forgets nothing: it gives the capacity of the texts that have ended to the others
            stepper.truncate(max(len(text.ids) - 1 for text in texts))
        logits = stepper.step(torch.tensor([chunks[place].id for place in going], device=device))


def _run_ahead(stepper: Stepper, texts: Sequence[Text], logits: Tensor, vocab_size: int) -> Writing:
    """The same with steps that choose by themselves; rows that have ended go on unseen until all have."""
    steps = min([max(text.left for text in texts), *(text.until_full for text in texts if text.until_full < text.left)])
    settings, rngs = [text.settings for text in texts], [text.rng for text in texts]
    sampler = DeviceSampler(settings, rngs, steps=steps, vocab_size=vocab_size, device=logits.device)
    going = list(enumerate(texts))
    for tokens in stepper.run_ahead(logits, sampler, steps):
        chunks = [text.push(tokens[place]) for place, text in going]
        yield from chunks
        going = [each for each, chunk in zip(going, chunks, strict=True) if chunk.finish is None]
        if not going:
            break
    return [text for _, text in going]


def read_prompts(
    model: LanguageModel, prompts: Sequence[Sequence[int]], limit: int, source: EncoderInput | None
) -> tuple[Stepper, Tensor]:
    """A stepper that has read the prompts' ids and can grow to `limit`, and logits (B, V) after the last token of each.
    Only these places go through the head, and prompts that are the same are read once."""
    device = device_of(model)
    # with a source of its own, each row is read for itself
    keys = [tuple(ids) if source is None else (row,) for row, ids in enumerate(prompts)]
    distinct = dict(zip(keys, prompts, strict=True))
    rows = [torch.tensor(ids) for ids in distinct.values()]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths, longest = [len(row) for row in rows], tokens.shape[1]
    last = torch.tensor(lengths, device=device)
    stepper = Stepper(model, len(rows), prompt_tokens=longest, limit=limit, source=source)
    if longest == 1 and device.type == "cpu":
        logits = stepper.step(tokens[:, 0])  # as in every step after it
    else:
        features = stepper.read(tokens.to(device), last if min(lengths) < longest else None)
        logits = model.head(features[torch.arange(len(rows), device=device), last - 1].unsqueeze(1))[:, 0]
    if len(rows) < len(prompts):
        place = {key: number for number, key in enumerate(distinct)}
        index = torch.tensor([place[key] for key in keys], device=device)
        stepper.reorder(index)
        logits = logits[index]
    return stepper, logits


def max_length(prompts: Sequence[Sequence[int]], max_tokens: int, model: LanguageModel) -> int:
    """The most tokens of any row that are read together."""
    longest, window = max(map(len, prompts)) + max_tokens, context_window(model)
    return longest if window is None else min(longest, window)


def complete(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    settings: Sampling,
    seeds: Sequence[int] | None = None,
    source: EncoderInput | None = None,
) -> list[Completion]:
    """Continue `prompts` and return the new text of each, without the prompts. No prompts give no texts. The text of
    prompt i is drawn with seeds[i], by default the settings' seed + i."""
    if not prompts:
        return []
    if source is not None:
        return gather(generate(model, prompts, settings, seeds, source), prompts)
    seeds = [settings.seed + row for row in range(len(prompts))] if seeds is None else seeds
    return list(completions(model, prompts, settings, seeds, len(prompts)))


def completions(
    model: LanguageModel, prompts: Sequence[Prompt], settings: Sampling, seeds: Sequence[int], rows: int
) -> Iterator[Completion]:
    """The new text of each prompt, in their order, as soon as it is there; at most `rows` are written at a time."""
    if not engine_is_faster(model, prompts, settings, rows):
        for first in range(0, len(prompts), rows):
            some = prompts[first : first + rows]
            yield from gather(generate(model, some, settings, seeds[first : first + rows]), some)
    else:
        yield from by_engine(model, prompts, settings, seeds, EngineLimits(rows=rows))


def by_engine(
    model: LanguageModel, prompts: Sequence[Prompt], settings: Sampling, seeds: Sequence[int], limits: EngineLimits
) -> Iterator[Completion]:
    """The same by the engine, which alone keeps keys and values in fewer bits; it has blocks for these texts."""
    ids, rows = [prompt.ids for prompt in prompts], min(limits.rows, MAX_ENGINE_ROWS)
    longest = max_length(ids, settings.max_tokens, model)
    check_small_cache(model, longest)
    assert isinstance(model, Transformer)
    # before any of them is written, and with their numbers
    check_prompts(model, prompts, [settings] * len(prompts))
    usual = max_length(ids, min(settings.max_tokens, FIRST_CAPACITY), model)
    blocks = max(-(-longest // BLOCK_SIZE), min(rows, len(prompts)) * -(-usual // BLOCK_SIZE))
    held = EngineLimits(blocks, BLOCK_SIZE, rows, bits=limits.bits)
    engine = Engine(model, choices(model, prompts[0].vocab_size), held)
    requests = [engine.submit(prompt, settings, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    for request in requests:
        while not request.ended:
            engine.step()
        yield request.completion()


def engine_is_faster(model: LanguageModel, prompts: Sequence[Prompt], settings: Sampling, rows: int) -> bool:
    """Whether the engine writes these texts, `rows` at a time, faster than lockstep batches of them.

    Measured with `benchmarks/engine.py`: it is where prompts of unequal length are many. Lockstep pads them, can't take
    the CPU fast path for them, and has fewer and fewer rows while the last texts of a batch end; the engine lets the
    next ones in. Lockstep is faster where prompts are of one length, or few, and for recurrent and n-gram models, which
    have nothing to page. A text that may grow very long is left to lockstep as well, whose capacity grows with it.
    """
    ids, many = [prompt.ids for prompt in prompts], len(prompts) > rows or len(prompts) >= MIN_ENGINE_TEXTS
    longest = max_length(ids, settings.max_tokens, model)
    return many and len(set(map(len, ids))) > 1 and engine_can_hold(model, longest)


def engine_can_hold(model: LanguageModel, longest: int) -> TypeGuard[Transformer]:
    """Whether the engine can write texts of up to `longest` tokens with a model: a decoder in one piece, whose
    positions stay as they are while a text grows, since a block holds what was read by one angle."""
    if not isinstance(model, Transformer) or model.encoder is not None or model.shards > 1:
        return False
    return longest <= MAX_ENGINE_LENGTH and not positions_change(model, longest)


def check_small_cache(model: LanguageModel, longest: int) -> None:
    """Refuse fewer bits for keys and values where the engine, which alone has them, can't write such texts."""
    if not engine_can_hold(model, longest):
        able = f"a decoder in one piece can, for texts of up to {MAX_ENGINE_LENGTH:,} tokens"
        raise ModelError(f"quantize_cache: this model can't keep {longest:,} tokens in fewer bits; {able}")
