"""The training loop: steps, evaluations, checkpoints and interruptions, from a settled recipe to a finished run."""

import math
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from weft import __version__
from weft.models.base import LanguageModel
from weft.models.config import NGram
from weft.train import checkpoint
from weft.train.choose import Choice, check_trainable, unsettled
from weft.train.config import Recipe
from weft.train.counting import count_corpus
from weft.train.feed import Corpus, feed
from weft.train.metrics import Display, Journal, Say, check_log, say_on_stderr
from weft.train.precision import arithmetic, autocast, pick_device
from weft.train.run import RunFolder, RunResult, claim, found, open_run
from weft.train.step import StepResult, optimisation_step
from weft.train.throughput import flops_per_token, peak_flops

Evaluator = Callable[[LanguageModel], Mapping[str, float]]  # gives at least "loss", which decides what is best


class TokenizerFile(Protocol):
    """What the loop asks of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    def save(self, path: Path) -> object: ...


@dataclass
class Progress:
    """All that the loop itself remembers from step to step; it is saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    waiting: list[list[float]] = field(default_factory=list)  # loss, nll, norm, targets of steps not yet logged
    loss: float = math.nan
    best: float | None = None
    best_step: int | None = None
    validation: dict[str, float] = field(default_factory=dict)

    def notes(self) -> dict[str, Any]:
        """As JSON. Python writes floats so that they read back to the same bits."""
        return dict(vars(self))


def train(
    recipe: Recipe,
    run_dir: Path | str | RunFolder,
    *,
    corpus: Corpus | Sequence[Corpus],
    tokenizer: TokenizerFile,
    evaluators: Sequence[Evaluator] = (),
    choices: Sequence[Choice] = (),
    command: str | None = None,
    device: torch.device | None = None,
    quiet: bool = False,
    say: Say = say_on_stderr,
) -> RunResult:
    """Train the recipe's model from fresh weights in a new run folder (or one that `claim` gave).

    The recipe is settled (`weft.train.choose.settle`); `choices` and `command` are noted for the report.
    Ctrl-C finishes the step, saves, says how to go on and raises KeyboardInterrupt.
    """
    missing = unsettled(recipe)
    assert not missing, f"settle the recipe first: {missing}"
    check_trainable(recipe, tokenizer.vocab_size)
    check_log(recipe.log)
    batches = feed(recipe, corpus) if not isinstance(recipe.model, NGram) else None
    run = run_dir if isinstance(run_dir, RunFolder) else claim(run_dir)
    tokenizer.save(run.path)
    found(run, recipe)
    place = device or pick_device()
    run.event(
        "start",
        command=command,
        choices=[[c.key, str(c.value), c.why] for c in choices],
        corpus=_fingerprints(corpus),
        weft=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        device=_device_name(place),
    )
    torch.manual_seed(recipe.seed)
    if batches is None:
        return count_corpus(recipe, run, corpus, evaluators, quiet)
    model = recipe.model.build().to(place)
    return _Loop(recipe, run, model, batches, evaluators, place, quiet, say).go(Progress())


def resume(
    run_dir: Path | str | RunFolder,
    *,
    corpus: Corpus | Sequence[Corpus],
    evaluators: Sequence[Evaluator] = (),
    device: torch.device | None = None,
    quiet: bool = False,
    say: Say = say_on_stderr,
) -> RunResult:
    """Go on from a run's newest whole checkpoint, as if it had never stopped. A finished run is returned as it is."""
    run = run_dir if isinstance(run_dir, RunFolder) else open_run(run_dir)
    recipe = run.recipe()
    place = device or pick_device()
    torch.manual_seed(recipe.seed)
    if isinstance(recipe.model, NGram):
        return count_corpus(recipe, run, corpus, evaluators, quiet)
    batches = feed(recipe, corpus)
    model = recipe.model.build().to(place)
    loop = _Loop(recipe, run, model, batches, evaluators, place, quiet, say)
    progress = Progress()
    if checkpoint.checkpoints(run.checkpoints):
        path, damage = checkpoint.newest_good(run.checkpoints)
        for line in damage:
            run.event("damage", line=line)
            say(f"{line}; going on from {path.name}")
        progress = Progress(**checkpoint.load(path, model, loop.optimizer).notes)
        for later in checkpoint.checkpoints(run.checkpoints):
            if checkpoint.step_of(later) > progress.step:
                checkpoint.remove(later)
    run.event("resume", step=progress.step, device=_device_name(place))
    return loop.go(progress)


class _Loop:
    """One run in progress: what its steps need, and what they leave behind."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        model: LanguageModel,
        batches: Any,
        evaluators: Sequence[Evaluator],
        device: torch.device,
        quiet: bool,
        say: Say,
    ):
        self.recipe, self.run, self.model, self.batches = recipe, run, model, batches
        self.evaluators, self.device, self.quiet, self.say = evaluators, device, quiet, say
        self.optimizer = recipe.optimizer.build(model)
        self.objective = recipe.objective.build(bool(recipe.compile))
        d_model: int = recipe.model.d_model  # type: ignore[union-attr]
        assert recipe.steps is not None
        self.steps = recipe.steps
        self.rate = recipe.schedule.build(recipe.optimizer.lr or 0.0, recipe.steps, d_model)
        self.pending: list[StepResult] = []

    def go(self, progress: Progress) -> RunResult:
        recipe, started = self.recipe, time.perf_counter()
        assert recipe.precision is not None
        with (
            arithmetic(recipe.precision, recipe.deterministic),
            compiled(self.model, bool(recipe.compile)),
            interruptions(self.say) as interrupted,
            Display(recipe, progress.step, self.say, self.quiet) as display,
        ):
            journal = Journal(self.run, recipe.log.tensorboard, after=progress.step)
            try:
                self._announce(display, progress)
                self._steps(progress, journal, display, interrupted)
            finally:
                journal.close()
        seconds = time.perf_counter() - started
        self.run.event("finish", step=progress.step, seconds=round(seconds, 3))
        return RunResult(
            self.run, self.model, progress.step, progress.loss, progress.validation, progress.best_step, seconds
        )

    def _announce(self, display: Display, progress: Progress) -> None:
        parameters = sum(p.numel() for p in self.model.parameters())
        vocab_size = self.recipe.model.vocab_size
        self.run.event("model", parameters=parameters)
        where = f"from step {progress.step}" if progress.step else "from fresh weights"
        display.line(
            f"training {parameters:,} parameters {where} on {_device_name(self.device)}; "
            f"the loss should begin near ln {vocab_size} = {math.log(vocab_size):.2f} and fall"
        )

    def _steps(self, progress: Progress, journal: Journal, display: Display, interrupted: "Interrupted") -> None:
        recipe = self.recipe
        log, evaluate, save = recipe.log.every, recipe.evaluate.every, recipe.checkpoint.every
        assert log is not None and evaluate is not None and save is not None and recipe.precision is not None
        clock = Clock(progress.step, progress.tokens)
        self.model.train()
        for parts in self.batches.stream(progress.step + 1, self.steps, self.device):
            step = progress.step + 1
            result = optimisation_step(
                self.model,
                self.optimizer,
                self.objective,
                parts,
                self.rate(step),
                recipe.optimizer.clip,
                recipe.precision,
                self.device,
            )
            self.pending.append(result)
            progress.step, progress.tokens = step, progress.tokens + result.tokens
            display.step(step)
            last = step == self.steps
            if step % log == 0 or last:
                self._log(progress, journal, display, clock)
            better = False
            if self.evaluators and (step % evaluate == 0 or last):
                with clock.paused():
                    better = self._evaluate(progress, journal, display)
            if step % save == 0 or last or better or interrupted:
                with clock.paused():
                    self._save(progress, journal, better)
            if interrupted and not last:
                self._stop(progress, interrupted)

    def _read(self, progress: Progress) -> None:
        """Fetch what is still on the device: one wait for many steps."""
        if self.pending:
            values = torch.stack([torch.stack([r.loss, r.nll, r.gradient_norm]) for r in self.pending]).tolist()
            progress.waiting += [[*v, r.tokens] for v, r in zip(values, self.pending, strict=True)]
            self.pending.clear()

    def _log(self, progress: Progress, journal: Journal, display: Display, clock: "Clock") -> None:
        self._read(progress)
        targets = sum(row[3] for row in progress.waiting)
        loss, nll = (sum(row[i] * row[3] for row in progress.waiting) / targets for i in (0, 1))
        norm = max(row[2] for row in progress.waiting)
        progress.waiting.clear()
        progress.loss = loss
        step = progress.step
        values = {"loss": loss, "gradient_norm": norm, "lr": self.rate(step)}
        if nll != loss:  # smoothing or z-loss: the loss is not −log p
            values["nll"] = nll
        journal.metrics(step, {**values, "tokens": progress.tokens, "epoch": round(self.batches.epoch(step), 6)})
        speed = clock.lap(step, progress.tokens)
        peak = peak_flops(self.device)
        if peak is not None:
            length = self.recipe.batch.length
            assert length is not None
            work = flops_per_token(self.model, length)
            speed["mfu"] = work * speed["tokens_per_second"] / peak
        if self.device.type == "cuda":
            speed["memory"] = torch.cuda.max_memory_allocated(self.device)
        journal.timings(step, speed)
        shown = {key: value for key, value in speed.items() if key in ("tokens_per_second", "mfu")}
        display.figures(step, {"loss": loss, "gradient_norm": norm, **shown})

    def _evaluate(self, progress: Progress, journal: Journal, display: Display) -> bool:
        """Ask the evaluators; whether the loss is the lowest so far."""
        assert self.recipe.precision is not None
        values: dict[str, float] = {}
        self.model.eval()
        with torch.no_grad(), autocast(self.recipe.precision, self.device):
            for evaluator in self.evaluators:
                values |= evaluator(self.model)
        self.model.train()
        progress.validation = values
        journal.metrics(progress.step, {f"validation_{key}": value for key, value in values.items()})
        self.run.event("evaluation", step=progress.step, **values)
        better = math.isfinite(values["loss"]) and (progress.best is None or values["loss"] < progress.best)
        if better:
            progress.best, progress.best_step = values["loss"], progress.step
        figures = " · ".join(f"{key.replace('_', ' ')} {value:.3f}" for key, value in values.items())
        display.line(f"step {progress.step}: validation {figures}{' (best so far)' if better else ''}")
        return better

    def _save(self, progress: Progress, journal: Journal, best: bool) -> None:
        self._read(progress)
        journal.sync()
        folder, keep = self.run.checkpoints, self.recipe.checkpoint.keep
        path = checkpoint.save(folder, progress.step, self.model, self.optimizer, progress.notes(), keep, best)
        self.run.event("checkpoint", step=progress.step, path=path.name, best=best)

    def _stop(self, progress: Progress, interrupted: "Interrupted") -> None:
        self.run.event("interrupted", step=progress.step, signal=interrupted.signal)
        self.say(
            f"stopped after step {progress.step} of {self.steps}, saved; "
            f"go on with `weft train --resume {self.run.path}`"
        )
        if interrupted.signal == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt


class Clock:
    """Seconds of training since the last reading, without what evaluations and checkpoints took."""

    def __init__(self, step: int, tokens: int):
        self._since, self._step, self._tokens = time.perf_counter(), step, tokens

    def lap(self, step: int, tokens: int) -> dict[str, float]:
        """Speed since the last lap."""
        now = time.perf_counter()
        seconds, steps, read = max(1e-9, now - self._since), step - self._step, tokens - self._tokens
        self._since, self._step, self._tokens = now, step, tokens
        return {"seconds": round(seconds, 6), "steps": steps, "tokens_per_second": read / seconds}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that doesn't count."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began


@dataclass
class Interrupted:
    """Whether someone asked the run to stop, and by which signal."""

    signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def interruptions(say: Say) -> Iterator[Interrupted]:
    """The first Ctrl-C or SIGTERM is noted, for the loop to stop after the step; the second one ends at once."""
    asked = Interrupted()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may take signals
        yield asked
        return

    def note(number: int, frame: object) -> None:
        if asked.signal is not None:
            raise KeyboardInterrupt
        asked.signal = number
        say("stopping after this step; once more to stop at once, without saving")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def compiled(model: LanguageModel, wanted: bool) -> Iterator[None]:
    """`model.features` through torch.compile for the time of the run."""
    if not wanted:
        yield
        return
    model.features = torch.compile(model.features)
    try:
        yield
    finally:
        del model.features  # the class's own again


def _fingerprints(corpus: Corpus | Sequence[Corpus]) -> list[str]:
    """Hashes of the prepared texts; a text that was made in memory has none."""
    corpora = corpus if isinstance(corpus, Sequence) else [corpus]
    return [c.fingerprint for c in corpora if hasattr(c, "fingerprint")]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} CPU threads"
