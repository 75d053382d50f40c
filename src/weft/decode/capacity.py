"""Capacity for texts of any length: a state starts with some, and gets half as much again when that is filled.

Each kind of state has its own way to grow; one that isn't known here gets all of its capacity at the start.
"""

from functools import singledispatch

from torch.nn.functional import pad

from weft.models.base import LanguageModel, Source, State, device_of
from weft.models.ngram import Recent
from weft.models.recurrent import HiddenStates
from weft.models.transformer import TransformerState
from weft.nn.cache import KeyValueCache

FIRST = 1 << 10  # tokens after the prompt that a state has capacity for at the start
FIRST_ON_CUDA = 1 << 15  # where CUDA graphs are captured with the address of the memory they use


def start(model: LanguageModel, batch: int, first: int, limit: int, source: Source | None = None) -> State:
    """An empty state for `batch` sequences that begin with `first` tokens and can grow to `limit`."""
    # an answer is about as long as its source: most have ended before the others' capacity is moved
    more = FIRST if source is None else source.tokens.shape[1] + 1
    some = min(limit, first + (FIRST_ON_CUDA if device_of(model).type == "cuda" else more))
    state = model.start(batch, some, source)
    return state if some == limit or _can_grow(state) else model.start(batch, limit, source)


def grow(state: State, tokens: int, limit: int) -> bool:
    """Give `state` capacity for so many more tokens, unless that is above `limit` in all; True if it had to grow.

    Its tensors are new ones then.
    """
    needed = state.longest + tokens
    if needed <= state.max_len or needed > limit:
        return False
    wider = min(limit, max(needed, state.max_len * 3 // 2))
    _grow(state, wider - state.max_len)
    state.max_len = wider
    return True


def _can_grow(state: State) -> bool:
    cached = not isinstance(state, TransformerState) or isinstance(state.cache, KeyValueCache)
    return cached and _grow.dispatch(type(state)) is not _grow.dispatch(State)


@singledispatch
def _grow(state: State, more: int) -> None:
    """Capacity for `more` tokens behind what there is."""
    raise AssertionError("such a state has all of its capacity from the start")


@_grow.register
def _(state: TransformerState, more: int) -> None:
    state.cache.store = pad(state.cache.store, (0, 0, 0, more))


@_grow.register
def _(state: HiddenStates, more: int) -> None:
    state.states = pad(state.states, (0, 0) * 3 + (0, more))


@_grow.register
def _(state: Recent, more: int) -> None:
    state.tokens = pad(state.tokens, (0, more))
