"""Main effects of an ablation: what one setting does to the loss, whatever the others are.

Two contenders that differ in one setting alone are a pair. In a full grid a setting has a pair for every combination of
the others, and the mean over them is the main effect of a factorial design (Box, Hunter & Hunter 2005, ch. 5); when one
setting is varied at a time, there is the one pair with the base.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weft.compare.results import Result
from weft.evaluate.bootstrap import DRAWS, ends, resample

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
    results: Sequence[Result], varied: Mapping[str, tuple[str, ...]], draws: int = DRAWS, seed: int = 0
) -> list[Effect]:
    """The effect of each value of each setting against the setting's first, at the largest share that anybody finished.

    A value that has no pair left is left out. Sections are drawn once for all contenders, seeds for each contender by
    itself: that one seed gives two architectures the same batches makes their losses a little alike at most, and to
    claim more than that would need many more seeds than three. If they are alike, the interval is on the safe side.
    """
    share = max((share for result in results for share in result.shares), default=0.0)
    planned = {_levels(result, varied): result for result in results if result.levels is not None}
    done = {levels: result.at(share) for levels, result in planned.items() if result.at(share)}
    if not done:
        return []
    sizes = np.array(next(iter(done.values()))[0].bytes)
    cells = [np.array([outcome.nats for outcome in outcomes]) for outcomes in done.values()]  # (seeds, sections) each
    drawn = resample([cells], sizes, draws, seed)[0]  # (draws, cells)
    means = np.array([nats.mean(axis=0).sum() / np.log(2) / sizes.sum() for nats in cells])
    columns = {levels: column for column, levels in enumerate(done)}

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


def _levels(result: Result, varied: Mapping[str, tuple[str, ...]]) -> Levels:
    """Which value it has of each varied setting; the base's where it doesn't say."""
    levels = result.levels or {}
    return tuple(levels.get(setting, values[0]) for setting, values in varied.items())


def _pairs(cells: Mapping[Levels, object], place: int, base: str, value: str) -> list[tuple[Levels, Levels]]:
    """The cells with the base's value and those with the other that are alike in everything else."""
    changed = ((levels, (*levels[:place], value, *levels[place + 1 :])) for levels in cells if levels[place] == base)
    return [(levels, other) for levels, other in changed if other in cells]
