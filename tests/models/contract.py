"""The stepping contract of all models. The tests of each family call these checks."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.models.base import LanguageModel


@dataclass
class PaddedSource:
    """Source of a sequence-to-sequence model."""

    tokens: Tensor
    mask: Tensor | None = None

    def row(self, i: int) -> "PaddedSource":
        """Row i alone, without its padding."""
        tokens = self.tokens[i] if self.mask is None else self.tokens[i][self.mask[i].bool()]
        return PaddedSource(tokens[None])


@dataclass(frozen=True)
class Read:
    """Read a batch padded to `width`; row i has lengths[i % len(lengths)] tokens, or `width` if None."""

    width: int
    lengths: tuple[int, ...] | None


@dataclass(frozen=True)
class Reorder:
    """Continue row i from row index[i] % batch."""

    index: tuple[int, ...]


@dataclass(frozen=True)
class Truncate:
    """Keep to[0] tokens of every row, or to[i % len(to)] of row i if there are several."""

    to: tuple[int, ...]


def _reads(width: int) -> st.SearchStrategy[Read]:
    lengths = st.lists(st.integers(0, width), min_size=1, max_size=3).map(tuple)
    return st.builds(Read, st.just(width), st.none() | lengths)


def plans(operations: int = 6, max_width: int = 4) -> st.SearchStrategy[list[Any]]:
    """A read, then any sequence of reads, reorderings and truncations."""
    read = st.integers(1, max_width).flatmap(_reads)
    reorder = st.lists(st.integers(0, 5), min_size=1, max_size=4).map(lambda index: Reorder(tuple(index)))
    truncate = st.lists(st.integers(0, 6), min_size=1, max_size=3).map(lambda to: Truncate(tuple(to)))
    later = st.lists(st.one_of(read, reorder, truncate), max_size=operations - 1)
    return st.tuples(read, later).map(lambda plan: [plan[0], *plan[1]])


def check_contract(
    model: LanguageModel, vocab_size: int, source: PaddedSource | None = None, *, examples: int = 6
) -> None:
    """Steps equal whole passes, no token sees a later one, and rows are independent."""
    check_step_equals_forward(model, vocab_size, source, examples)
    check_causal(model, vocab_size, source)
    check_rows_are_independent(model, vocab_size, source)


def check_step_equals_forward(
    model: LanguageModel, vocab_size: int, source: PaddedSource | None = None, examples: int = 6
) -> None:
    """After any reads, reorderings and truncations, a step gives the logits of the whole sequence read in one call."""

    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(plan=plans(), seed=st.integers(0, 99))
    def follow(plan: list[Any], seed: int) -> None:
        _follow(model, vocab_size, source, plan, seed)

    model.eval()
    with torch.no_grad():
        follow()


def _follow(model: LanguageModel, vocab_size: int, source: PaddedSource | None, plan: list[Any], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = 3 if source is None else len(source.tokens)
    max_len = sum(operation.width for operation in plan if isinstance(operation, Read))
    state = model.start(batch, plan[0].width, source)
    if not state.can_grow:
        state = model.start(batch, max_len, source)
    history: list[list[int]] = [[] for _ in range(batch)]
    origin = list(range(batch))
    for operation in plan:
        B = len(history)
        if isinstance(operation, Reorder):
            index = [i % B for i in operation.index]
            state.reorder(torch.tensor(index))
            history, origin = [list(history[i]) for i in index], [origin[i] for i in index]
        elif isinstance(operation, Truncate):
            to = [operation.to[i % len(operation.to)] for i in range(B)]
            state.truncate(to[0] if len(operation.to) == 1 else torch.tensor(to))
            history = [row[:n] for row, n in zip(history, to, strict=True)]
        else:
            needed, max_len = state.longest + operation.width, state.max_len
            assert state.grow(needed) == (needed > max_len)
            tokens = torch.randint(vocab_size, (B, operation.width), generator=generator)
            counts = operation.lengths
            lengths = None if counts is None else torch.tensor([counts[i % len(counts)] for i in range(B)])
            logits = model.step(tokens, state, lengths)
            assert logits.shape == (B, operation.width, vocab_size)
            for i in range(B):
                count = operation.width if lengths is None else int(lengths[i])
                history[i] += tokens[i, :count].tolist()
                if count:
                    whole = _logits(model, history[i], source, origin[i])
                    torch.testing.assert_close(logits[i, :count], whole[-count:], atol=1e-5, rtol=1e-5)
        assert state.lengths.tolist() == [len(row) for row in history]
        assert state.longest >= max(len(row) for row in history)


def _logits(model: LanguageModel, tokens: list[int], source: PaddedSource | None, row: int) -> Tensor:
    """Logits (time, vocab_size) of one sequence read alone."""
    inputs: dict[str, Any] = {} if source is None else {"source": source.row(row)}
    return model(torch.tensor([tokens]), **inputs)[0]


def check_causal(model: LanguageModel, vocab_size: int, source: PaddedSource | None = None, time: int = 8) -> None:
    """Changing token j changes no logits before j, but some at j or later."""
    model.eval()
    batch = 2 if source is None else len(source.tokens)
    inputs: dict[str, Any] = {} if source is None else {"source": source}
    tokens = torch.randint(vocab_size, (batch, time), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(tokens, **inputs)
        for j in range(time):
            other = tokens.clone()
            other[:, j] = (other[:, j] + 1) % vocab_size
            after = model(other, **inputs)
            assert torch.equal(before[:, :j], after[:, :j])
            assert not torch.equal(before[:, j:], after[:, j:])


def check_rows_are_independent(model: LanguageModel, vocab_size: int, source: PaddedSource | None = None) -> None:
    """Each row of a padded batch gets the logits of the row alone, for any padding."""
    model.eval()
    batch = 4 if source is None else len(source.tokens)
    inputs: dict[str, Any] = {} if source is None else {"source": source}
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab_size, (batch, 7), generator=generator)
    lengths = torch.randint(1, 8, (batch,), generator=generator).tolist()
    with torch.no_grad():
        together = model(tokens, **inputs)
        for i, n in enumerate(lengths):
            alone = _logits(model, tokens[i, :n].tolist(), source, i)
            torch.testing.assert_close(together[i, :n], alone, atol=1e-5, rtol=1e-5)
