"""The training loop: steps, evaluations, checkpoints and interruptions, from a settled recipe to a finished run."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.costs.count import count
from weft.data.batch import Batch
from weft.parallel import mesh
from weft.parallel.passes import Parallel
from weft.parallel.ranks import reaching
from weft.recipe.config import SettledRecipe
from weft.runs.folder import RunFolder
from weft.runs.journal import FollowerJournal, Journal
from weft.training import learner, schedule
from weft.training.compiled import Compiled, can_be_captured, compiled, evaluations_pay
from weft.training.display import Clock, Display, display, expectations
from weft.training.evaluation import Evaluation
from weft.training.guard import Guard
from weft.training.learner import Learner, Saver, roll_back
from weft.training.loader import shared
from weft.training.objective import Objective
from weft.training.precision import arithmetic, slow_precision
from weft.training.preflight import Need, Preflight, check_model
from weft.training.state import RunResult, TrainingState
from weft.training.step import OptimisationStep, StepResult
from weft.training.worker import Interrupted, Worker, device_use, interruptions


class Loop:
    """One run in progress: what its steps need, and what they leave behind."""

    def __init__(self, recipe: SettledRecipe, run: RunFolder, objective: Objective[Any], worker: Worker):
        self.recipe, self.run, self.objective, self.worker = recipe, run, objective, worker
        self.mesh = mesh.build(recipe.parallel, worker.ranks, worker.device)
        check_model(recipe, worker.device, self.mesh.layout)
        self.loader = shared(objective.loader, recipe, self.mesh.readers)
        if self.mesh.splits:
            from weft.training import sharded

            self.learner: Learner = sharded.start(recipe, self.mesh, worker.device)
        else:
            self.learner = learner.start(recipe, self.mesh, worker.device)
        self.model = self.learner.model
        self.evaluation = Evaluation(recipe, run, self.learner, objective, worker)
        d_model: int = recipe.model.d_model  # type: ignore[union-attr]
        self.rate = schedule.build(recipe.schedule, recipe.optimizer.lr or 0.0, recipe.steps, d_model)
        self.chance = recipe.objective.chance(recipe.model.vocab_size)
        self.flops_per_token = count(recipe.model, recipe.batch.length, recipe.adapter).training()
        self.pending: list[StepResult] = []
        self.limits = torch.zeros(2, device=worker.device)
        self.compiled: Compiled | None = None

    def go(self, state: TrainingState, begin: Callable[[], None] | None = None) -> RunResult:
        """From `state` to the last step; `begin` is called once the pre-flight has passed."""
        recipe, ranks, started = self.recipe, self.worker.ranks, time.perf_counter()
        capture = can_be_captured(recipe, self.model, self.loader, self.worker)
        pays = evaluations_pay(recipe, self.flops_per_token, self.worker.device)
        with (
            arithmetic(recipe.precision, recipe.deterministic),
            compiled(self.model, recipe.compile and not self.mesh.splits, capture, pays) as self.compiled,
            interruptions(self.worker.log, ranks) as interrupted,
            display(recipe.steps, state.step, self.worker.log, self.worker.quiet) as shown,
        ):
            if self._finished(state):
                shown.line(f"{self.run.path}: finished after step {state.step}; nothing is left to train")
            else:
                self._preflight(shown, state)
            if begin is not None:
                begin()
            journal = (Journal if ranks.leads else FollowerJournal)(self.run, recipe, after=state.step)
            saver = Saver(self.run, self.learner.write, recipe.checkpoint.keep, journal.sync)
            try:
                while not self._finished(state):
                    since = self._stretch(state, journal, saver, shown, interrupted)
                    saver.wait()
                    if since is not None:
                        state = self._roll_back(state, since, journal, shown)
                saver.finish()
                self.evaluation.average(state, shown)
            except Exception:
                saver.wait()  # what is being written may be the last good state
                raise
            finally:
                journal.close()
                if ranks.leads:  # whether it ended, was stopped or failed
                    self.evaluation.report(last=True)
        seconds = time.perf_counter() - started
        self.run.event("finish", step=state.step, seconds=round(seconds, 3))
        return RunResult(self.run, self.model, state.step, state.loss, state.validation, state.best_step, seconds)

    def _preflight(self, display: Display, state: TrainingState) -> None:
        """Say what to expect, and try everything once. With `batch.micro` = auto it finds how many rows fit at a time;
        nothing else changes."""
        sizes = self.learner.parallel.sizes
        self.run.event("model", parameters=sizes[0])
        for line in expectations(self.recipe, sizes, state.step, self.worker.device):
            display.line(line)
        if (warning := slow_precision(self.recipe.precision, self.worker.device)) is not None:
            display.line(warning)
        first, auto, device = state.step + 1, self.recipe.batch.micro == "auto", self.worker.device
        if auto and state.micro is not None:
            self.loader = replace(self.loader, micro=state.micro)
        self._set_limits(Guard())
        step = self._optimisation_step()
        if not self.mesh.splits:  # each process tries for itself how much fits
            step = replace(step, parallel=Parallel(self.model))

        def batch() -> Batch:
            return self.loader.batch(first + state.guard.shift)

        def evaluate() -> None:  # on a processor, of more than a step reads it would take longer than the step itself
            self.evaluation.measure(batch().tokens.numel() if device.type == "cpu" else None)

        scratch = self.run.scratch
        if self.mesh.splits:  # else each process writes for itself
            scratch = Path(self.worker.ranks.share(lambda: str(scratch)))
        take, need = partial(self._step, step, step=first, rate=1.0), Need(self.recipe, batch, self.mesh.layout)
        place = first + state.guard.shift
        tried = Preflight(self.learner, self.loader, take, evaluate, device, need, first=place, auto=auto)
        findings = tried.run(scratch, asdict(state))
        if auto:
            state.micro = self.worker.ranks.least(findings.micro)
            findings = replace(findings, micro=state.micro)
            self.loader = replace(self.loader, micro=state.micro)
        self.run.event("preflight", **vars(findings))
        display.line(f"pre-flight: {findings}")
        if (crowded := findings.crowded(self.recipe.checkpoint.keep)) is not None:
            display.line(crowded)

    def _finished(self, state: TrainingState) -> bool:
        """Whether no step is left to take, or `evaluate.patience` is at its end."""
        return state.step >= self.recipe.steps or self._enough(state)

    def _enough(self, state: TrainingState) -> bool:
        patience = self.recipe.evaluate.patience
        return patience is not None and state.worse >= patience

    def _optimisation_step(self) -> OptimisationStep:
        learner, recipe = self.learner, self.recipe
        settings = self.worker.device, recipe.precision, recipe.optimizer.clip, recipe.batch.size or 0
        return OptimisationStep(learner.parallel, learner.optimizer, self.objective.loss, *settings)

    def _step(self, take: OptimisationStep, parts: Sequence[Batch], step: int, rate: float) -> StepResult:
        if self.compiled is not None:
            self.compiled.whole = len(parts) == 1
        with reaching(f"at step {step}", step=True):
            return take(parts, rate * self.rate(step), self.limits)

    def _stretch(
        self, state: TrainingState, journal: Journal, saver: Saver, display: Display, interrupted: Interrupted
    ) -> int | None:
        """Steps to the end, or to where the guard wants to roll back: then the step at which the trouble began."""
        recipe, guard, ranks = self.recipe, state.guard, self.worker.ranks
        log, evaluate, save = recipe.log.every, recipe.evaluate.every, recipe.checkpoint.every
        clock, take = Clock(state.step, state.tokens), self._optimisation_step()
        self.model.train()
        self._set_limits(guard)
        first, last_of_all = state.step + 1 + guard.shift, recipe.steps + guard.shift
        for parts in self.loader.stream(first, last_of_all, self.worker.device):
            step = state.step + 1
            self.pending.append(self._step(take, parts, step, guard.rate))
            state.step = step
            display.step(step)
            last = step == recipe.steps
            # the guard looks at steps that the recipe fixes: a run that was interrupted in between sees the same
            since = self._look(state, display) if step % log == 0 or step % save == 0 or last else None
            if step % log == 0 or last:
                self._log(state, journal, display, clock)
                interrupted.agree(ranks)
                if (news := saver.news()) is not None:
                    display.line(news)
            if since is not None:
                return since
            better = False
            if self.objective.holds_out and (step % evaluate == 0 or last):
                with clock.paused(), reaching(f"in the evaluation after step {step}"):
                    if saver.lost_best:
                        state.best, saver.lost_best = None, False
                    better = self.evaluation.evaluate(state, journal, display)
            # a checkpoint that the recipe doesn't ask for must leave no trace in what it decides
            planned = step % save == 0 or better or self._finished(state)
            if planned or interrupted:
                with clock.paused():
                    self._read(state)
                    if ranks.leads or self.mesh.splits:  # replicas hold the same state
                        saver.save(step, lambda: self.learner.copy(state.step, asdict(state)), better, not planned)
            if self._enough(state) and not last:
                self._stop_early(state, display)
                return None
            if interrupted and not last:
                saver.finish()
                ranks.wait()  # torchrun ends all when one has ended: not before the state is on the disk
                self._stop(state, interrupted)
        return None

    def _read(self, state: TrainingState) -> None:
        if self.pending:
            found = [torch.stack([r.loss, r.nll, r.gradient_norm, r.discarded]) for r in self.pending]  # type: ignore[list-item]
            counts = torch.tensor([[r.targets, r.tokens] for r in self.pending])
            self.mesh.counters.sum_([counts])
            for values, (targets, tokens) in zip(torch.stack(found).tolist(), counts.tolist(), strict=True):
                state.waiting.append([*values[:3], max(1, targets), values[3]])
                state.tokens += tokens
            self.pending.clear()

    def _set_limits(self, guard: Guard) -> None:
        self.limits = torch.tensor(guard.limits(self.recipe.guard), device=self.worker.device)

    def _look(self, state: TrainingState, display: Display) -> int | None:
        """Show the guard the steps since its last look; where the trouble began, if it wants to roll back."""
        self._read(state)
        guard, rows = state.guard, state.unseen()
        held = [(step, row) for step, row in enumerate(rows, guard.step + 1) if row.discarded]
        limits = guard.limits(self.recipe.guard)
        since = guard.observe(rows, self.recipe.guard, self.chance)
        if held:
            steps = [step for step, _ in held]
            worst = max((row for _, row in held), key=lambda row: (not row.finite, row.loss))
            self.run.event("discarded", steps=steps, loss=worst.loss, gradient_norm=worst.norm, limits=list(limits))
            display.line(
                f"step {steps[-1]}: {len(held)} update{'s' if len(held) > 1 else ''} discarded "
                f"(loss {worst.loss:.3g}, gradient norm {worst.norm:.3g})"
            )
        self._set_limits(guard)
        return since

    def _roll_back(self, state: TrainingState, since: int, journal: Journal, display: Display) -> TrainingState:
        loss = next((row[0] for row in reversed(state.waiting)), state.loss)
        with self.worker.ranks.leader_first():  # it removes later checkpoints; the others find the same one then
            earlier = roll_back(self.run, self.recipe, self.learner, state, since)
        self.pending.clear()
        guard = earlier.guard
        abandoned = [[line["step"], line["loss"]] for line in journal.rewind(earlier.step) if "loss" in line]
        changed = {"rate": guard.rate, "shift": guard.shift, "tries": guard.tries}
        some = abandoned[:: 1 + len(abandoned) // 200]
        self.run.event("rollback", step=state.step, since=since, to=earlier.step, loss=loss, **changed, abandoned=some)
        display.line(
            f"step {state.step}: training has gone wrong since step {since} (loss {loss:.3g}); rolling back to "
            f"{f'step {earlier.step}' if earlier.step else 'fresh weights'}, skipping the text in between, with "
            f"{guard.rate:g} of the learning rate (attempt {guard.tries} of {self.recipe.guard.rollbacks})"
        )
        return earlier

    def _log(self, state: TrainingState, journal: Journal, display: Display, clock: Clock) -> None:
        metrics, step, guard = state.take_waiting(), state.step, state.guard
        line = {**metrics, "lr": guard.rate * self.rate(step), "tokens": state.tokens}
        journal.metrics(step, {**line, "epoch": round(self.loader.epochs(step + guard.shift), 6)})
        speed = clock.lap(step, state.tokens)
        pace = speed["tokens_per_second"] / self.worker.ranks.ranks
        speed |= device_use(self.flops_per_token, pace, self.worker.device)
        journal.timings(step, speed)
        shown = ("loss", "gradient_norm", "tokens_per_second", "mfu")
        display.metrics(step, {key: value for key, value in (metrics | speed).items() if key in shown})

    def _stop_early(self, state: TrainingState, display: Display) -> None:
        metric = self.recipe.evaluate.metric
        self.run.event("enough", step=state.step, best_step=state.best_step, metric=metric)
        display.line(
            f"step {state.step}: {state.worse} evaluations in a row were no better than step {state.best_step}'s "
            f"{metric}; stopping early"
        )

    def _stop(self, state: TrainingState, interrupted: Interrupted) -> None:
        self.run.event("interrupted", step=state.step, signal=interrupted.signal)
        self.worker.log(
            f"stopped after step {state.step} of {self.recipe.steps}, saved; "
            f"continue with `weft train --resume {self.run.path}`"
        )
        if interrupted.signal == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt
