"""Many texts, written whole: in lockstep batches or by the engine, whichever is faster."""

from collections.abc import Iterator, Sequence

from weft.decode.config import Sampling
from weft.decode.engine.engine import Engine, Limits
from weft.decode.fast.stepper import FIRST_CAPACITY
from weft.decode.generate import generate, max_length
from weft.decode.prompt import Prompt, check_prompts, choices
from weft.decode.text import Completion, gather
from weft.models.base import LanguageModel, Source
from weft.models.transformer import Transformer

MAX_ENGINE_ROWS = 256  # texts that the engine writes at a time
BLOCK_SIZE = 16
MIN_ENGINE_TEXTS = 32  # in one batch, from which on the engine is faster
MAX_ENGINE_LENGTH = 1 << 16  # tokens of a text, which the engine has to hold as a whole


def complete(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    settings: Sampling,
    seeds: Sequence[int] | None = None,
    source: Source | None = None,
) -> list[Completion]:
    """Continue `prompts` and return the new text of each, without the prompts. No prompts give no texts.

    The text of prompt i is drawn with seeds[i], by default the settings' seed + i.
    """
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
    if engine_is_faster(model, prompts, settings, rows):
        yield from _by_engine(model, prompts, settings, seeds, min(rows, MAX_ENGINE_ROWS))
        return
    for first in range(0, len(prompts), rows):
        some = prompts[first : first + rows]
        yield from gather(generate(model, some, settings, seeds[first : first + rows]), some)


def engine_is_faster(model: LanguageModel, prompts: Sequence[Prompt], settings: Sampling, rows: int) -> bool:
    """Whether the engine writes these texts, `rows` at a time, faster than lockstep batches of them.

    Measured with `benchmarks/engine.py`: it is where prompts of unequal length are many. Lockstep pads them, can't take
    the CPU fast path for them, and has fewer and fewer rows while the last texts of a batch end; the engine lets the
    next ones in. Lockstep is faster where prompts are of one length, or few, and for recurrent and n-gram models, which
    have nothing to page. A text that may grow very long is left to lockstep as well, whose capacity grows with it; so
    are those of a model in parts, as the engine's blocks hold all heads.
    """
    if not isinstance(model, Transformer) or model.encoder is not None:
        return False
    if model.parts > 1:
        return False
    many = len(prompts) > rows or len(prompts) >= MIN_ENGINE_TEXTS
    unequal = len({len(prompt.ids) for prompt in prompts}) > 1
    ids = [prompt.ids for prompt in prompts]
    return many and unequal and max_length(ids, settings.max_tokens, model) <= MAX_ENGINE_LENGTH


def _by_engine(
    model: LanguageModel, prompts: Sequence[Prompt], settings: Sampling, seeds: Sequence[int], rows: int
) -> Iterator[Completion]:
    assert isinstance(model, Transformer)
    # before any of them is written, and with their numbers
    check_prompts(model, prompts, [settings] * len(prompts))
    ids = [prompt.ids for prompt in prompts]
    longest = max_length(ids, settings.max_tokens, model)
    usual = max_length(ids, min(settings.max_tokens, FIRST_CAPACITY), model)
    blocks = max(-(-longest // BLOCK_SIZE), min(rows, len(prompts)) * -(-usual // BLOCK_SIZE))
    engine = Engine(model, choices(model, prompts[0].vocab_size), Limits(blocks, BLOCK_SIZE, rows))
    requests = [engine.submit(prompt, settings, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    for request in requests:
        while not request.ended:
            engine.step()
        yield request.completion()
