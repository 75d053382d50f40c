"""One text from another, for many texts: sources of like length are read together, answers come back in order."""

from collections.abc import Callable, Sequence

import torch

from weft.data.batch import Source, pad
from weft.decode.beam import search_texts
from weft.decode.config import Beam, Sampling
from weft.decode.writing import complete
from weft.models.base import LanguageModel
from weft.text.tokenizer import Tokenizer

TOKENS = 4096  # of sources read together, padding counted


def translate(
    model: LanguageModel,
    texts: Sequence[str],
    settings: Beam | Sampling,
    *,
    source: Tokenizer,
    target: Tokenizer,
    length: int,
    progress: Callable[[int], object] | None = None,
) -> list[str]:
    """What the model makes of each text, in their order. A blank text stays blank; sources are cut at `length` tokens.

    Each answer begins with bos and ends with eos, as `weft.data.collate.pairs_batch` has it in training.
    """
    device = next(model.parameters()).device
    ids = [[*each[: length - 1], source.need("eos")] for each in source.encode_batch(list(texts))]
    written = [""] * len(texts)
    waiting = sorted((number for number, text in enumerate(texts) if text.strip()), key=lambda number: len(ids[number]))
    if progress is not None:
        progress(len(texts) - len(waiting))
    while waiting:
        longest = len(ids[waiting[-1]])
        some = [waiting.pop() for _ in range(min(len(waiting), max(1, TOKENS // longest)))]
        tokens, mask = pad([ids[number] for number in some], source.pad_id)
        read = Source(tokens.to(device), mask.to(device))
        for number, answer in zip(some, answers(model, read, settings, target), strict=True):
            written[number] = answer
        if progress is not None:
            progress(len(some))
    return written


@torch.no_grad()
def answers(model: LanguageModel, source: Source, settings: Beam | Sampling, tokenizer: Tokenizer) -> list[str]:
    """The best answer to each row of a source."""
    opening = [[tokenizer.need("bos")]] * len(source.tokens)
    if isinstance(settings, Beam):
        return [found[0].text for found in search_texts(model, tokenizer, opening, settings, source=source)]
    return [done.text for done in complete(model, tokenizer, opening, settings, source=source)]
