"""Constrained writing: only tokens after which the text can still match a pattern.

Patterns speak of bytes and models of tokens. The vocabulary is laid out as a tree of the bytes that its tokens spell;
walking tree and pattern together finds the tokens that may follow, once for each state of the pattern.
"""

import copy
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from weft.decode.pattern import Automaton, State
from weft.decode.schema import schema_pattern
from weft.errors import ModelError
from weft.text.tokenizer import Tokenizer


class Constraint(Protocol):
    """Says which tokens one text may go on with. A beam that splits in two needs a copy."""

    def allowed(self) -> Tensor:
        """(V,) on the CPU, True where a token may follow; a ModelError where none can, though the text isn't over."""
        ...

    def push(self, token: int) -> None:
        """This token was written; never the end of the text."""
        ...

    @property
    def over(self) -> bool:
        """Nothing but the end of the text may follow."""
        ...

    def copy(self) -> Self:
        """The same for another text that begins as this one did."""
        ...


class Grammar(Protocol):
    """What whole texts have to match."""

    def begin(self, begun: bool) -> Constraint:
        """For one text that is about to be written; after a prompt it goes on with a text that has `begun`."""
        ...


class _Branch:
    """A node of the tree: where each next byte leads, and the tokens that end here."""

    __slots__ = ("below", "tokens")

    def __init__(self) -> None:
        self.below: dict[int, _Branch] = {}
        self.tokens: list[int] = []

    def add(self, spelling: bytes, token: int) -> None:
        here = self
        for byte in spelling:
            here = here.below.setdefault(byte, _Branch())
        here.tokens.append(token)


class Pattern:
    """A regular expression that whole texts of a tokenizer have to match."""

    def __init__(self, tokenizer: Tokenizer, expression: str):
        self.automaton = Automaton(expression)
        self.expression = expression
        self.eos_id = tokenizer.eos_id
        self.vocab_size = tokenizer.vocab_size
        # the first token of a text may spell itself without its leading space
        self.first: dict[int, bytes] = {}
        self.later: dict[int, bytes] = {}
        special = set(tokenizer.special_tokens.values())
        for token in range(tokenizer.vocab_size):
            if token in special:
                continue
            self.later[token] = spelling = tokenizer.token_bytes(token)
            begun = tokenizer.decode([token])
            self.first[token] = spelling if "\ufffd" in begun else begun.encode()
        self._trees = [_tree(self.first), _tree(self.later)]
        self._masks: dict[tuple[State, bool], Tensor] = {}
        if not any(bool(self.mask(self.automaton.start, begun).any()) for begun in (False, True)):
            raise ModelError(f"pattern {expression[:60]!r}: no token of this vocabulary can begin it")

    def begin(self, begun: bool = False) -> "PatternText":
        """A text of this pattern, about to be written; after a prompt it goes on with a text that has `begun`."""
        if not bool(self.mask(self.automaton.start, begun).any()):
            where = "go on with a prompt; its words begin with a space" if begun else "begin a text"
            raise ModelError(f"pattern {self.expression[:60]!r}: no token of this vocabulary can {where}")
        return PatternText(self, begun)

    def matches(self, text: str) -> bool:
        """Whether a whole text matches, which one that was cut off may not."""
        return self.automaton.matches(self.automaton.follow(self.automaton.start, text.encode()))

    def mask(self, state: State, begun: bool) -> Tensor:
        """(V,), True where a token may follow in this state; the end of the text where it matches."""
        known = self._masks.get((state, begun))
        if known is None:
            tokens: list[int] = []
            open_ones = [(self._trees[begun], state)]
            while open_ones:
                branch, here = open_ones.pop()
                tokens += branch.tokens
                for byte, below in branch.below.items():
                    if there := self.automaton.step(here, byte):
                        open_ones.append((below, there))
            if self.eos_id is not None and self.automaton.matches(state):
                tokens.append(self.eos_id)
            known = torch.zeros(self.vocab_size, dtype=torch.bool)
            known[tokens] = True
            self._masks[state, begun] = known
        return known


def _tree(spellings: dict[int, bytes]) -> _Branch:
    root = _Branch()
    for token, spelling in spellings.items():
        if spelling:  # a token without text would be allowed forever
            root.add(spelling, token)
    return root


def schema_text(tokenizer: Tokenizer, schema: Any) -> Pattern:
    """Texts that are JSON of this schema."""
    return Pattern(tokenizer, schema_pattern(schema))


class PatternText:
    """One text that is being written within a pattern."""

    def __init__(self, pattern: Pattern, begun: bool):
        self.pattern = pattern
        self.state = pattern.automaton.start
        self.begun = begun

    def allowed(self) -> Tensor:
        """(V,), True where a token may follow."""
        mask = self.pattern.mask(self.state, self.begun)
        if not bool(mask.any()):
            raise ModelError(f"pattern {self.pattern.expression[:60]!r}: no token of this vocabulary can go on with it")
        return mask

    def push(self, token: int) -> None:
        """This token was written."""
        spelling = (self.pattern.later if self.begun else self.pattern.first)[token]
        self.state = self.pattern.automaton.follow(self.state, spelling)
        self.begun = True

    def copy(self) -> Self:
        """The same for another text that begins as this one did."""
        return copy.copy(self)  # push replaces what it changes

    @property
    def over(self) -> bool:
        """The text matches, and nothing but its end may follow."""
        if not self.pattern.automaton.matches(self.state):
            return False
        mask = self.pattern.mask(self.state, self.begun)
        ends = 0 if self.pattern.eos_id is None else 1
        return int(mask.sum()) == ends
