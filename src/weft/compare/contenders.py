"""Prepare contenders: their recipes, the tokenized text, and the steps that the budget pays for.

Everything that can be refused is refused here, before any training.
"""

import json
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from weft.api.train import trained_tokenizer
from weft.compare.config import CONTENDER_DATA, NO_TEXT, SEARCH_SHARES, Budget, Contender, Experiment
from weft.compare.jobs import Job, Sweep, fraction, rates_around
from weft.compare.sizes import TooSmallError, flops_per_step, resize_for, resize_to
from weft.config import Tree, flat, merge, validate
from weft.costs.memory import Workload, training_memory
from weft.data.amount import amount
from weft.data.prepare import prepare
from weft.data.shards import INDEX, Shards
from weft.data.split import require_text, train_texts
from weft.errors import ConfigError, DataError, counted
from weft.models.config import NGram
from weft.progress import Log
from weft.recipe.config import Recipe, SettledRecipe
from weft.recipe.draft import ChosenSetting
from weft.recipe.optimizer import Noam
from weft.recipe.resolve import resolve, run_name
from weft.recipe.settle import Facts, choose_tokenizer, settle
from weft.recipe.unread import refuse_unread
from weft.text.config import TokenizerConfig
from weft.text.tokenizer import FILE, Tokenizer

SCHEDULE_STEPS = ("warmup", "hold", "every")  # settings of a schedule that are numbers of steps
PROBE_STEPS = 20  # steps of the short run that measures the time per step
MIN_HELD_OUT_BYTES = 2000  # refuse to compare on less held-out text
NGRAM_BYTES_PER_TOKEN = 200  # memory to count and sort the n-grams of all orders


@dataclass(frozen=True)
class TokenizedText:
    """The text, prepared with one tokenizer."""

    path: Path
    tokenizer: TokenizerConfig
    shards: Shards

    @property
    def facts(self) -> Facts:
        return Facts(self.shards.train.bytes, self.shards.index.vocab_size)


@dataclass(frozen=True)
class ReadyContender:
    """Contender with its recipe, which leaves steps, learning rate and seed to its jobs, and its tokenized text."""

    name: str
    settings: Contender
    recipe: Recipe
    text: TokenizedText
    full: SettledRecipe  # for the whole budget, at the recipe's learning rate
    device: str

    @property
    def family(self) -> str:
        """Contender of which it is a size; itself if there is only one."""
        return self.settings.family or self.name

    @property
    def is_ngram(self) -> bool:
        """Whether it is counted instead of trained."""
        return isinstance(self.full.model, NGram)

    @property
    def tokens_per_step(self) -> int:
        return (self.full.batch.size or 1) * self.full.batch.length

    @cached_property
    def flops_per_step(self) -> float:
        return flops_per_step(self.full)

    @property
    def flops(self) -> float:
        """FLOPs of training with the whole budget."""
        return 0.0 if self.is_ngram else self.flops_per_step * self.full.steps

    @property
    def rate(self) -> float:
        """The recipe's learning rate, or the scale of a schedule that sets the rate itself."""
        schedule = self.full.schedule
        return schedule.scale if isinstance(schedule, Noam) else self.full.optimizer.lr or 0.0

    @property
    def memory(self) -> int:
        """Predicted peak memory of training, in bytes."""
        if self.is_ngram:
            return NGRAM_BYTES_PER_TOKEN * self.training_tokens
        batch = self.full.batch
        rows = batch.micro if isinstance(batch.micro, int) else batch.size or 1
        work = Workload(rows, batch.length, self.full.precision, self.full.optimizer.kind)
        return training_memory(self.full.model, work, self.full.adapter).total(batch.recompute)

    @property
    def training_tokens(self) -> int:
        """Number of distinct tokens of the text that it trains on."""
        total = len(self.text.shards.train)
        return min(total, self.recipe.data.tokens or total)

    def with_steps(self, steps: int) -> "ReadyContender":
        """Return the contender with this many steps as its whole budget. If the recipe sets no steps, its schedule is
        in these steps."""
        recipe = self.recipe
        if recipe.steps is None:
            if not isinstance(recipe.schedule, Noam) and (recipe.schedule.warmup or 0) > steps:
                warmup = f"schedule.warmup = {recipe.schedule.warmup} is longer than the {steps:,} steps"
                raise ConfigError(f"{self.name}: {warmup} that the budget pays for; set it lower, or leave it out")
            recipe = recipe.replace(steps=steps)
        return replace(self, recipe=recipe, full=_settled(recipe, {"steps": steps}, self.text, device=self.device))

    def sweep(self, experiment: Experiment) -> Sweep:
        """Return the learning rates, shares of the budget and seeds of its jobs, as far as they come to a step."""
        wanted = self.settings.shares or tuple(experiment.shares)
        if self.is_ngram:
            return Sweep(self.name, rates=(), rounds=SEARCH_SHARES, shares=wanted, seeds=(0,))
        # of several sizes, none is searched at length: the best of them is as good as a better rate of one
        searching = SEARCH_SHARES[:2] if self.settings.family else SEARCH_SHARES
        searched, steps = ([share * max(wanted) for share in searching], wanted), self.full.steps
        rounds, shares = (tuple(share for share in shares if round(steps * share)) for shares in searched)
        rates, seeds = rates_around(self.rate, experiment.rates if rounds else 1), tuple(range(experiment.seeds))
        return Sweep(self.name, rates=rates, rounds=rounds, shares=shares, seeds=seeds)

    def skipped(self, experiment: Experiment) -> list[str]:
        """Return a message for each part of the experiment for which the budget is too small."""
        sweep = self.sweep(experiment)
        wanted = self.settings.shares or experiment.shares
        short = [fraction(share) for share in wanted if share not in sweep.shares]
        lines = [f"{self.name}: {share} of the budget is less than a step, and isn't run" for share in short]
        if not self.is_ngram and experiment.rates > len(sweep.rates):
            budget = f"the whole budget is {counted(self.full.steps, 'step')}"
            lines.append(f"{self.name}: {budget}, too few to search for a learning rate; the recipe's is used")
        return lines

    def steps(self, job: Job) -> int:
        """Return the number of steps of a job; an n-gram model takes one."""
        trained = max(1, round(self.full.steps * job.share)) if job.share else PROBE_STEPS
        return 1 if self.is_ngram else trained

    def recipe_for(self, job: Job) -> SettledRecipe:
        if self.is_ngram:
            text = {"tokens": max(2, round(self.training_tokens * job.share))} if job.share < 1 else {}
            return _settled(self.recipe, {"seed": job.seed, "data": text}, self.text, device=self.device)
        changes: dict[str, Any] = {"seed": self.recipe.seed + job.seed, "steps": self.steps(job)}
        if job.lr is not None:
            noam = isinstance(self.full.schedule, Noam)
            changes |= {"schedule": {"scale": job.lr}} if noam else {"optimizer": {"lr": job.lr}}
        if not job.share:
            schedule, log = _shortest_schedule(self.recipe), {"every": PROBE_STEPS // 4}
            changes |= {"compile": self.full.compile, "schedule": schedule, "log": log}
        return _settled(self.recipe, changes, self.text, device=self.device)


def prepare_contenders(experiment: Experiment, folder: Path, device: str, *, log: Log) -> list[ReadyContender]:
    """Prepare every contender for a `device`, "cpu" or "cuda", with the tokenized texts in `folder`."""
    recipes = {name: _resolved(experiment, name) for name in experiment.contenders}
    texts = _tokenized(experiment, recipes, folder, device=device, log=log)
    if experiment.budget.unit == "tokens" and len({text.path for text in texts.values()}) > 1:
        hint = "give one tokenizer to all (tokenizer=bpe), or a budget in --flops or --minutes"
        problem = "contenders with different tokenizers have different tokens"
        raise ConfigError(f"--tokens {experiment.budget.tokens}: {problem}; {hint}")
    contenders, left_out = list[ReadyContender](), list[str]()
    for name, recipe in recipes.items():
        text, settings = texts[name], experiment.contenders[name]
        if settings.parameters is not None or experiment.sizes == "budget":
            model, size = recipe.model.replace(vocab_size=text.facts.vocab_size), settings.parameters
            try:
                model = resize_to(model, size) if size else resize_for(experiment.budget, model)
            except TooSmallError as error:
                if not settings.family:
                    raise
                left_out.append(f"{name} is left out: {error}")
                continue
            recipe = recipe.replace(model=model.model_dump())
        if isinstance(recipe.model, NGram) and experiment.budget.tokens is not None:
            tokens = min(experiment.budget.tokens, len(text.shards.train))
            recipe = recipe.replace(data={**recipe.data.model_dump(exclude_none=True), "tokens": tokens})
        # the number of steps follows from the cost of a step, so the batch is chosen first
        full = _settled(recipe, {"schedule": _shortest_schedule(recipe)}, text, device=device)
        ready = ReadyContender(name, settings, recipe, text=text, full=full, device=device)
        if not ready.is_ngram and experiment.budget.unit != "minutes":  # minutes are converted once steps are timed
            ready = ready.with_steps(_steps(experiment.budget, ready))
        contenders.append(ready)
    if left_out and all(each.is_ngram for each in contenders):
        raise ConfigError("no budget is large enough for this vocabulary; give larger ones, or tokenizer=char")
    for line in left_out:
        log(line)
    return contenders


def _resolved(experiment: Experiment, name: str) -> Recipe:
    contender, data = experiment.contenders[name], experiment.data
    changes = merge(experiment.settings, contender.changes)
    changed = flat(changes)
    for key in changed:
        if key.startswith("data.") and key.removeprefix("data.") not in CONTENDER_DATA:
            raise ConfigError(f"{name}: {key}: all contenders read the comparison's data; set it there")
        if key == "steps":
            raise ConfigError(f"{name}: steps: the budget decides how many each contender takes; leave it out")
    if not data.sources:
        raise ConfigError(NO_TEXT)
    recipe = resolve(contender.recipe, changes, list(data.sources), log=lambda line: None)
    set_here = {key: f"data.{key}" in changed or getattr(recipe.data, key) for key in CONTENDER_DATA}
    own = {key: getattr(recipe.data if is_set else data, key) for key, is_set in set_here.items()}
    recipe = recipe.replace(data={**data.model_dump(exclude_none=True), **own}, name=run_name(name))
    if recipe.optimizer is None:  # one for all, where a single run would get one that suits its model
        recipe = recipe.replace(optimizer={"kind": "adamw"})
    if recipe.objective.kind != "next-token":
        kind = recipe.objective.kind
        raise ConfigError(f"{name}: objective '{kind}' has no bits per byte; only next-token models are compared")
    if "-" in data.sources:
        raise DataError("'-': every contender reads the text, but standard input can be read only once; name a file")
    recipe.objective.check(recipe.model)
    refuse_unread(recipe)
    return recipe


def _tokenized(
    experiment: Experiment, recipes: dict[str, Recipe], folder: Path, *, device: str, log: Log
) -> dict[str, TokenizedText]:
    """Tokenize the text for each contender, once per requested tokenizer."""
    by_tokenizer, by_name, data = dict[str, TokenizedText](), dict[str, TokenizedText](), experiment.data
    source = data.text(data.parts[0])
    size = round(amount(list(data.sources), [data.column], data.encoding).bytes * data.training_share)
    for name, recipe in recipes.items():
        key = json.dumps(recipe.tokenizer and recipe.tokenizer.model_dump(mode="json"), sort_keys=True)
        if key not in by_tokenizer:
            path = folder / f"{len(by_tokenizer)}-{recipe.tokenizer.kind if recipe.tokenizer else 'chosen'}"
            config, choices = recipe.tokenizer, list[ChosenSetting]()
            if config is None or hasattr(config, "vocab_size"):
                config, choices = choose_tokenizer(recipe, size, device)
            if (path / INDEX).is_file() and (path / FILE).is_file():  # from an earlier start
                tokenizer = Tokenizer.load(path)
            else:
                texts = partial(require_text, train_texts(source), source.sources)
                tokenizer, _, choices = trained_tokenizer(config, choices, texts)
                for choice in choices:
                    log(f"  {choice}")
            if hasattr(config, "vocab_size"):
                config = config.replace(vocab_size=tokenizer.vocab_size)
            by_tokenizer[key] = TokenizedText(path, config, prepare(source, path, tokenizer))
        by_name[name] = by_tokenizer[key]
    for text in by_tokenizer.values():
        size = 0 if text.shards.validation is None else text.shards.validation.bytes
        if size < MIN_HELD_OUT_BYTES:
            held_out = f"{', '.join(data.sources)}: {size:,} bytes are held out, too few to tell models apart"
            hint = "give more text, or hold out more with data.validation"
            raise DataError(f"{held_out}; expected {MIN_HELD_OUT_BYTES:,} or more: {hint}")
    return by_name


def _steps(budget: Budget, contender: ReadyContender) -> int:
    batch, tokens = contender.full.batch, contender.tokens_per_step
    cost = contender.flops_per_step if budget.unit == "flops" else float(tokens)
    steps = int(budget.amount // cost)
    if steps < 1:
        needed = f"{cost:.3g} FLOPs" if budget.unit == "flops" else f"{tokens:,} tokens"
        step = f"one step of {batch.size} × {batch.length} tokens takes {needed}, more than the budget of {budget}"
        hint = "give a larger budget, or a smaller model or batch.size"
        raise TooSmallError(f"{contender.name}: {step}; {hint}", tokens=tokens)
    return steps


def _shortest_schedule(recipe: Recipe) -> Tree:
    """Return a schedule of one-step phases, for a run whose learning rates don't matter."""
    return {field: 1 for field in SCHEDULE_STEPS if getattr(recipe.schedule, field, None) is not None}


def _settled(recipe: Recipe, changes: dict[str, Any], text: TokenizedText, *, device: str) -> SettledRecipe:
    """Complete a recipe on the tokenized text. If `changes` sets the steps, the schedule keeps its proportions, and
    evaluations, checkpoints and log lines are chosen again."""
    tree = recipe.model_dump(mode="json", exclude_none=True)
    if "steps" in changes:
        steps = tree.pop("steps", None)
        for section in ("evaluate", "checkpoint", "log"):
            tree.get(section, {}).pop("every", None)
        for field in SCHEDULE_STEPS:
            length = tree["schedule"].get(field)
            if length and steps is not None:
                tree["schedule"][field] = max(1, round(length * changes["steps"] / steps))
    tree["tokenizer"] = text.tokenizer.model_dump(mode="json", exclude_none=True)
    settled, _ = settle(validate(Recipe, merge(tree, changes)), text.facts, device)
    tree = settled.model_dump(mode="json", exclude_none=True)
    own = {key: tree["data"][key] for key in CONTENDER_DATA if key in tree["data"]}
    tree["data"] = {"prepared": str(text.path), **own}
    tree["tokenizer"] = {"kind": "pretrained", "path": str(text.path)}
    return validate(SettledRecipe, tree)
