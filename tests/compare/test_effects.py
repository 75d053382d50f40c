"""Main effects, compared with tables computed by hand and by least squares."""

import itertools
import math
from collections.abc import Mapping

import numpy as np
import pytest

from weft.compare.jobs import Outcome, Result
from weft.compare.ranking import main_effects

SIZES = (400.0, 600.0)
VARIED = {"norm": ("pre", "post"), "position": ("rotary", "sinusoidal"), "gate": ("yes", "no")}
# bits per byte of the eight cells, in the order of itertools.product
TABLE = [1.20, 1.25, 1.28, 1.31, 1.30, 1.37, 1.40, 1.45]
CELLS = list(itertools.product(*VARIED.values()))


def outcome(name: str, loss: float, seed: int = 0, share: float = 1.0) -> Outcome:
    nats = tuple(loss * size * math.log(2) for size in SIZES)
    counts = {"steps": 1, "tokens": 1, "flops": 1.0, "seconds": 1.0, "parameters": 1}
    return Outcome(contender=name, share=share, lr=1e-3, seed=seed, nats=nats, bytes=SIZES, **counts)


def contender(levels: tuple[str, ...], losses: list[float], varied: Mapping[str, tuple[str, ...]] = VARIED) -> Result:
    name = " ".join(levels)
    runs = [outcome(name, loss, seed) for seed, loss in enumerate(losses)]
    runs += [outcome(name, 9.0, seed, share=1 / 3) for seed in range(3)]  # smaller shares are ignored
    return Result(name, "small", tuple(runs), levels=dict(zip(varied, levels, strict=True)))


def grid(leave_out: tuple[int, ...] = ()) -> list[Result]:
    return [contender(cell, [] if number in leave_out else [TABLE[number]]) for number, cell in enumerate(CELLS)]


def test_a_full_grid_computed_by_hand() -> None:
    found = {effect.setting: effect for effect in main_effects(grid(), VARIED)}
    assert found["norm"].difference == pytest.approx((0.10 + 0.12 + 0.12 + 0.14) / 4)
    assert found["position"].difference == pytest.approx((0.08 + 0.06 + 0.10 + 0.08) / 4)
    assert found["gate"].difference == pytest.approx((0.05 + 0.03 + 0.07 + 0.05) / 4)
    assert [(effect.pairs, effect.planned) for effect in found.values()] == [(4, 4)] * 3
    assert (found["norm"].value, found["norm"].base) == ("post", "pre")
    # one seed, and identical sections: no scatter
    assert found["norm"].low == pytest.approx(found["norm"].high)
    # in a full grid, the main effect is the coefficient of an additive model fitted by least squares
    design = np.array([[1, *(levels[i] != values[0] for i, values in enumerate(VARIED.values()))] for levels in CELLS])
    coefficients = np.linalg.lstsq(design.astype(float), np.array(TABLE), rcond=None)[0]
    assert [found[setting].difference for setting in VARIED] == pytest.approx(list(coefficients[1:]))


def test_the_pairs_of_a_failed_cell_are_missing() -> None:
    found = {effect.setting: effect for effect in main_effects(grid(leave_out=(7,)), VARIED)}
    assert found["norm"].difference == pytest.approx((0.10 + 0.12 + 0.12) / 3)
    assert (found["norm"].pairs, found["norm"].planned) == (3, 4)
    half = main_effects(grid(leave_out=(4, 5, 6, 7)), VARIED)
    assert [effect.setting for effect in half] == ["position", "gate"]
    unfinished = [Result(each.name, each.recipe, (), levels=each.levels) for each in grid()]
    assert main_effects(unfinished, VARIED) == main_effects([], VARIED) == []


def test_single_changes_are_compared_with_the_base() -> None:
    varied = {"norm": ("pre", "post", "none"), "gate": ("yes", "no")}
    cells = {("pre", "yes"): 1.2, ("post", "yes"): 1.3, ("none", "yes"): 1.5, ("pre", "no"): 1.15}
    found = main_effects([contender(cell, [loss], varied) for cell, loss in cells.items()], varied)
    assert [(effect.setting, effect.value) for effect in found] == [("norm", "post"), ("norm", "none"), ("gate", "no")]
    assert [(effect.pairs, effect.planned) for effect in found] == [(1, 1)] * 3
    assert [effect.difference for effect in found] == pytest.approx([0.1, 0.3, -0.05])


def test_a_contender_outside_the_grid_is_ignored() -> None:
    other = Result("5-gram", "5-gram", (outcome("5-gram", 2.0),))
    assert main_effects([*grid(), other], VARIED) == main_effects(grid(), VARIED)


def test_the_interval_covers_the_truth() -> None:
    rng = np.random.default_rng(0)
    varied = {"norm": ("pre", "post"), "gate": ("yes", "no")}
    truth = {("pre", "yes"): 1.2, ("pre", "no"): 1.25, ("post", "yes"): 1.3, ("post", "no"): 1.37}
    covered, widths = 0, []
    for number in range(150):
        runs = [contender(cell, list(loss * rng.normal(1, 0.006, 3)), varied) for cell, loss in truth.items()]
        effect = main_effects(runs, varied, draws=300, seed=number)[0]
        covered += effect.low <= 0.11 <= effect.high
        widths.append((effect.high - effect.low) / 2)
    assert 0.92 <= covered / 150 <= 0.995
    # known scatter would give 1.96 standard errors: four cells, three seeds each
    assert np.median(widths) < 1.6 * 1.96 * 1.28 * 0.006 / math.sqrt(3)


def test_a_failed_seed_is_missing_only_in_its_cell() -> None:
    varied = {"norm": ("pre", "post")}
    runs = [contender(("pre",), [1.20, 1.22, 1.24], varied), contender(("post",), [1.30, 1.32], varied)]
    (effect,) = main_effects(runs, varied)
    assert effect.difference == pytest.approx(1.31 - 1.22)
    assert effect.low < 0.09 < effect.high
