"""The training loop: steps, evaluations, checkpoints and interruptions, from a settled recipe to a finished run."""

import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.costs.count import count
from weft.data.batch import Batch
from weft.errors import counted, quoted
from weft.figures.formats import general
from weft.models.transformer import Transformer
from weft.parallel import mesh
from weft.parallel.passes import Parallel, routing_settings
from weft.recipe.config import SettledRecipe
from weft.runs.folder import RunFolder
from weft.runs.journal import FollowerJournal, Journal
from weft.training import learner, schedule
from weft.training.captured import MAX_STEP_FLOPS, CapturedStep
from weft.training.compiled import Compiled, compiled, evaluations_pay
from weft.training.display import Display, TrainingClock, display, expectations
from weft.training.evaluation import Evaluator
from weft.training.guard import Guard
from weft.training.learner import Learner, Saver, roll_back
from weft.training.loader import shard_loader
from weft.training.objective import Objective
from weft.training.precision import arithmetic, slow_precision
from weft.training.preflight import MemoryNeed, Preflight, check_model
from weft.training.state import RunResult, TrainingState
from weft.training.step import OptimisationStep, StepResult
from weft.training.worker import Interruption, TrainingWorker, device_use, interruptions

COLLAPSED = 0.98  # fraction of tokens that choose one expert in a layer, above which its router has collapsed
COLLAPSED_LOGS = 5  # log lines in a row after which this is said, once
MAX_ABANDONED_POINTS = 200  # points of an abandoned loss curve that a rollback event keeps


class Loop:
    """A run in progress."""

    def __init__(self, recipe: SettledRecipe, run: RunFolder, objective: Objective[Any], *, worker: TrainingWorker):
        self.recipe, self.run, self.objective, self.worker = recipe, run, objective, worker
        self.mesh = mesh.build(recipe.parallel, worker.ranks, worker.device)
        check_model(recipe, worker.device, self.mesh.layout)
        self.loader = shard_loader(objective.loader, recipe, self.mesh.readers)
        if self.mesh.is_sharded:
            from weft.training import sharded

            self.learner: Learner = sharded.start(recipe, self.mesh, worker.device)
        else:
            self.learner = learner.start(recipe, self.mesh, worker.device)
        self.model = self.learner.model
        self.evaluator = Evaluator(recipe, run, self.learner, objective=objective, worker=worker)
        d_model: int = recipe.model.d_model  # type: ignore[union-attr]
        self.rate = schedule.build(recipe.schedule, recipe.optimizer.lr or 0.0, recipe.steps, d_model=d_model)
        self.chance = recipe.objective.chance(recipe.model.vocab_size)
        self.flops_per_token = count(recipe.model, recipe.batch.length, recipe.adapter).training()
        self.pending: list[StepResult] = []  # steps whose results are still on the device
        self.limits = torch.zeros(2, device=worker.device)
        self.compiled: Compiled | None = None

    def train(self, state: TrainingState, begin: Callable[[], None] | None = None) -> RunResult:
        """Train from `state` to the last step; `begin` is called once the pre-flight has passed."""
        recipe, ranks, started = self.recipe, self.worker.ranks, time.perf_counter()
        with (
            arithmetic(recipe.precision, recipe.deterministic),
            self._compiled() as self.compiled,
            interruptions(self.worker.log, ranks) as interruption,
            display(recipe.steps, state.step, self.worker.log, quiet=self.worker.quiet) as shown,
        ):
            if self._finished(state):
                shown.line(f"{self.run.path}: finished after step {state.step}; nothing is left to train")
            else:
                self._preflight(shown, state)
            if begin is not None:
                begin()
            journal = (Journal if ranks.leads else FollowerJournal)(self.run, recipe, after=state.step)
            saver = Saver(self.run, self.learner.write, recipe.checkpoint.keep, before=journal.sync)
            try:
                while not self._finished(state):
                    since = self._train_until_rollback(state, journal, saver, display=shown, interruption=interruption)
                    saver.wait()
                    if since is not None:
                        state = self._roll_back(state, since, journal, display=shown)
                saver.finish()
                self.evaluator.average(state, shown)
            except Exception:
                saver.wait()  # the checkpoint being written may be the last good one
                raise
            finally:
                journal.close()
                if ranks.leads:  # whether the run finished, was stopped or failed
                    self.evaluator.report(last=True)
        seconds = time.perf_counter() - started
        self.run.event("finish", step=state.step, seconds=round(seconds, 3))
        measured: dict[str, Any] = {"loss": state.loss, "validation": state.validation, "best_step": state.best_step}
        return RunResult(self.run, self.model, state.step, **measured, seconds=seconds)

    def _compiled(self) -> AbstractContextManager[Compiled | None]:
        if not self.recipe.compile or self.mesh.is_sharded:
            return nullcontext()
        recipe, device = self.recipe, self.worker.device
        one_shape = self.loader.even and not recipe.data.document_mask and not recipe.batch.recompute
        alone = device.type == "cuda" and self.worker.ranks.alone and self._waits_for_no_count
        capture = alone and one_shape and isinstance(self.model, Transformer)
        pays = evaluations_pay(recipe, self.flops_per_token, device)
        return compiled(self.model, capture=capture, evaluations=pays)

    def _preflight(self, display: Display, state: TrainingState) -> None:
        """Print what to expect, and try everything once. This sets the micro-batch size if `batch.micro` is auto."""
        sizes, device = self.learner.parallel.sizes, self.worker.device
        self.run.event("model", parameters=sizes[0])
        for line in expectations(self.recipe, sizes, state.step, device=device):
            display.line(line)
        if (warning := slow_precision(self.recipe.precision, device)) is not None:
            display.line(warning)
        first, auto = state.step + 1, self.recipe.batch.micro == "auto"
        if auto and state.micro is not None:
            self.loader = replace(self.loader, micro=state.micro)
        self._set_limits(Guard())
        step = self._optimisation_step()
        if not self.mesh.is_sharded:  # each replica finds separately how much fits
            step = replace(step, parallel=Parallel(self.model))

        def batch() -> Batch:
            return self.loader.batch(first + state.guard.shift)

        def evaluate() -> None:  # a CPU reads as many tokens as in a step, since more would take longer than the step
            self.evaluator.measure(batch().tokens.numel() if device.type == "cpu" else None)

        scratch = self.run.scratch
        if self.mesh.is_sharded:  # all ranks write to rank 0's folder; replicas write separately
            scratch = Path(self.worker.ranks.share(lambda: str(scratch)))
        preflight = Preflight(
            self.learner,
            self.loader,
            step=partial(self._step, step, step=first, rate=1.0),
            evaluate=evaluate,
            device=device,
            need=MemoryNeed(self.recipe, batch, self.mesh.layout),
            first=first + state.guard.shift,
            auto=auto,
        )
        findings = preflight.run(scratch, asdict(state))
        if auto:
            state.micro = self.worker.ranks.min(findings.micro)
            findings = replace(findings, micro=state.micro)
            self.loader = replace(self.loader, micro=state.micro)
        self.run.event("preflight", **vars(findings))
        display.line(f"pre-flight: {findings}")
        if (warning := findings.disk_warning(self.recipe.checkpoint.keep)) is not None:
            display.line(warning)

    def _finished(self, state: TrainingState) -> bool:
        return state.step >= self.recipe.steps or self._patience_spent(state)

    def _patience_spent(self, state: TrainingState) -> bool:
        patience = self.recipe.evaluate.patience
        return patience is not None and state.worse >= patience

    def _optimisation_step(self) -> OptimisationStep:
        learner, recipe = self.learner, self.recipe
        return OptimisationStep(
            learner.parallel,
            learner.optimizer,
            self.objective.loss,
            device=self.worker.device,
            precision=recipe.precision,
            clip=recipe.optimizer.clip,
            lanes=recipe.batch.size or 0,
            state=learner.step_state,
        )

    @property
    def _waits_for_no_count(self) -> bool:
        """Whether the host never reads how many tokens an expert has: a grouped product in bf16 needs no such count."""
        return routing_settings(self.model) is None or self.recipe.precision in ("bf16", "fp8")

    def _captured(self, step: OptimisationStep) -> OptimisationStep | CapturedStep:
        """Capture a step that a GPU finishes faster than the host can launch it."""
        recipe, loader = self.recipe, self.loader
        one_shape = loader.even or self.recipe.objective.has_source
        flops = self.flops_per_token * (recipe.batch.tokens or (recipe.batch.size or 1) * recipe.batch.length)
        fits = one_shape and not recipe.data.document_mask and flops <= MAX_STEP_FLOPS
        alone = self.worker.device.type == "cuda" and self.worker.ranks.alone and self._waits_for_no_count
        if not (alone and fits and self.compiled is None and self.objective.one_shape):
            return step
        self.loader = replace(loader, bucketed=True)
        return CapturedStep.of(step)

    def _step(self, take: OptimisationStep | CapturedStep, parts: list[Batch], *, step: int, rate: float) -> StepResult:
        if self.compiled is not None:
            self.compiled.one_pass = len(parts) == 1
        with self.worker.ranks.watching(f"at step {step}", step=True):
            if self.recipe.batch.vary_length:  # a longer row is more text (Merity et al. 2018, §5)
                rate *= parts[0].tokens.shape[1] / self.recipe.batch.length
            return take(parts, rate * self.rate(step), self.limits)

    def _train_until_rollback(
        self, state: TrainingState, journal: Journal, saver: Saver, *, display: Display, interruption: Interruption
    ) -> int | None:
        """Take steps to the end, or until the guard requests a rollback: then return the first bad step."""
        recipe, guard, ranks = self.recipe, state.guard, self.worker.ranks
        log, evaluate, save = recipe.log.every, recipe.evaluate.every, recipe.checkpoint.every
        clock, take = TrainingClock(state.step, state.tokens), self._captured(self._optimisation_step())
        self.model.train()
        self._set_limits(guard)
        stream = self.loader.stream(state.step + 1 + guard.shift, recipe.steps + guard.shift, self.worker.device)
        for parts in stream:
            step = state.step + 1
            self.pending.append(self._step(take, parts, step=step, rate=guard.rate))
            state.step = step
            display.step(step)
            last = step == recipe.steps
            # the guard is checked at steps that the recipe fixes, so that an interruption in between changes nothing
            since = self._check_guard(state, display) if step % log == 0 or step % save == 0 or last else None
            if step % log == 0 or last:
                self._log(state, journal, display, clock=clock)
                interruption.agree(ranks)
                if (failure := saver.failure_message()) is not None:
                    display.line(failure)
            if since is not None:
                return since
            better = False
            if self.objective.holds_out and (step % evaluate == 0 or last):
                with clock.paused(), ranks.watching(f"in the evaluation after step {step}"):
                    if saver.lost_best:
                        state.best, saver.lost_best = None, False
                    better = self.evaluator.evaluate(state, journal, display)
            # a checkpoint that the recipe does not plan must not influence any decision
            planned = step % save == 0 or better or self._finished(state)
            if planned or interruption:
                with clock.paused():
                    self._drain_results(state)
                    if ranks.leads or self.mesh.is_sharded:  # replicas hold the same state
                        copy = partial(self.learner.copy, state.step, asdict(state))
                        saver.save(step, copy, best=better, interrupted=not planned)
            if self._patience_spent(state) and not last:
                self._stop_early(state, display)
                return None
            if interruption and not last:
                saver.finish()
                ranks.barrier()  # torchrun ends all processes when one ends, so the state must be on disk before
                self._stop(state, interruption)
        return None

    def _drain_results(self, state: TrainingState) -> None:
        """Move the results of pending steps from the device into the state."""
        if self.pending:
            measured = [torch.stack([r.loss, r.nll, r.gradient_norm, r.discarded]) for r in self.pending]  # type: ignore[list-item]
            counts = torch.tensor([[r.targets, r.tokens] for r in self.pending])
            self.mesh.counters.sum_([counts])
            routing = [[] if r.routing is None else r.routing.tolist() for r in self.pending]
            rows = zip(torch.stack(measured).tolist(), counts.tolist(), routing, strict=True)
            for values, (targets, tokens), routed in rows:
                state.waiting.append([*values[:3], max(1, targets), values[3], *routed])
                state.tokens += tokens
            self.pending.clear()

    def _set_limits(self, guard: Guard) -> None:
        self.limits = torch.tensor(guard.limits(self.recipe.guard), device=self.worker.device)

    def _check_guard(self, state: TrainingState, display: Display) -> int | None:
        """Pass the last steps to the guard; return the first bad step if it requests a rollback."""
        self._drain_results(state)
        guard, records = state.guard, state.unseen()
        discarded = {step: record for step, record in enumerate(records, guard.step + 1) if record.discarded}
        limits = guard.limits(self.recipe.guard)
        since = guard.observe(records, self.recipe.guard, self.chance)
        if discarded:
            steps, worst = list(discarded), max(discarded.values(), key=lambda record: (not record.finite, record.loss))
            self.run.event("discarded", steps=steps, loss=worst.loss, gradient_norm=worst.norm, limits=list(limits))
            display.line(
                f"step {steps[-1]}: {counted(len(steps), 'update')} discarded "
                f"(loss {worst.loss:.3g}, gradient norm {worst.norm:.3g})"
            )
        self._set_limits(guard)
        return since

    def _roll_back(self, state: TrainingState, since: int, journal: Journal, *, display: Display) -> TrainingState:
        loss = next((row[0] for row in reversed(state.waiting)), state.loss)
        with self.worker.ranks.leader_first():  # it removes later checkpoints; the others then find the same one
            earlier = roll_back(self.run, self.recipe, self.learner, state=state, since=since)
        self.pending.clear()
        guard = earlier.guard
        curve = [[line["step"], line["loss"]] for line in journal.rewind(earlier.step) if "loss" in line]
        changed = {"rate": guard.rate, "shift": guard.shift, "tries": guard.tries}
        abandoned = curve[:: 1 + len(curve) // MAX_ABANDONED_POINTS]
        event = {"step": state.step, "since": since, "to": earlier.step, "loss": loss, **changed}
        self.run.event("rollback", **event, abandoned=abandoned)
        display.line(
            f"step {state.step}: training has diverged since step {since} (loss {loss:.3g}); rolling back to "
            f"{f'step {earlier.step}' if earlier.step else 'fresh weights'}, skipping the text in between, with "
            f"{general(guard.rate, 3)} of the learning rate (attempt {guard.tries} of {self.recipe.guard.rollbacks})"
        )
        return earlier

    def _log(self, state: TrainingState, journal: Journal, display: Display, *, clock: TrainingClock) -> None:
        metrics, step, guard = state.take_waiting(), state.step, state.guard
        line = {**metrics, "lr": guard.rate * self.rate(step), "tokens": state.tokens}
        if (scale := self.learner.step_state.scale) is not None:  # of fp16
            line["loss_scale"] = scale.item()
        journal.metrics(step, {**line, "epoch": round(self.loader.epochs(step + guard.shift), 6)})
        experts = routing_settings(self.model)
        if experts is not None and metrics.get("busiest_expert", 0.0) >= COLLAPSED * experts.experts / experts.chosen:
            state.collapsed += 1
            if state.collapsed == COLLAPSED_LOGS:
                self.run.event("collapsed experts", step=step, busiest=metrics["busiest_expert"])
                display.line(
                    f"step {step}: in one layer, almost all tokens choose the same experts; raise "
                    f"model.feedforward.balance_loss (now {experts.balance_loss:g}) or set choice_bias = 0.001"
                )
        else:
            state.collapsed = 0
        speed = clock.lap(step, state.tokens)
        per_process = speed["tokens_per_second"] / self.worker.ranks.ranks
        speed |= device_use(self.flops_per_token, per_process, self.worker.device)
        journal.timings(step, speed)
        display.metrics(step, metrics | speed)

    def _stop_early(self, state: TrainingState, display: Display) -> None:
        metric = self.recipe.evaluate.metric
        self.run.event("enough", step=state.step, best_step=state.best_step, metric=metric)
        display.line(
            f"step {state.step}: {state.worse} evaluations in a row were no better than step {state.best_step}'s "
            f"{metric}; stopping early"
        )

    def _stop(self, state: TrainingState, interruption: Interruption) -> None:
        self.run.event("interrupted", step=state.step, signal=interruption.signal)
        self.worker.log(
            f"stopped after step {state.step} of {self.recipe.steps}, saved; "
            f"continue with `weft train --resume {quoted(self.run.path)}`"
        )
        if interruption.signal == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt
