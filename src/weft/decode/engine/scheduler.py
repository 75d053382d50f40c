"""Rows that were begun at different times, brought together into one state, so that one step serves them all.

Nothing goes back here, so of what was read only that stays which the next token depends on. Each kind of state has its
own way; one that isn't known here is left alone, and its rows are stepped apart.
"""

from collections.abc import Sequence
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.models.bahdanau import AlignedStates, Encoded
from weft.models.base import State
from weft.models.ngram import Recent
from weft.models.recurrent import HiddenStates


@singledispatch
def join(first: State, others: Sequence[State], model: Any, room: int) -> State | None:
    """The rows of `first`, then those of the others, all of one model; `room` more tokens can be read."""
    return None


def can_join(state: State) -> bool:
    """Whether states of this kind can be joined."""
    return join.dispatch(type(state)) is not join.dispatch(State)


@join.register
def _(first: Recent, others: Sequence[Recent], model: Any, room: int) -> State:
    width = model.config.order - 1
    behind = torch.arange(width, device=first.lengths.device)
    recent = torch.cat([each.tokens.gather(1, each.lengths[:, None] + behind) for each in (first, *others)])
    joined = model.start(len(recent), room)
    joined.tokens[:, :width] = recent
    return joined


@join.register
def _(first: HiddenStates, others: Sequence[HiddenStates], model: Any, room: int) -> State:
    now = _current((first, *others))
    joined = model.start(now.shape[2], room)
    joined.keep(now, 0)
    return joined


@join.register
def _(first: AlignedStates, others: Sequence[AlignedStates], model: Any, room: int) -> State:
    states = (first, *others)
    longest = max(each.source.mask.shape[1] for each in states)
    annotations, keys, mask = (
        torch.cat([_widened(getattr(each.source, name), longest) for each in states])
        for name in ("annotations", "keys", "mask")
    )
    source = Encoded(annotations, keys, mask, _current(states))
    return AlignedStates(len(mask), room, model.decoder, source)


def _current(states: Sequence[HiddenStates]) -> Tensor:
    """What the stack remembers now, (parts, layers, batch, d_model)."""
    return torch.cat([each.current() for each in states], dim=2)


def _widened(source: Tensor, time: int) -> Tensor:
    """source (batch, source time, …), padded to `time`."""
    return pad(source, (0, 0) * (source.ndim - 2) + (0, time - source.shape[1]))
