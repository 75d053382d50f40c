"""Pairs of texts that differ in one respect, and passes in which activations of one replace those of the other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.errors import DataError
from weft.explain.capture import Change, capture, taps
from weft.explain.reading import Reading, SourceTokens
from weft.models.base import LanguageModel, device_of, evaluating

BATCH_TOKENS = 2048  # tokens of one pass
MIN_SHARE = 0.01  # of the spread of the logits: a smaller logit difference tells no two answers apart
MIN_DIFFERENCE = 1e-4  # logits; float32 rounds those of about 10 after a few layers to within 1e-5


class TextPair(NamedTuple):
    """Two texts of the same length, and two tokens: `answer` follows the clean one, `other` the corrupt one.

    Their logits are compared at `position`.
    """

    clean: Reading
    corrupt: Reading
    position: int
    answer: int
    other: int

    def check(self, where: str = "") -> "TextPair":
        """Return the pair; raise DataError if its texts can't be laid over each other."""
        for name, side in (("texts", "ids"), ("sources", "source")):
            one, two = (len(getattr(reading, side) or ()) for reading in (self.clean, self.corrupt))
            if one != two:
                same = "activations are exchanged position by position, so both need the same number"
                raise DataError(f"{where}the two {name} have {one} and {two} tokens; {same}")
        if (self.clean.ids, self.clean.source) == (self.corrupt.ids, self.corrupt.source):
            raise DataError(f"{where}the two texts are the same to the model; there is nothing to exchange")
        if self.answer == self.other:
            raise DataError(f"{where}the two answers are the same token; give two that differ")
        return self


class Swap(NamedTuple):
    """Units of a tap, at one position or at all of them."""

    tap: str
    units: slice = slice(None)
    position: int | None = None


Replacement = tuple[Tensor, Tensor]  # values (rows or 1, time, d), and where they are used (rows or 1, time or 1, d)


@dataclass(frozen=True)
class PairBatch:
    """Pairs of the same length that are read in one pass, (pairs, time)."""

    pairs: tuple[TextPair, ...]

    @property
    def model(self) -> LanguageModel:
        return self.pairs[0].clean.model

    @cached_property
    def answers(self) -> Tensor:
        """Tokens that are compared, (pairs, 2)."""
        return torch.tensor([(pair.answer, pair.other) for pair in self.pairs], device=device_of(self.model))

    def inputs(self, side: str, repeats: int) -> tuple[Tensor, dict[str, Any]]:
        """Return the tokens (repeats · pairs, time) of the side, "clean" or "corrupt", and the other arguments."""
        readings: list[Reading] = [getattr(pair, side) for pair in self.pairs]
        device = device_of(self.model)
        tokens = torch.tensor([reading.ids for reading in readings], device=device).repeat(repeats, 1)
        if readings[0].source is None:
            return tokens, {}
        source = torch.tensor([reading.source for reading in readings], device=device)
        return tokens, {"source": SourceTokens(source.repeat(repeats, 1))}

    @torch.no_grad()
    def logits(self, side: str, changes: Mapping[str, Change] | None = None, repeats: int = 1) -> Tensor:
        """Return the logits at the position of the answer, (repeats · pairs, vocab_size)."""
        tokens, options = self.inputs(side, repeats)
        with evaluating(self.model), capture(self.model, replace=changes):
            features = self.model.features(tokens, **options)
        readout = self.model.readout(features[:, [self.pairs[0].position]])
        assert readout is not None, "a model with taps has a readout"
        return readout.logits()[:, 0].float()

    def differences(self, logits: Tensor) -> Tensor:
        """Return logit of `answer` − logit of `other`, (repeats, pairs) in double precision."""
        answers = self.answers.repeat(len(logits) // len(self.pairs), 1)
        chosen = logits.double().gather(1, answers).cpu()
        return (chosen[:, 0] - chosen[:, 1]).view(-1, len(self.pairs))

    @torch.no_grad()
    def activations(self, side: str, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the activations of a side by tap, (pairs, time, d)."""
        tokens, options = self.inputs(side, 1)
        with evaluating(self.model), capture(self.model, *names) as captured:
            self.model.features(tokens, **options)
        return {name: captured.joined(name) for name in names}

    def exchange(self, variants: Sequence[Sequence[Swap]], values: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """Yield for each variant the logit differences (pairs,) of the corrupt texts with `values` (pairs, time, d) put
        in at its swaps. Several variants are computed in one pass."""
        pairs, time = self.inputs("corrupt", 1)[0].shape
        step = max(1, BATCH_TOKENS // (pairs * time))
        for first in range(0, len(variants), step):
            some = variants[first : first + step]
            replaced = {}
            for tap in dict.fromkeys(swap.tap for swaps in some for swap in swaps):
                length, width = values[tap].shape[1:]
                mask = torch.zeros(len(some), length, width, dtype=torch.bool, device=values[tap].device)
                for row, swaps in enumerate(some):
                    for swap in (swap for swap in swaps if swap.tap == tap):
                        mask[row, slice(None) if swap.position is None else swap.position, swap.units] = True
                replaced[tap] = (values[tap].repeat(len(some), 1, 1), mask.repeat_interleave(pairs, 0))
            yield from self.differences(self.logits("corrupt", replacements(self.model, replaced), len(some)))


def min_difference(logits: Tensor) -> float:
    """Return the smallest logit difference that is worth a share, by the spread of logits (…, vocab_size)."""
    known = logits.where(logits.isfinite(), torch.nan)
    variance = (known - known.nanmean(-1, keepdim=True)).square().nanmean(-1)
    return max(MIN_DIFFERENCE, MIN_SHARE * float(variance.sqrt().mean()))


def replacements(
    model: LanguageModel, replaced: Mapping[str, Replacement], see: Callable[[str, Tensor], None] | None = None
) -> dict[str, Change]:
    """Return changes for `capture` that put values in where a mask is True, for one pass.

    `see` gets every tensor (rows, time or 1, d) as the model computed it.
    """
    all_taps = taps(model)

    def change_of(tap: str) -> Change:
        (values, mask), by_step, position = replaced[tap], all_taps[tap].by_step, 0

        def change(x: Tensor) -> Tensor:
            nonlocal position
            flat = by_step and x.dim() == 2  # a step without a time dimension
            given = x[:, None] if flat else x
            if see is not None:
                see(tap, given)
            now = slice(position, position + 1) if by_step else slice(None)
            position += 1
            here = mask[:, now] if mask.shape[1] > 1 else mask
            new = torch.where(here, values[:, now].to(x.dtype), given)
            return new[:, 0] if flat else new

        return change

    return {tap: change_of(tap) for tap in replaced}


def batches(pairs: Sequence[TextPair]) -> list[PairBatch]:
    """Group pairs of the same length and position into batches of about BATCH_TOKENS tokens."""
    groups: dict[tuple[int, int, int], list[TextPair]] = {}
    for pair in pairs:
        key = len(pair.clean.ids), len(pair.clean.source or ()), pair.position
        groups.setdefault(key, []).append(pair)
    found = []
    for (time, source, _), group in groups.items():
        size = max(1, BATCH_TOKENS // max(time, source))
        found += [PairBatch(tuple(group[first : first + size])) for first in range(0, len(group), size)]
    return found
