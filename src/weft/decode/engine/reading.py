"""Requests that are read together: one call of the model for several, padded where they are unequal."""

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.decode.engine.requests import Request
from weft.decode.sampling import on_device
from weft.models.base import LanguageModel, State

CALL = 16  # a call of the model costs about as much as reading so many tokens more in one that is made anyway


def advance(model: LanguageModel, state: State, requests: Sequence[Request], counts: Sequence[int]) -> Tensor:
    """Read on in every row of a state, counts[i] tokens of request i; features (requests, …) after the last of each."""
    time = max(counts)
    ragged = min(counts) < time
    chunks = [request.ids[request.read : request.read + count] for request, count in zip(requests, counts, strict=True)]
    if ragged:
        chunks = [chunk + [0] * (time - len(chunk)) for chunk in chunks]
    tokens = on_device(torch.tensor(chunks), state.lengths.device)
    lengths = on_device(torch.tensor(counts), tokens.device) if ragged else None
    features = model.advance(tokens, state, lengths)
    for request, count in zip(requests, counts, strict=True):
        request.read += count
    if lengths is None:
        return features[:, -1]
    return features[torch.arange(len(requests), device=tokens.device), lengths - 1]


def in_order(parts: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    """Rows that were computed in this order, in their own."""
    features = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    if list(order) == list(range(len(order))):
        return features
    back = sorted(range(len(order)), key=order.__getitem__)
    return features[on_device(torch.tensor(back), features.device)]


def bands(places: Sequence[int], sizes: Sequence[int], toll: float) -> list[list[int]]:
    """Places, which have these sizes, cut into groups where the padding that is saved is worth `toll` for each cut."""
    places = list(places)
    longest = max(sizes, default=0)
    if longest * len(places) - sum(sizes) <= toll:
        return [places] if places else []
    order = sorted(range(len(places)), key=sizes.__getitem__)
    cut = max(range(1, len(order)), key=lambda cut: cut * (longest - sizes[order[cut - 1]]))
    if cut * (longest - sizes[order[cut - 1]]) <= toll:
        return [places]
    return [
        band
        for half in (order[:cut], order[cut:])
        for band in bands([places[i] for i in sorted(half)], [sizes[i] for i in sorted(half)], toll)
    ]
