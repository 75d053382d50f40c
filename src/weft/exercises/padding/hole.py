import torch
from torch import Tensor


def padding(
    sentences: list[list[str]], vocabulary: dict[str, int], length: int, pad: str, unknown: str
) -> tuple[Tensor, Tensor]:
    """Return ids and mask, (sentences, length of the longest row) each."""
    cut = ...  # the first `length` words of each sentence
    ids = ...  # the id of each word, that of `unknown` for other words, and the padding id to the right: (sentences, length of the longest row)
    mask = ...  # True at words, False at padding
    return ids, mask
