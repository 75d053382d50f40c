"""Requests of models whose state doesn't grow with the text: rows of states, joined so that one step serves them all.

Nothing goes back here, so of what was read only what the next token depends on is kept. Each kind of state is joined
in its own way; one that isn't known here is left alone, and its rows are stepped one by one.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.decode.engine.reading import CALL, advance, bands, in_order
from weft.decode.engine.requests import Request
from weft.models.bahdanau import AlignedStates, Encoded
from weft.models.base import LanguageModel, State, device_of
from weft.models.ngram import Recent
from weft.models.recurrent import HiddenStates

HORIZON = 64  # tokens that joined rows can read before their state is made anew


@dataclass(eq=False)
class Cohort:
    """Rows of one state, and whose they are."""

    state: State
    requests: list[Request]


class StateManager:
    """Keeps and reads the states of requests through the contract of every model: start, advance, reorder."""

    runs_ahead = False  # each step waits for what the last one wrote

    def __init__(self, model: LanguageModel):
        self.model, self.device = model, device_of(model)
        self.cohorts: dict[int, Cohort] = {}  # by request

    def check(self, request: Request) -> None:
        """A state doesn't grow, so every request fits."""

    def awaits(self, request: Request) -> bool:
        """Nothing is shared, so there is nothing to wait for."""
        return False

    def admit(self, request: Request, spare: int) -> bool:
        """Begin a state for a request."""
        state = self.model.start(1, min(request.longest, HORIZON), request.source)
        if not can_join(state):  # then it can't be made anew either
            state = self.model.start(1, request.longest, request.source)
        self.cohorts[request.number] = Cohort(state, [request])
        return True

    def extend(self, request: Request, tokens: int) -> bool:
        """States need no blocks."""
        return True

    def read(self, requests: Sequence[Request], counts: Sequence[int]) -> Tensor:
        """Read on, counts[i] tokens of request i; features (requests, …) after the last one of each."""
        features: list[Tensor] = []
        order: list[int] = []
        at = {request.number: place for place, request in enumerate(requests)}
        single = [place for place, count in enumerate(counts) if count == 1]
        longer = [place for place, count in enumerate(counts) if count > 1]
        for group in [*([single] if single else []), *bands(longer, [counts[place] for place in longer], CALL)]:
            for cohort in self._together([requests[place] for place in group], max(counts[place] for place in group)):
                places = [at[request.number] for request in cohort.requests]
                features.append(advance(self.model, cohort.state, cohort.requests, [counts[place] for place in places]))
                order += places
        return in_order(features, order)

    def keep(self, requests: Sequence[Request], tokens: Tensor) -> None:
        """No state runs ahead."""
        raise AssertionError

    def release(self, request: Request) -> None:
        """Forget a request."""
        del self.cohorts[request.number]
        request.read = 0

    def _together(self, requests: list[Request], time: int) -> list[Cohort]:
        """The cohorts of just these requests, which can read `time` more: one, where such states can be joined."""
        found = dict.fromkeys(self.cohorts[request.number] for request in requests)
        parts = [self._alone(cohort, requests) for cohort in found]
        full = parts[0].state.longest + time > parts[0].state.max_len
        if len(parts) > 1 or full:
            capacity = max(time, min(HORIZON, max(request.longest - request.read for request in requests)))
            state = join(parts[0].state, [part.state for part in parts[1:]], self.model, capacity)
            if state is not None:
                parts = [Cohort(state, [request for part in parts for request in part.requests])]
        for part in parts:
            self.cohorts.update(dict.fromkeys((request.number for request in part.requests), part))
        return parts

    def _alone(self, cohort: Cohort, requests: list[Request]) -> Cohort:
        """Those rows of a cohort that belong to `requests`; the others that still live go on without them."""
        wanted = {request.number for request in requests}
        mine = [row for row, request in enumerate(cohort.requests) if request.number in wanted]
        if len(mine) == len(cohort.requests):
            return cohort
        others = [
            row
            for row, request in enumerate(cohort.requests)
            if request.number not in wanted and self.cohorts.get(request.number) is cohort
        ]
        part = Cohort(cohort.state, [cohort.requests[row] for row in mine])
        if others:
            part.state = copy.deepcopy(cohort.state)
            cohort.state.reorder(torch.tensor(others, device=self.device))
            cohort.requests = [cohort.requests[row] for row in others]
        part.state.reorder(torch.tensor(mine, device=self.device))
        return part


# ---- joining


@singledispatch
def join(first: State, others: Sequence[State], model: Any, capacity: int) -> State | None:
    """The rows of `first`, then those of the others, all of one model; `capacity` more tokens can be read."""
    return None


def can_join(state: State) -> bool:
    """Whether states of this kind can be joined."""
    return join.dispatch(type(state)) is not join.dispatch(State)


@join.register
def _(first: Recent, others: Sequence[Recent], model: Any, capacity: int) -> State:
    width = model.config.order - 1
    behind = torch.arange(width, device=first.lengths.device)
    recent = torch.cat([each.tokens.gather(1, each.lengths[:, None] + behind) for each in (first, *others)])
    joined = model.start(len(recent), capacity)
    joined.tokens[:, :width] = recent
    return joined


@join.register
def _(first: HiddenStates, others: Sequence[HiddenStates], model: Any, capacity: int) -> State:
    latest = _latest((first, *others))
    joined = model.start(latest.shape[2], capacity)
    joined.keep(latest, 0)
    return joined


@join.register
def _(first: AlignedStates, others: Sequence[AlignedStates], model: Any, capacity: int) -> State:
    states = (first, *others)
    longest = max(each.source.mask.shape[1] for each in states)
    annotations, keys, mask = (
        torch.cat([_widened(getattr(each.source, name), longest) for each in states])
        for name in ("annotations", "keys", "mask")
    )
    source = Encoded(annotations, keys, mask, _latest(states))
    return AlignedStates(len(mask), capacity, model.decoder, source)


def _latest(states: Sequence[HiddenStates]) -> Tensor:
    """The newest hidden states, (parts, layers, batch, d_model)."""
    return torch.cat([each.current() for each in states], dim=2)


def _widened(source: Tensor, time: int) -> Tensor:
    """source (batch, source time, …), padded to `time`."""
    return pad(source, (0, 0) * (source.ndim - 2) + (0, time - source.shape[1]))
