"""Room for texts of any length: a state begins with room for some tokens and gets twice as much when that is filled.

Each kind of state has its own way to grow; one that isn't known here gets all of its room at the start.
"""

from functools import singledispatch

import torch
from torch.nn.functional import pad

from weft.models.base import LanguageModel, Source, State
from weft.models.ngram import Recent
from weft.models.recurrent import HiddenStates
from weft.models.transformer import TransformerState
from weft.nn.cache import KeyValueCache

FIRST = 1 << 10  # tokens after the prompt that there is room for at the start
FIRST_RECORDED = 1 << 15  # on a GPU, where steps are recorded with the place of the memory they use


def start(
    model: LanguageModel, batch: int, prompt: int, room: int, device: torch.device, source: Source | None = None
) -> State:
    """An empty memory for `batch` sequences that begin with `prompt` tokens and can grow to `room`."""
    some = min(room, prompt + (FIRST_RECORDED if device.type == "cuda" else FIRST))
    state = model.start(batch, some, source)
    return state if some == room or _can_grow(state) else model.start(batch, room, source)


def make_room(state: State, time: int, room: int) -> bool:
    """Let `state` have room for `time` more tokens, if that is no more than `room` in all; True if it had to grow.

    Whoever holds on to its tensors has to take the new ones then.
    """
    needed = state.longest + time
    if needed <= state.max_len or needed > room:
        return False
    wider = min(room, max(needed, 2 * state.max_len))
    _grow(state, wider - state.max_len)
    state.max_len = wider
    return True


def _can_grow(state: State) -> bool:
    cached = not isinstance(state, TransformerState) or isinstance(state.cache, KeyValueCache)
    return cached and _grow.dispatch(type(state)) is not _grow.dispatch(State)


@singledispatch
def _grow(state: State, more: int) -> None:
    """Room for `more` tokens behind what there is."""
    raise AssertionError("such a state has all of its room from the start")


@_grow.register
def _(state: TransformerState, more: int) -> None:
    state.cache.store = pad(state.cache.store, (0, 0, 0, more))


@_grow.register
def _(state: HiddenStates, more: int) -> None:
    state.states = pad(state.states, (0, 0) * 3 + (0, more))


@_grow.register
def _(state: Recent, more: int) -> None:
    state.tokens = pad(state.tokens, (0, more))
