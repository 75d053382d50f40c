"""Run a comparison from start to end: prepare the contenders, run their jobs, and collect the results."""

import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weft import __version__
from weft.compare.config import PLAN, SEARCH_SHARES, Budget, Experiment
from weft.compare.contenders import ReadyContender, prepare_contenders
from weft.compare.jobs import MAX_WIDENINGS, Comparison, Job, Outcome, Result, Sweep, best_sizes, share_text
from weft.compare.pools import HERE, JobScheduler
from weft.compare.runner import JobResources, Runner, Watch, resources_for
from weft.config import flat
from weft.costs.units import duration
from weft.errors import ConfigError, RunError, WeftError, counted, listed
from weft.figures.prose import prose
from weft.machine import matmul_rates, pick_device
from weft.progress import log_to_stderr
from weft.runs.checkpoint import read_json
from weft.runs.folder import remove_start
from weft.storage.files import locked, write_text
from weft.training.worker import device_name

TEXTS = prose(__file__)
LOCK = ".lock"
MIN_TELLING_STEPS = 50  # a note warns of runs with fewer steps, in which hardly anything is learned
MAX_EPOCHS_UNNOTED = 4  # a note says how often a contender reads the text if it is more often
HELD_OUT_BYTES = {"cpu": 200_000, "cuda": 5_000_000}  # held-out text that every job is evaluated on


def compare(
    experiment: Experiment,
    out: Path,
    *,
    data: Path | None = None,
    jobs: JobScheduler = HERE,
    watch: Watch = lambda progress: None,
    command: str = "",
) -> Comparison:
    """Run a comparison in the folder `out`, or continue it, and return its results.

    The tokenized text is in `data`, by default inside `out`. `watch` is called while jobs run. `command` is what the
    page shows to repeat the comparison.
    """
    with claim_folder(out):
        contenders, resources, plan = _start(experiment, out, data or out / "data", jobs=jobs, command=command)
        held_out = experiment.held_out or HELD_OUT_BYTES[contenders[0].device]
        runner = Runner(out, {each.name: each for each in contenders}, resources, held_out=held_out)
        if experiment.budget.minutes is not None:
            runner.contenders = _timed(runner, experiment.budget, watch)
            contenders = list(runner.contenders.values())
        sweeps = [each.sweep(experiment) for each in contenders]
        skipped = [line for each in contenders for line in each.skipped(experiment)]
        small = [name for name in experiment.contenders if name not in {each.name for each in contenders}]
        for line in (*skipped, *_forecast(experiment.budget, runner, sweeps)):
            log_to_stderr(line)
        outcomes = runner.run(sweeps, watch)
    results = tuple(_result(*pair, outcomes) for pair in zip(contenders, sweeps, strict=True))
    first = next((each.family for each in contenders if not each.is_ngram), results[0].name)
    if experiment.sizes == "best":
        families = dict[str, list[Result]]()
        for each, result in zip(contenders, results, strict=True):
            families.setdefault(each.family, []).append(result)
        results = tuple(best_sizes(name, sizes) for name, sizes in families.items())
        used = {outcome.contender for result in results for outcome in result.outcomes}
        contenders = [each for each in contenders if each.name in used]
    too_small = [TEXTS["too-small"].format(names=listed(small))] if small else []
    return Comparison(
        title=f"{len(results)} models at {experiment.budget}",
        command=plan["command"],
        baseline=experiment.baseline or first,
        contenders=results,
        facts={**_facts(experiment, contenders, resources, held_out=held_out), "began": plan["began"]},
        notes=[*(f"{line}." for line in skipped), *too_small, *_notes(experiment, contenders, results)],
        varied=experiment.varied or None,
        flops=experiment.budget.flops,
    )


def _timed(runner: Runner, budget: Budget, watch: Watch) -> dict[str, ReadyContender]:
    """Return the contenders with as many steps as their minutes pay for, by the measured time of a few steps."""
    timed = dict(runner.contenders)
    trained = {name: each for name, each in timed.items() if not each.is_ngram}
    sweeps = [Sweep(name, rates=(each.rate,), rounds=(), shares=(0.0,), seeds=(0,)) for name, each in trained.items()]
    outcomes = runner.run(sweeps, watch)
    for name, contender in trained.items():
        probe = outcomes[Job(name, 0.0, contender.rate, seed=0)]
        steps = int(60 * budget.amount * probe.steps / probe.seconds)
        if steps < 1:
            slow = f"one step takes {probe.seconds / probe.steps:.1f} s, more than the budget of {budget}"
            raise ConfigError(f"{name}: {slow}; give more time, or a smaller model or batch.size")
        timed[name] = contender.with_steps(steps)
    return timed


def _forecast(budget: Budget, runner: Runner, sweeps: Sequence[Sweep]) -> list[str]:
    """Say how many runs remain, and how long they take: at least, at the device's peak rate of matrix products."""
    remaining = {job: flops for job, flops in runner.planned(sweeps).items() if job not in runner.outcomes}
    if not remaining:
        return []
    line, resources = f"{counted(len(remaining), 'run')} to go", runner.resources
    trained = [each for each in runner.contenders.values() if not each.is_ngram]
    if budget.minutes is not None:
        seconds = 60 * budget.minutes * sum(job.share for job in remaining) / resources.jobs
        line += f", about {duration(seconds)} in total"
    elif trained and resources.scheduler == HERE:
        largest = max(trained, key=lambda each: each.flops_per_step)
        width = getattr(largest.full.model, "d_model", 256)
        rates = matmul_rates(largest.tokens_per_step, width, 4 * width, device=largest.device)
        line += f", at least {duration(sum(remaining.values()) / max(rates.values()))} in total"
    rounds = sum(len(sweep.rounds) for sweep in sweeps if len(sweep.rates) > 1)
    more = f"; up to {MAX_WIDENINGS * rounds} more if the best learning rates are at the ends of the search"
    return [line + (more if rounds else "")]


@contextmanager
def claim_folder(out: Path, plan: str = PLAN) -> Iterator[None]:
    """Create and lock a comparison's folder; a start that fails before its `plan` is written leaves no files."""
    if out.exists() and not out.is_dir():
        raise RunError(f"{out}: is a file; give a folder with --out")
    created = [folder for folder in (out, *out.parents) if not folder.exists()]
    with ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            before = {entry.name for entry in out.iterdir()}
            if not (out / plan).exists() and before - {LOCK, "data", Path(plan).parts[0]}:
                raise ConfigError(f"{out}: holds other files; give a new or an empty folder with --out")
            stack.enter_context(locked(out / LOCK))
        except BlockingIOError:
            raise RunError(f"{out}: another process uses this folder; wait for it, or give another --out") from None
        except OSError as error:
            raise RunError(f"{out}: cannot be written: {error.strerror or error}") from None
        stack.callback((out / LOCK).unlink, missing_ok=True)
        try:
            yield
        except (WeftError, OSError):
            if not (out / plan).exists():
                remove_start([entry for entry in out.iterdir() if entry.name not in before], created)
            raise


def _start(
    experiment: Experiment, out: Path, data: Path, *, jobs: JobScheduler, command: str
) -> tuple[list[ReadyContender], JobResources, dict[str, Any]]:
    """Prepare the contenders and the folder's plan.json; refuse a folder with another comparison."""
    plan, request = read_json(out / PLAN), json.loads(experiment.model_dump_json(exclude_none=True))
    if (out / PLAN).is_file() and not {"asked", "machine", "command", "began"} <= plan.keys():
        raise RunError(f"{out / PLAN}: not written by weft compare, or damaged; give another folder with --out")
    earlier = plan.get("asked", request)
    if differing := ", ".join(key for key in {**request, **earlier} if request.get(key) != earlier.get(key)):
        problem = f"{out}: holds another comparison (differs in: {differing})"
        raise ConfigError(f"{problem}; give another folder with --out, or remove it")
    contenders = prepare_contenders(experiment, data, pick_device().type, log=log_to_stderr)
    resources = JobResources(plan["machine"]["jobs"], 1) if plan and jobs == HERE else resources_for(contenders, jobs)
    if not plan:
        plan = {"asked": request, "machine": {"jobs": resources.jobs, "threads": resources.threads}}
        plan |= {"command": command, "began": time.strftime("%Y-%m-%d %H:%M"), "weft": __version__}
        write_text(out / PLAN, json.dumps(plan, indent=1) + "\n")
    # the number of threads can change the last bit of a sum, so it stays the same
    return contenders, replace(resources, threads=plan["machine"]["threads"]), plan


def _result(contender: ReadyContender, sweep: Sweep, outcomes: Mapping[Job, Outcome]) -> Result:
    jobs = [job for job in sweep.jobs(outcomes) if job in outcomes]
    rates = {share: sweep.rate(share, outcomes)[0] for share in sweep.shares}
    rungs = {Job(sweep.contender, share, rates[share], seed=seed) for share in sweep.shares for seed in sweep.seeds}
    tried = [outcomes[job] for job in jobs if job.share in sweep.rounds and job.seed == sweep.seeds[0]]
    return Result(
        contender.name,
        contender.settings.recipe,
        tuple(outcomes[job] for job in jobs if job in rungs),
        sweep=tuple(tried) if len(sweep.rates) > 1 else (),
        changes=flat(contender.settings.changes),
        levels=contender.settings.levels or None,
        year=contender.settings.year,
        about=contender.settings.about,
    )


def _facts(
    experiment: Experiment, contenders: Sequence[ReadyContender], resources: JobResources, *, held_out: int
) -> dict[str, str]:
    texts = {each.text.path: each.text for each in contenders}
    size = min(split.bytes for text in texts.values() if (split := text.shards.validation) is not None)
    part = f", of which about the first {held_out:,} are evaluated" if held_out < size else ""
    tokenizers = [f"{text.tokenizer.kind}, {text.shards.index.vocab_size:,} tokens" for text in texts.values()]
    limits = {each.training_tokens for each in contenders if each.training_tokens < len(each.text.shards.train)}
    first = f", of which the first {' or '.join(f'{n:,}' for n in sorted(limits))} tokens are read" if limits else ""
    training, jobs = contenders[0].text.shards.train.bytes, counted(resources.jobs, "job")
    return {
        "text": f"{', '.join(experiment.data.sources)}: {training:,} bytes to train on{first}",
        "held out": f"{size:,} bytes{part}",
        "tokenizer": "; ".join(tokenizers),
        "budget": f"{experiment.budget} for each contender and seed",
        "seeds": str(experiment.seeds),
        "machine": f"{device_name(pick_device())}, {platform.machine()}, {jobs} {resources.scheduler}",
        "versions": f"weft {__version__}, torch {torch.__version__}",
    }


def _notes(experiment: Experiment, contenders: Sequence[ReadyContender], results: Sequence[Result]) -> list[str]:
    """Return remarks on the method, and on everything that limits the conclusions."""
    notes = [TEXTS["sizes"]] if experiment.sizes == "best" else []
    if experiment.rates > 1:
        first, second, third = map(share_text, SEARCH_SHARES)
        notes.append(TEXTS["search"].format(rates=experiment.rates, first=first, second=second, third=third))
    if any(contender.is_ngram for contender in contenders) and len(experiment.shares) > 1:
        notes.append("The points of an n-gram model are shares of the text.")
    if any(contender.full.batch.carry for contender in contenders):
        notes.append(TEXTS["carried"])
    for contender in (each for each in contenders if not each.is_ngram):
        epochs = contender.full.steps * contender.tokens_per_step / max(1, contender.training_tokens)
        smallest = contender.sweep(experiment).shares[0]
        steps = round(contender.full.steps * smallest)
        if steps < MIN_TELLING_STEPS:
            text, share = counted(steps, "step"), share_text(smallest)
            notes.append(TEXTS["few-steps"].format(name=contender.name, steps=text, share=share))
        if epochs > MAX_EPOCHS_UNNOTED:
            notes.append(f"{contender.name} reads the text {epochs:.0f} times with the whole budget.")
    for result in results:
        failed = [outcome for outcome in (*result.outcomes, *result.sweep) if outcome.failed]
        rates = ", ".join(f"{outcome.lr:.3g}" for outcome in failed)
        if failed:
            notes.append(f"{result.name}: {counted(len(failed), 'run')} diverged, at learning rates {rates}.")
    return notes
