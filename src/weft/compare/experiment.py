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
from weft.compare.config import SEARCH_SHARES, Experiment
from weft.compare.contenders import ReadyContender, make_ready
from weft.compare.jobs import Comparison, Job, Outcome, Result, Sweep, share_text
from weft.compare.pools import HERE, Where
from weft.compare.runner import Machine, Runner, Watch, machine_for
from weft.config import flat
from weft.errors import ConfigError, RunError, WeftError, counted
from weft.files import locked, write_text
from weft.progress import log_to_stderr
from weft.training.precision import pick_device
from weft.training.worker import device_name

PLAN, LOCK = "plan.json", ".lock"
MIN_TELLING_STEPS = 50  # in fewer hardly anything is learned
HELD_OUT = {"cpu": 200_000, "cuda": 5_000_000}  # bytes of held-out text that every job is measured on


@dataclass(frozen=True)
class Started:
    """A comparison that is ready to run, or to go on."""

    experiment: Experiment
    contenders: list[ReadyContender]
    machine: Machine
    command: str
    began: str

    @property
    def sweeps(self) -> list[Sweep]:
        """What each contender is put through."""
        return [contender.sweep(self.experiment) for contender in self.contenders]


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
        ready = _start(experiment, place)
        held_out = experiment.held_out or HELD_OUT[ready.contenders[0].device]
        runner = Runner(place.out, {each.name: each for each in ready.contenders}, ready.machine, held_out)
        if experiment.budget.minutes is not None:
            ready = _timed(ready, runner, place.watch)
        outcomes = runner.run(ready.sweeps, place.watch)
        return put_together(ready, outcomes)


def _timed(ready: Started, runner: Runner, watch: Watch) -> Started:
    """The same with as many steps for each contender as its time pays for, by a few steps that are measured first."""
    probes = [Sweep(each.name, (each.rate,), (), (0.0,), (0,)) for each in ready.contenders if not each.counts]
    outcomes = runner.run(probes, watch)
    seconds = 60 * ready.experiment.budget.amount
    timed = []
    for each in ready.contenders:
        if not each.counts:
            probe = outcomes[Job(each.name, 0.0, each.rate, 0)]
            steps = int(seconds * probe.steps / probe.seconds)
            if steps < 1:
                raise ConfigError(
                    f"{each.name}: one step takes {probe.seconds / probe.steps:.1f} s, more than the budget of "
                    f"{ready.experiment.budget}; give more time, or a smaller model or batch.size"
                )
            each = each.lasting(steps)
        timed.append(each)
    runner.contenders = {each.name: each for each in timed}
    return replace(ready, contenders=timed)


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


def _start(experiment: Experiment, place: Workplace) -> Started:
    """Make the text and the contenders ready, and note what was asked; a folder with another plan is refused."""
    out = place.out
    asked = json.loads(experiment.model_dump_json(exclude_none=True))
    noted = _noted(out)
    if noted is not None:
        differing = [key for key in {**asked, **noted["asked"]} if asked.get(key) != noted["asked"].get(key)]
        if differing:
            raise ConfigError(
                f"{out}: holds another comparison (differs in: {', '.join(differing)}); give another folder with "
                "--out, or remove it"
            )
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
    machine = replace(machine, threads=noted["machine"]["threads"])
    return Started(experiment, ready, machine, noted["command"], noted["began"])


def _noted(out: Path) -> dict[str, Any] | None:
    if not (out / PLAN).is_file():
        return None
    try:
        found = json.loads((out / PLAN).read_text("utf-8"))
        if all(key in found for key in ("asked", "machine", "command", "began")):
            return dict(found)
    except (ValueError, OSError, TypeError):
        pass
    raise RunError(f"{out / PLAN}: not what a comparison wrote; give another folder with --out")


# ---- afterwards


def put_together(ready: Started, outcomes: Mapping[Job, Outcome]) -> Comparison:
    """What every contender reached, by the rate that its sweep found."""
    experiment, pairs = ready.experiment, zip(ready.contenders, ready.sweeps, strict=True)
    measured = tuple(_measured(contender, sweep, outcomes) for contender, sweep in pairs)
    title = f"{len(measured)} models at {experiment.budget}"
    trained = [contender.name for contender in ready.contenders if not contender.counts]
    baseline = experiment.baseline or (trained or [measured[0].name])[0]
    facts, notes = _facts(ready), _notes(ready, measured)
    return Comparison(title, ready.command, baseline, measured, facts, notes, experiment.varied or None)


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


def _facts(ready: Started) -> dict[str, str]:
    experiment, first = ready.experiment, ready.contenders[0]
    corpora = {each.corpus.path: each.corpus for each in ready.contenders}
    held_out = [corpus.shards.validation for corpus in corpora.values()]
    size = min(text.bytes for text in held_out if text is not None)
    read = min(size, experiment.held_out or HELD_OUT[first.device])
    tokenizers = [f"{each.tokenizer.kind}, {each.shards.index.vocab_size:,} tokens" for each in corpora.values()]
    cores = f"{counted(ready.machine.jobs, 'job')} {ready.machine.where}"
    return {
        "text": f"{', '.join(experiment.data.sources)}: {first.corpus.shards.train.bytes:,} bytes to learn from",
        "held out": f"{size:,} bytes" + ("" if read == size else f", of which the first {read:,} or so are measured"),
        "tokenizer": "; ".join(tokenizers),
        "budget": f"{experiment.budget} for each contender and seed",
        "seeds": str(experiment.seeds),
        "machine": f"{device_name(pick_device())}, {platform.machine()}, {cores}",
        "versions": f"weft {__version__}, torch {torch.__version__}",
        "began": ready.began,
    }


def _notes(ready: Started, measured: Sequence[Result]) -> list[str]:
    """How it was measured, and what a reader might take for granted that isn't so."""
    experiment = ready.experiment
    notes = []
    if experiment.rates > 1:
        first, second, third = map(share_text, SEARCH_SHARES)
        notes.append(
            f"Learning rates were searched with the first seed: {experiment.rates} around the recipe's own, each twice "
            f"the one before it, with {first}; the best third of them with {second}; the best one, and half of it, "
            f"with {third}. Where none was clearly better than the smallest, or the largest was the best, the search "
            "went on there. Each point has the rate that was found with its own share of the "
            "budget, and the whole budget that of a third."
        )
    if any(contender.counts for contender in ready.contenders):
        notes.append("The points of an n-gram model are parts of the text.")
    if any(contender.whole.batch.carry for contender in ready.contenders):
        notes.append(
            "Recurrent models read the text on and on, at several places side by side, and carry their states; all "
            "others read the same windows in the same order where their batches are the same."
        )
    for contender in ready.contenders:
        if contender.counts:
            continue
        epochs = contender.whole.steps * contender.tokens_per_step / max(1, len(contender.corpus.shards.train))
        fewest = round(contender.whole.steps * experiment.shares[0])
        if fewest < MIN_TELLING_STEPS:
            notes.append(
                f"{contender.name} takes but {counted(fewest, 'step')} with {share_text(experiment.shares[0])}, in "
                "which it learns little more than how often tokens occur; a larger budget or a smaller batch.size tells"
                " more."
            )
        if epochs > 4:
            notes.append(f"{contender.name} reads the text {epochs:.0f} times with the whole budget.")
    for each in measured:
        failed = [outcome for outcome in (*each.outcomes, *each.sweep) if outcome.failed]
        rates = ", ".join(f"{outcome.lr:.3g}" for outcome in failed)
        if failed:
            notes.append(f"{each.name}: {counted(len(failed), 'run')} diverged, at learning rates {rates}.")
    return notes
