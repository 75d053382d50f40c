"""A batch: truncate, look up, pad."""

from typing import Any

import torch
from torch import Tensor


def padding(
    sentences: list[list[str]], vocabulary: dict[str, int], length: int, pad: str, unknown: str
) -> tuple[Tensor, Tensor]:
    """Return ids and mask, (sentences, length of the longest row) each."""
    rows = [sentence[:length] for sentence in sentences]
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), vocabulary[pad])
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, words in enumerate(rows):
        ids[row, : len(words)] = torch.tensor(
            [vocabulary.get(word, vocabulary[unknown]) for word in words], dtype=torch.long
        )
        mask[row, : len(words)] = True
    return ids, mask


def cases(draw: Any) -> Any:
    words = {"the": 1, "cows": 2, "eat": 3, "grass": 0, "hay": 4}
    tokens = {**words, "<pad>": 7, "<unk>": 9}
    common = {"vocabulary": tokens, "pad": "<pad>", "unknown": "<unk>"}
    yield "the padding id is 7", {"sentences": [["the", "cows", "eat"], ["cows"]], "length": 4, **common}
    yield "truncated", {"sentences": [["the", "cows", "eat", "the", "grass"], ["hay", "eat"]], "length": 3, **common}
    yield "unknown words", {"sentences": [["goats", "eat", "hay"], ["the"]], "length": 9, **common}
    yield "an empty sentence", {"sentences": [[], ["the", "hay"]], "length": 5, **common}
    yield "one word", {"sentences": [["cows"]], "length": 1, **common}
    texts = [[draw.random.choice([*words, "ox"]) for _ in range(draw.random.randrange(1, 8))] for _ in range(4)]
    yield "random", {"sentences": texts, "length": 5, **common}
