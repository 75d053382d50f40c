"""Main effects of an ablation: what one setting does to the loss, whatever the others are.

Two contenders that differ in one setting alone are a pair. In a full grid a setting has a pair for every combination of
the others, and the mean over them is the main effect of a factorial design (Box, Hunter & Hunter 2005, ch. 5); when one
setting is varied at a time, there is the one pair with the base.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weft.compare.bootstrap import resample
from weft.compare.results import Array, Measured
from weft.evaluate.bootstrap import DRAWS, ends

Levels = tuple[str, ...]


@dataclass(frozen=True)
class Effect:
    """By how many bits per byte a `value` of a setting is worse than its `base` (negative: better), with its interval.

    It is the mean over so many `pairs`, of the `planned` ones: a contender that failed takes its pairs away.
    """

    setting: str
    value: str
    base: str
    difference: float
    low: float
    high: float
    pairs: int
    planned: int


def main_effects(
    contenders: Sequence[Measured], varied: Mapping[str, tuple[str, ...]], draws: int = DRAWS, seed: int = 0
) -> list[Effect]:
    """The effect of each value of each setting against the setting's first, at the largest share that anybody finished.

    A value that has no pair left is left out. Sections are drawn once for all contenders, seeds for each contender by
    itself: that one seed gives two architectures the same batches makes their losses a little alike at most, and to
    claim more than that would need many more seeds than three. If they are alike, the interval is on the safe side.
    """
    share = max((share for contender in contenders for share in contender.shares), default=0.0)
    planned = {_levels(contender, varied): contender for contender in contenders if contender.levels is not None}
    cells = {levels: runs for levels, contender in planned.items() if (runs := _cell(contender, share)) is not None}
    if not cells:
        return []
    sizes = next(sizes for _, sizes in cells.values())
    groups = [[nats for nats, _ in cells.values()]]
    drawn = resample(groups, sizes, draws, seed)[0]  # (draws, cells)
    means = np.array([nats.mean(axis=0).sum() / np.log(2) / sizes.sum() for nats, _ in cells.values()])
    columns = {levels: column for column, levels in enumerate(cells)}

    found = []
    for place, (setting, values) in enumerate(varied.items()):
        base, *others = values
        for value in others:
            all_pairs = _pairs(planned, place, base, value)
            pairs = [(columns[a], columns[b]) for a, b in all_pairs if a in columns and b in columns]
            if not pairs:
                continue
            before, after = np.array(pairs).T
            difference = float((means[after] - means[before]).mean())
            low, high = ends((drawn[:, after] - drawn[:, before]).mean(axis=1))
            found.append(Effect(setting, value, base, difference, low, high, len(pairs), len(all_pairs)))
    return found


def _levels(contender: Measured, varied: Mapping[str, tuple[str, ...]]) -> Levels:
    """Which value it has of each varied setting; the base's where it doesn't say."""
    levels = contender.levels or {}
    return tuple(levels.get(setting, values[0]) for setting, values in varied.items())


def _cell(contender: Measured, share: float) -> tuple[Array, Array] | None:
    """Its nats (seeds, sections) and the sections' bytes at that share; None if no seed came to a finite loss."""
    outcomes = [outcome for outcome in contender.at(share) if np.isfinite(outcome.bits_per_byte)]
    if not outcomes:
        return None
    return np.array([outcome.nats for outcome in outcomes]), np.array(outcomes[0].bytes)


def _pairs(cells: Mapping[Levels, object], place: int, base: str, value: str) -> list[tuple[Levels, Levels]]:
    """The cells with the base's value and those with the other that are alike in everything else."""
    changed = ((levels, (*levels[:place], value, *levels[place + 1 :])) for levels in cells if levels[place] == base)
    return [(levels, other) for levels, other in changed if other in cells]
