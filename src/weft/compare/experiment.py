"""A comparison from beginning to end: made ready, run, and put together into what a page tells."""

import json
import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from weft import __version__
from weft.compare.config import PLAN, SEARCH_SHARES, Budget, Experiment
from weft.compare.contenders import ReadyContender, make_ready
from weft.compare.jobs import WIDENED, Comparison, Job, Outcome, Result, Sweep, share_text
from weft.compare.pools import HERE, Where
from weft.compare.runner import Machine, Runner, Watch, machine_for
from weft.config import flat
from weft.costs.units import duration
from weft.errors import ConfigError, RunError, WeftError, counted
from weft.figures.prose import prose
from weft.machine import matmul_rates, pick_device
from weft.progress import log_to_stderr
from weft.storage import files
from weft.storage.files import locked, write_text
from weft.training.worker import device_name

TEXTS = prose(__file__)
LOCK = ".lock"
MIN_TELLING_STEPS = 50  # in fewer hardly anything is learned
HELD_OUT = {"cpu": 200_000, "cuda": 5_000_000}  # bytes of held-out text that every job is measured on


@dataclass(frozen=True)
class Workplace:
    """Where a comparison runs: its folder, and the one that its text is in as tokens, inside the first by default.

    `jobs` is where they run and how many side by side, as many as fit if left out. `watch` is called while they run.
    `command` is what repeats it.
    """

    out: Path
    data: Path | None = None
    jobs: Where = HERE
    watch: Watch = lambda progress: None
    command: str = ""


def compare(experiment: Experiment, place: Workplace) -> Comparison:
    """Run a comparison, or what is left of it, and return what came out."""
    with claimed_folder(place.out):
        ready, machine, noted = _start(experiment, place)
        held_out = experiment.held_out or HELD_OUT[ready[0].device]
        runner = Runner(place.out, {each.name: each for each in ready}, machine, held_out)
        if experiment.budget.minutes is not None:
            runner.contenders = _timed(runner, experiment.budget, place.watch)
            ready = list(runner.contenders.values())
        sweeps = [each.sweep(experiment) for each in ready]
        left_out = [line for each in ready for line in each.left_out(experiment)]
        for line in (*left_out, *_announced(experiment.budget, runner, sweeps)):
            log_to_stderr(line)
        outcomes = runner.run(sweeps, place.watch)
    measured = tuple(_measured(*each, outcomes) for each in zip(ready, sweeps, strict=True))
    first = next((each.name for each in ready if not each.counts), measured[0].name)
    return Comparison(
        title=f"{len(measured)} models at {experiment.budget}",
        command=noted["command"],
        baseline=experiment.baseline or first,
        contenders=measured,
        facts={**_facts(experiment, ready, machine, held_out), "began": noted["began"]},
        notes=[*(f"{line}." for line in left_out), *_notes(experiment, ready, measured)],
        varied=experiment.varied or None,
    )


def _timed(runner: Runner, budget: Budget, watch: Watch) -> dict[str, ReadyContender]:
    """The contenders with as many steps as their time pays for, by a few steps that are measured first."""
    timed = dict(runner.contenders)
    trained = {name: each for name, each in timed.items() if not each.counts}
    outcomes = runner.run([Sweep(name, (each.rate,), (), (0.0,), (0,)) for name, each in trained.items()], watch)
    for name, each in trained.items():
        probe = outcomes[Job(name, 0.0, each.rate, 0)]
        steps = int(60 * budget.amount * probe.steps / probe.seconds)
        if steps < 1:
            raise ConfigError(
                f"{name}: one step takes {probe.seconds / probe.steps:.1f} s, more than the budget of {budget}; give "
                "more time, or a smaller model or batch.size"
            )
        timed[name] = each.lasting(steps)
    return timed


def _announced(budget: Budget, runner: Runner, sweeps: Sequence[Sweep]) -> list[str]:
    """How many runs there are to come, and how long they take: at least, by the products that the device can form."""
    planned = {job: cost for job, cost in runner.planned(sweeps).items() if job not in runner.outcomes}
    if not planned:
        return []
    words, machine = f"{counted(len(planned), 'run')} to come", runner.machine
    trained = [each for each in runner.contenders.values() if not each.counts]
    if budget.minutes is not None:
        seconds = 60 * budget.minutes * sum(job.share for job in planned) / machine.jobs
        words += f", about {duration(seconds)} in all"
    elif trained and machine.where == HERE:
        largest = max(trained, key=lambda each: each.flops_per_step)
        width = getattr(largest.whole.model, "d_model", 256)
        rates = matmul_rates(largest.tokens_per_step, width, 4 * width, device=largest.device)
        words += f", {duration(sum(planned.values()) / max(rates.values()))} in all at the very least"
    rounds = sum(len(sweep.rounds) for sweep in sweeps if len(sweep.rates) > 1)
    more = f"; the search for learning rates adds up to {WIDENED * rounds} where the best lies at its ends"
    return [words + (more if rounds else "")]


@contextmanager
def claimed_folder(out: Path, plan: str = PLAN) -> Iterator[None]:
    """The folder, which one process at a time writes to; a start that fails before its `plan` is noted leaves none."""
    if out.exists() and not out.is_dir():
        raise RunError(f"{out}: is a file; give a folder with --out")
    missing = [place for place in (out, *out.parents) if not place.exists()]
    with ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            before = {entry.name for entry in out.iterdir()}
            if not (out / plan).exists() and before - {LOCK, "data", Path(plan).parts[0]}:
                raise ConfigError(f"{out}: holds other files already; give a new or an empty folder with --out")
            stack.enter_context(locked(out / LOCK))
        except BlockingIOError:
            raise RunError(f"{out}: another process compares there; wait for it, or give another --out") from None
        except OSError as error:
            raise RunError(f"{out}: cannot be written: {error.strerror or error}") from None
        stack.callback((out / LOCK).unlink, missing_ok=True)
        try:
            yield
        except (WeftError, OSError):
            if not (out / plan).exists():
                for entry in [entry for entry in out.iterdir() if entry.name not in before]:
                    if entry.is_dir():
                        shutil.rmtree(entry, ignore_errors=True)
                    else:
                        entry.unlink(missing_ok=True)
                with suppress(OSError):
                    for place in missing:  # inside out
                        place.rmdir()
            raise


def _start(experiment: Experiment, place: Workplace) -> tuple[list[ReadyContender], Machine, dict[str, Any]]:
    """The contenders, what they run on, and what is noted of the comparison; a folder with another plan is refused."""
    out, noted = place.out, _noted(place.out)
    asked = json.loads(experiment.model_dump_json(exclude_none=True))
    before = asked if noted is None else noted["asked"]
    if differing := ", ".join(key for key in {**asked, **before} if asked.get(key) != before.get(key)):
        there = f"{out}: holds another comparison (differs in: {differing})"
        raise ConfigError(f"{there}; give another folder with --out, or remove it")
    ready = make_ready(experiment, place.data or out / "data", pick_device().type, log_to_stderr)
    if noted is not None and place.jobs == HERE:
        machine = Machine(noted["machine"]["jobs"], 1)
    else:
        machine = machine_for(ready, place.jobs)
    if noted is None:
        noted = {"asked": asked, "machine": {"jobs": machine.jobs, "threads": machine.threads}}
        noted |= {"command": place.command, "began": time.strftime("%Y-%m-%d %H:%M"), "weft": __version__}
        write_text(out / PLAN, json.dumps(noted, indent=1) + "\n")
    # threads decide the last bit of a sum, so they stay what they were
    return ready, replace(machine, threads=noted["machine"]["threads"]), noted


def _noted(out: Path) -> dict[str, Any] | None:
    if not (out / PLAN).is_file():
        return None
    try:
        found = json.loads(files.read_text(out / PLAN))
        if all(key in found for key in ("asked", "machine", "command", "began")):
            return dict(found)
    except (ValueError, OSError, TypeError):
        pass
    raise RunError(f"{out / PLAN}: not what a comparison wrote; give another folder with --out")


def _measured(contender: ReadyContender, sweep: Sweep, outcomes: Mapping[Job, Outcome]) -> Result:
    jobs = [job for job in sweep.wanted(outcomes) if job in outcomes]
    rates = {share: sweep.rate(share, outcomes)[0] for share in sweep.shares}
    rungs = {Job(sweep.contender, share, rates[share], seed) for share in sweep.shares for seed in sweep.seeds}
    tried = [outcomes[job] for job in jobs if job.share in sweep.rounds and job.seed == sweep.seeds[0]]
    return Result(
        contender.name,
        contender.settings.recipe,
        tuple(outcomes[job] for job in jobs if job in rungs),
        tuple(tried) if len(sweep.rates) > 1 else (),
        flat(contender.settings.changes),
        contender.settings.levels or None,
    )


def _facts(experiment: Experiment, ready: Sequence[ReadyContender], machine: Machine, held_out: int) -> dict[str, str]:
    corpora = {each.corpus.path: each.corpus for each in ready}
    size = min(text.bytes for each in corpora.values() if (text := each.shards.validation) is not None)
    part = f", of which the first {held_out:,} or so are measured" if held_out < size else ""
    tokenizers = [f"{each.tokenizer.kind}, {each.shards.index.vocab_size:,} tokens" for each in corpora.values()]
    learned, jobs = ready[0].corpus.shards.train.bytes, counted(machine.jobs, "job")
    cut = {each.learns_from for each in ready if each.learns_from < len(each.corpus.shards.train)}
    first = f", of which the first {' or '.join(f'{n:,}' for n in sorted(cut))} tokens are read" if cut else ""
    return {
        "text": f"{', '.join(experiment.data.sources)}: {learned:,} bytes to learn from{first}",
        "held out": f"{size:,} bytes{part}",
        "tokenizer": "; ".join(tokenizers),
        "budget": f"{experiment.budget} for each contender and seed",
        "seeds": str(experiment.seeds),
        "machine": f"{device_name(pick_device())}, {platform.machine()}, {jobs} {machine.where}",
        "versions": f"weft {__version__}, torch {torch.__version__}",
    }


def _notes(experiment: Experiment, ready: Sequence[ReadyContender], measured: Sequence[Result]) -> list[str]:
    """How it was measured, and what a reader might take for granted that isn't so."""
    notes = []
    if experiment.rates > 1:
        first, second, third = map(share_text, SEARCH_SHARES)
        notes.append(TEXTS["search"].format(rates=experiment.rates, first=first, second=second, third=third))
    if any(contender.counts for contender in ready):
        notes.append("The points of an n-gram model are parts of the text.")
    if any(contender.whole.batch.carry for contender in ready):
        notes.append(TEXTS["carried"])
    for contender in (each for each in ready if not each.counts):
        epochs = contender.whole.steps * contender.tokens_per_step / max(1, contender.learns_from)
        least = contender.sweep(experiment).shares[0]
        fewest = round(contender.whole.steps * least)
        if fewest < MIN_TELLING_STEPS:
            steps, share = counted(fewest, "step"), share_text(least)
            notes.append(TEXTS["few-steps"].format(name=contender.name, steps=steps, share=share))
        if epochs > 4:
            notes.append(f"{contender.name} reads the text {epochs:.0f} times with the whole budget.")
    for each in measured:
        failed = [outcome for outcome in (*each.outcomes, *each.sweep) if outcome.failed]
        rates = ", ".join(f"{outcome.lr:.3g}" for outcome in failed)
        if failed:
            notes.append(f"{each.name}: {counted(len(failed), 'run')} diverged, at learning rates {rates}.")
    return notes
