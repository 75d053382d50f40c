"""The training loop: steps, evaluations, checkpoints and interruptions, from a settled recipe to a finished run."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from weft.data.batch import Batch
from weft.explain.count import count
from weft.parallel.ranks import ALONE, Ranks
from weft.recipe.config import Recipe
from weft.runs.folder import RunFolder, RunResult
from weft.runs.journal import Clock, Display, Journal, Say, Unwritten
from weft.training.compiled import Compiled, can_be_recorded, compiled
from weft.training.evaluation import Evaluation, Evaluator, Writer
from weft.training.expect import expectations
from weft.training.guard import Guard
from weft.training.interruption import Interrupted, interruptions
from weft.training.loader import Feed
from weft.training.precision import arithmetic, slow_precision
from weft.training.preflight import preflight
from weft.training.recovery import Progress, go_back
from weft.training.saver import Saver, Unsaved
from weft.training.step import StepResult, fit, optimisation_step
from weft.training.throughput import device_use
from weft.training.weights import first_model


class Loop:
    """One run in progress: what its steps need, and what they leave behind."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        batches: Feed,
        evaluators: Sequence[Evaluator],
        writer: Writer | None,
        device: torch.device,
        quiet: bool,
        say: Say,
        ranks: Ranks,
    ):
        self.recipe, self.run, self.batches = recipe, run, batches
        self.device, self.quiet, self.say, self.ranks = device, quiet, say, ranks
        self.journal, self.saver = (Journal, Saver) if ranks.leads else (Unwritten, Unsaved)
        self.model = first_model(recipe).to(device)
        fit(self.model, recipe, device)
        self.evaluation = Evaluation(recipe, run, self.model, evaluators, writer, device, ranks)
        self.optimizer = recipe.optimizer.build(self.model)
        self.objective = recipe.objective.build()
        d_model: int = recipe.model.d_model  # type: ignore[union-attr]
        assert recipe.steps is not None
        self.steps = recipe.steps
        self.rate = recipe.schedule.build(recipe.optimizer.lr or 0.0, recipe.steps, d_model)
        self.chance = recipe.objective.chance(recipe.model.vocab_size)
        self.pending: list[StepResult] = []
        self.limits = torch.zeros(2, device=device)
        self.compiled: Compiled | None = None

    def go(self, progress: Progress, begin: Callable[[RunFolder, Recipe], None] | None = None) -> RunResult:
        """From `progress` to the last step; `begin` is called once the pre-flight has passed."""
        recipe, started = self.recipe, time.perf_counter()
        assert recipe.precision is not None
        record = can_be_recorded(recipe, self.model, self.batches, self.device, self.ranks)
        with (
            arithmetic(recipe.precision, recipe.deterministic),
            compiled(self.model, bool(recipe.compile), record) as self.compiled,
            interruptions(self.say, self.ranks) as interrupted,
            Display(recipe, progress.step, self.say, self.quiet) as display,
        ):
            self._announce(display, progress)
            if progress.step < self.steps:
                self._preflight(display, progress)
            if begin is not None:
                begin(self.run, self.recipe)
            journal = self.journal(self.run, self.recipe, after=progress.step)
            saver = self.saver(self.run, recipe.checkpoint.keep, journal.sync)
            try:
                while (since := self._stretch(progress, journal, saver, display, interrupted)) is not None:
                    saver.wait()
                    progress = self._go_back(progress, since, journal, display)
                saver.finish()
                self.evaluation.average(progress, display)
            except Exception:
                saver.wait()  # what is being written may be the last good state
                raise
            finally:
                journal.close()
        seconds = time.perf_counter() - started
        self.run.event("finish", step=progress.step, seconds=round(seconds, 3))
        return RunResult(
            self.run, self.model, progress.step, progress.loss, progress.validation, progress.best_step, seconds
        )

    # ---- before the first step

    def _announce(self, display: Display, progress: Progress) -> None:
        recipe = self.recipe
        self.run.event("model", parameters=sum(p.numel() for p in self.model.parameters()))
        assert recipe.precision is not None
        warning = slow_precision(recipe.precision, self.device)
        for line in [*expectations(recipe, self.model, progress.step, self.device), *([warning] if warning else [])]:
            display.line(line)

    def _preflight(self, display: Display, progress: Progress) -> None:
        """Try everything once; nothing that the run depends on is changed by it, except `batch.micro` = auto."""
        recipe, first = self.recipe, progress.step + 1
        self._set_limits(Guard())
        auto = recipe.batch.micro == "auto"
        findings = preflight(
            self.run.scratch,
            self.model,
            self.optimizer,
            progress.notes(),
            self.batches,
            auto,
            first + progress.guard.shift,
            lambda parts: self._step(parts, first, 1.0, ALONE),  # each tries for itself how much fits
            self.evaluation.ask,
            self.device,
        )
        findings = replace(findings, micro=self.ranks.least(findings.micro))
        if auto:
            self.batches = self.batches.cut(findings.micro)
            batch = recipe.batch.model_dump(exclude_none=True) | {"micro": findings.micro}
            self.recipe = recipe.replace(batch=batch)
        self.run.event("preflight", **vars(findings))
        display.line(f"pre-flight: {findings}")
        crowded = findings.crowded(recipe.checkpoint.keep)
        if crowded is not None:
            display.line(crowded)

    # ---- steps

    def _step(self, parts: Sequence[Batch], step: int, rate: float, ranks: Ranks) -> StepResult:
        assert self.recipe.precision is not None
        ranks.seed(self.recipe.seed, step)
        if self.compiled is not None:
            self.compiled.whole = len(parts) == 1
        return optimisation_step(
            self.model,
            self.optimizer,
            self.objective,
            parts,
            rate * self.rate(step),
            self.recipe.optimizer.clip,
            self.recipe.precision,
            self.device,
            self.limits,
            ranks,
        )

    def _stretch(
        self, progress: Progress, journal: Journal, saver: Saver, display: Display, interrupted: Interrupted
    ) -> int | None:
        """Steps to the end, or to where the guard wants to go back: then the step at which the trouble began."""
        recipe, guard = self.recipe, progress.guard
        log, evaluate, save = recipe.log.every, recipe.evaluate.every, recipe.checkpoint.every
        assert log is not None and evaluate is not None and save is not None
        clock = Clock(progress.step, progress.tokens)
        self.model.train()
        self._set_limits(guard)
        first, last_of_all = progress.step + 1 + guard.shift, self.steps + guard.shift
        for parts in self.batches.stream(first, last_of_all, self.device):
            step = progress.step + 1
            self.pending.append(self._step(parts, step, guard.rate, self.ranks))
            progress.step = step
            display.step(step)
            last = step == self.steps
            # the guard looks at steps that the recipe fixes: a run that was interrupted in between sees the same
            since = self._look(progress, display) if step % log == 0 or step % save == 0 or last else None
            if step % log == 0 or last:
                self._log(progress, journal, display, clock)
                interrupted.agree(self.ranks)
                news = saver.news()
                if news is not None:
                    display.line(news)
            if since is not None:
                return since
            better = False
            if self.evaluation.evaluators and (step % evaluate == 0 or last):
                with clock.paused():
                    if saver.lost_best:
                        progress.best, saver.lost_best = None, False
                    better = self.evaluation.evaluate(progress, journal, display)
            patience = recipe.evaluate.patience
            enough = patience is not None and progress.worse >= patience
            if step % save == 0 or last or better or interrupted or enough:
                with clock.paused():
                    self._save(progress, saver, better)
            if enough and not last:
                self.run.event("enough", step=step, best_step=progress.best_step, metric=recipe.evaluate.metric)
                display.line(
                    f"step {step}: {progress.worse} evaluations in a row were no better than step "
                    f"{progress.best_step}'s {recipe.evaluate.metric}; that is enough"
                )
                return None
            if interrupted and not last:
                saver.finish()
                self.ranks.wait()  # torchrun ends all when one has ended: not before the state is on the disk
                self._stop(progress, interrupted)
        return None

    def _read(self, progress: Progress) -> None:
        """Fetch what is still on the device: one wait for many steps."""
        if self.pending:
            found = [torch.stack([r.loss, r.nll, r.gradient_norm, r.discarded]) for r in self.pending]  # type: ignore[list-item]
            counts = torch.tensor([[r.targets, r.tokens] for r in self.pending])
            self.ranks.sum_([counts])
            for values, (targets, tokens) in zip(torch.stack(found).tolist(), counts.tolist(), strict=True):
                progress.waiting.append([*values[:3], max(1, targets), values[3]])
                progress.tokens += tokens
            self.pending.clear()

    # ---- when training goes wrong

    def _set_limits(self, guard: Guard) -> None:
        self.limits = torch.tensor(guard.limits(self.recipe.guard), device=self.device)

    def _look(self, progress: Progress, display: Display) -> int | None:
        """Show the guard the steps since its last look; where the trouble began, if it wants to go back."""
        self._read(progress)
        guard, rows = progress.guard, progress.unseen()
        held = [(step, row) for step, row in enumerate(rows, guard.step + 1) if row.discarded]
        limits = guard.limits(self.recipe.guard)
        since = guard.observe(rows, self.recipe.guard, self.chance)
        if held:
            steps = [step for step, _ in held]
            worst = max((row for _, row in held), key=lambda row: (not row.finite, row.loss))
            self.run.event("discarded", steps=steps, loss=worst.loss, gradient_norm=worst.norm, limits=list(limits))
            display.line(
                f"step {steps[-1]}: {len(held)} update{'s' if len(held) > 1 else ''} not made "
                f"(loss {worst.loss:.3g}, gradient norm {worst.norm:.3g})"
            )
        self._set_limits(guard)
        return since

    def _go_back(self, progress: Progress, since: int, journal: Journal, display: Display) -> Progress:
        """Return to before the trouble, and tell."""
        loss = next((row[0] for row in reversed(progress.waiting)), progress.loss)
        with self.ranks.leader_first():  # it removes what came later; the others find the same checkpoint then
            earlier, self.optimizer = go_back(self.run, self.recipe, self.model, self.optimizer, progress, since)
        self.pending.clear()
        guard = earlier.guard
        abandoned = [[line["step"], line["loss"]] for line in journal.rewind(earlier.step) if "loss" in line]
        self.run.event(
            "rollback",
            step=progress.step,
            since=since,
            to=earlier.step,
            loss=loss,
            rate=guard.rate,
            shift=guard.shift,
            tries=guard.tries,
            abandoned=abandoned[:: 1 + len(abandoned) // 200],
        )
        display.line(
            f"step {progress.step}: training has gone wrong since step {since} (loss {loss:.3g}); back to "
            f"{f'step {earlier.step}' if earlier.step else 'fresh weights'}, past the text in between, with "
            f"{guard.rate:g} of the learning rate (try {guard.tries} of {self.recipe.guard.rollbacks})"
        )
        return earlier

    # ---- what is seen and kept

    def _log(self, progress: Progress, journal: Journal, display: Display, clock: Clock) -> None:
        figures, step, guard = progress.take_waiting(), progress.step, progress.guard
        line = {**figures, "lr": guard.rate * self.rate(step), "tokens": progress.tokens}
        journal.metrics(step, {**line, "epoch": round(self.batches.epoch(step + guard.shift), 6)})
        speed = clock.lap(step, progress.tokens)
        assert self.recipe.batch.length is not None
        pace = speed["tokens_per_second"] / self.ranks.ranks
        cost = count(self.recipe.model, self.recipe.batch.length, self.recipe.adapter)
        speed |= device_use(cost.training(), pace, self.device)
        journal.timings(step, speed)
        shown = ("loss", "gradient_norm", "tokens_per_second", "mfu")
        display.figures(step, {key: value for key, value in (figures | speed).items() if key in shown})

    def _save(self, progress: Progress, saver: Saver, best: bool) -> None:
        self._read(progress)
        # while something is wrong, the last checkpoint from before it must outlive those that follow
        spare = progress.guard.wrong[0] if progress.guard.wrong else None
        saver.save(progress.step, self.model, self.optimizer, progress.notes(), best, spare)

    def _stop(self, progress: Progress, interrupted: Interrupted) -> None:
        self.run.event("interrupted", step=progress.step, signal=interrupted.signal)
        self.say(
            f"stopped after step {progress.step} of {self.steps}, saved; "
            f"go on with `weft train --resume {self.run.path}`"
        )
        if interrupted.signal == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt
