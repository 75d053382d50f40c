"""Comparisons with simulated outcomes: the loss is a power law of compute, with noise of seeds and sections."""

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np

from weft.compare.fit import Point, fit
from weft.compare.jobs import Comparison, Outcome, Result
from weft.compare.scale import Check, ScalingPage

BUDGET = 1e15
SHARES = (1 / 27, 1 / 9, 1 / 3, 1.0)
SECTIONS = 40
BASE = "transformer"
FACTS = {"Text": "the built-in corpus, 1.1 MB", "Held out": "111,540 bytes in 40 sections", "Seeds": "3"}
FACTS |= {"Budget": "1e15 FLOPs for each contender", "Machine": "2 cores, AMD EPYC", "Date": "2026-05-04"}
VARIED = {
    "model.placement": ("post", "pre"),
    "model.position.kind": ("sinusoidal", "rotary"),
    "model.norm": ("layernorm", "rmsnorm"),
    "model.feedforward.kind": ("relu", "swiglu"),
}


def outcome(name: str, share: float, seed: int, law: tuple[float, float], **changed: object) -> Outcome:
    """Return a job whose loss is 1.1 + a · (efficiency · share)^-0.25 bits per byte: `law` is (a, efficiency)."""
    rng = np.random.default_rng([seed, round(1e6 * share), *name.encode()])
    sizes = np.random.default_rng(1).integers(500, 4000, SECTIONS)
    hard = np.random.default_rng(2).normal(1, 0.08, SECTIONS)  # the same sections are hard for all
    bits = 1.1 + law[0] * (law[1] * share) ** -0.25 + rng.normal(0, 0.004)
    nats = bits * math.log(2) * sizes * (hard + rng.normal(0, 0.01, SECTIONS))
    tokens = round(4e6 * share)
    progress = [(round(tokens * part), float(bits * part**-0.22)) for part in np.geomspace(0.05, 1, 8)]
    values: dict[str, object] = {"contender": name, "share": share, "lr": 0.003, "seed": seed}
    values |= {"steps": round(2000 * share), "tokens": tokens, "flops": BUDGET * share, "parameters": 1_204_224}
    values |= {"seconds": 90.0 * share / law[1] ** 0.5, "progress": tuple(progress)}
    values |= {"nats": tuple(map(float, nats)), "bytes": tuple(map(float, sizes))}
    values |= {"sample": f"ROMEO: what {name} <writes>\nis this & that."}
    return Outcome.model_validate(values | changed)


def measured(name: str, law: tuple[float, float], seeds: int = 3, **changed: object) -> Result:
    """Return a trained contender with every share and a sweep of five rates in two rounds."""
    outcomes = [outcome(name, share, seed, law, **changed) for share in SHARES for seed in range(seeds)]
    rates = [3e-4, 1e-3, 3e-3, 1e-2, 3e-2]
    sweep = []
    for share, kept in ((SHARES[0], rates), (SHARES[1], rates[1:4])):
        for rate in kept:
            sweep.append(outcome(name, share, 0, (law[0] * (1 + 0.35 * math.log10(rate / 3e-3) ** 2), law[1]), lr=rate))
    return Result(name, name, tuple(outcomes), tuple(sweep))


def counted(name: str = "ngram-5", bits: float = 2.02) -> Result:
    """Return an n-gram model: no FLOPs, no learning rate, one seed."""
    changed = {"lr": None, "flops": 0.0, "steps": 0, "parameters": 812_345, "progress": ()}
    law = (bits - 1.1, 1.0)
    return Result(name, name, tuple(outcome(name, share, 0, law, **changed, seconds=0.8 * share) for share in SHARES))


def comparison() -> Comparison:
    """Return an n-gram, an LSTM, and two transformers, one of them 2.1 times as efficient."""
    contenders = (
        counted(),
        measured("lstm", (0.75, 0.32), parameters=1_310_720),
        measured(BASE, (0.75, 1.0)),
        measured("transformer++", (0.75, 2.1), parameters=1_180_032),
    )
    command = "weft compare ngram-5 lstm transformer transformer++ --data corpus.txt --flops 1e15 --seeds 3"
    title, notes = "Four models at 1e15 FLOPs", ["The last 10% is held out."]
    return Comparison(title, command, BASE, contenders=contenders, facts=FACTS, notes=notes)


# factor on the efficiency of each setting's second value
GAINS = dict(zip(VARIED, (1.2, 1.45, 0.98, 1.3), strict=True))


def ablation() -> Comparison:
    """Return all combinations of the four switches."""
    cells = tuple(_cell(dict(zip(VARIED, values, strict=True))) for values in product(*VARIED.values()))
    command = "weft compare four-switches --data corpus.txt --flops 1e15"
    return Comparison("Four switches", command, cells[0].name, contenders=cells, facts=FACTS, varied=VARIED)


def _cell(levels: Mapping[str, str]) -> Result:
    changed = {key: value for key, value in levels.items() if value != VARIED[key][0]}
    name = ",".join(f"{key.removeprefix('model.')}={value}" for key, value in changed.items()) or "transformer"
    cell = measured(name, (0.75, math.prod(GAINS[key] for key in changed)))
    return Result(name, "transformer", cell.outcomes, sweep=cell.sweep, changes=changed, levels=dict(levels))


# ---- a scaling law

E, A, B, ALPHA, BETA = 0.9, 16.0, 14.0, 0.3, 0.24
SIZES = (2e5, 5e5, 1.2e6, 3e6, 8e6)


def law(size: float, tokens: float) -> float:
    """Return the loss of the ladder."""
    return E + A / size**ALPHA + B / tokens**BETA


def ladder() -> list[Point]:
    """Return five sizes with four lengths each."""
    rng = np.random.default_rng(0)
    cells = [(size, size * ratio) for size in SIZES for ratio in (5, 10, 20, 40)]
    return [Point(n, d, law(n, d) * float(np.exp(rng.normal(0, 0.002))), 6 * n * d) for n, d in cells]


def scaling() -> ScalingPage:
    """Return the page of a fit to the ladder, with a next rung that follows the law."""
    fitted = fit(ladder(), draws=50)
    size, tokens = 2e7, 4e8
    measured = Point(size, tokens, law(size, tokens), 6 * size * tokens)
    check = Check(measured, fitted.predict(size, tokens), *fitted.predict_interval(size, tokens))
    texts: dict[str, Any] = {"command": "weft scale '<x>'", "facts": {"Text": "<s>"}, "title": "Law <b>"}
    texts["notes"] = ["<q>"]
    return ScalingPage(fitted, check, 1e18, optimum=fitted.optimal(1e18), **texts)
