"""Many texts, written whole: in lockstep batches or by the engine, whichever is faster."""

from collections.abc import Iterator, Sequence

from weft.decode.capacity import device_of
from weft.decode.completion import Completion, gather
from weft.decode.config import Sampling
from weft.decode.engine.engine import Engine, Limits
from weft.decode.generate import generate, max_length
from weft.decode.prompt import Prompt, check_prompts
from weft.models.base import LanguageModel, Source
from weft.models.transformer import Transformer

ROWS = 256  # texts that the engine writes at a time, at most
BLOCK_SIZE = 16
LONGEST = 1 << 16  # tokens that a text may reach for the engine, which has to hold a whole one
FIRST = 1 << 10  # tokens of an answer that the engine has blocks for in every row


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
    if engine_is_faster(model, prompts, settings):
        yield from _by_engine(model, prompts, settings, seeds, min(rows, ROWS))
        return
    for first in range(0, len(prompts), rows):
        some = prompts[first : first + rows]
        yield from gather(generate(model, some, settings, seeds[first : first + rows]), some)


def engine_is_faster(model: LanguageModel, prompts: Sequence[Prompt], settings: Sampling) -> bool:
    """Whether the engine writes these texts faster than lockstep batches of them.

    It is where prompts are of unequal lengths: lockstep pads them, can't take the CPU fast path, and lets rows run
    empty while a batch's last texts end. Recurrent and n-gram models have nothing to page, and on a GPU lockstep runs
    ahead of the host. A text that may grow without bounds is left to lockstep, whose capacity grows with it.
    """
    if not isinstance(model, Transformer) or model.encoder is not None or device_of(model).type != "cpu":
        return False
    unequal = len({len(prompt.ids) for prompt in prompts}) > 1
    return unequal and max_length(prompts, settings.max_tokens, model) <= LONGEST


def _by_engine(
    model: LanguageModel, prompts: Sequence[Prompt], settings: Sampling, seeds: Sequence[int], rows: int
) -> Iterator[Completion]:
    tokenizer = prompts[0].tokenizer
    assert tokenizer is not None
    check_prompts(model, prompts)  # before any of them is written, and with their numbers
    longest = max_length(prompts, settings.max_tokens, model)
    usual = max_length(prompts, min(settings.max_tokens, FIRST), model)
    blocks = max(-(-longest // BLOCK_SIZE), min(rows, len(prompts)) * -(-usual // BLOCK_SIZE))
    engine = Engine(model, tokenizer, Limits(blocks, BLOCK_SIZE, rows))
    requests = [engine.submit(prompt, settings, seed=seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    for request in requests:
        while not request.ended.is_set():
            engine.step()
        yield request.completion()
