"""Contenders made ready: recipe, text as tokens, steps for the budget; all that can be refused is refused here."""

import json
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from weft.api.train import trained_tokenizer
from weft.compare.config import OWN, SEARCH_SHARES, Budget, Contender, Experiment
from weft.compare.jobs import Job, Sweep, fraction, rates_around
from weft.compare.sizes import TooSmallError, flops_per_step, sized, sized_for
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
from weft.recipe.optimizer import Noam
from weft.recipe.resolve import resolve, run_name
from weft.recipe.settle import Choice, Facts, choose_tokenizer, settle
from weft.recipe.unread import refuse_unread
from weft.text.config import TokenizerConfig
from weft.text.tokenizer import FILE, Tokenizer

LENGTHS = ("warmup", "hold", "every")  # of a schedule, in steps
PROBE = 20  # steps that are taken to measure how long one takes
MIN_HELD_OUT_BYTES = 2000  # of held-out text


@dataclass(frozen=True)
class Corpus:
    """The text as one tokenizer's tokens."""

    path: Path
    tokenizer: TokenizerConfig
    shards: Shards

    @property
    def facts(self) -> Facts:
        return Facts(self.shards.train.bytes, self.shards.index.vocab_size)


@dataclass(frozen=True)
class ReadyContender:
    """A contender with its recipe, which has everything but what differs from job to job, and its text as tokens."""

    name: str
    settings: Contender
    recipe: Recipe
    corpus: Corpus
    whole: SettledRecipe  # with the whole budget, at its own learning rate
    device: str

    @property
    def counts(self) -> bool:
        """Whether it is counted, not trained."""
        return isinstance(self.whole.model, NGram)

    @property
    def tokens_per_step(self) -> int:
        return (self.whole.batch.size or 1) * self.whole.batch.length

    @cached_property
    def flops_per_step(self) -> float:
        return flops_per_step(self.whole)

    @property
    def flops(self) -> float:
        """Operations of the whole budget."""
        return 0.0 if self.counts else self.flops_per_step * self.whole.steps

    @property
    def rate(self) -> float:
        """Its own learning rate: the schedule's scale where that sets it."""
        schedule = self.whole.schedule
        return schedule.scale if isinstance(schedule, Noam) else self.whole.optimizer.lr or 0.0

    @property
    def memory(self) -> int:
        """Bytes that a step needs, as the planner counts them."""
        if self.counts:
            return 200 * self.learns_from  # n-grams of every order, sorted
        batch = self.whole.batch
        rows = batch.micro if isinstance(batch.micro, int) else batch.size or 1
        work = Workload(rows, batch.length, self.whole.precision, self.whole.optimizer.kind)
        return training_memory(self.whole.model, work, self.whole.adapter).total(batch.recompute)

    def lasting(self, steps: int) -> "ReadyContender":
        """With so many steps as its whole budget; a recipe without steps of its own has its schedule in these."""
        recipe = self.recipe
        if recipe.steps is None:
            if not isinstance(recipe.schedule, Noam) and (recipe.schedule.warmup or 0) > steps:
                raise ConfigError(
                    f"{self.name}: schedule.warmup = {recipe.schedule.warmup} is longer than the {steps:,} steps that "
                    "the budget pays for; set it lower, or leave it out"
                )
            recipe = recipe.replace(steps=steps)
        return replace(self, recipe=recipe, whole=_settled(recipe, {"steps": steps}, self.corpus, self.device))

    def sweep(self, experiment: Experiment) -> Sweep:
        if self.counts:
            return Sweep(self.name, (), SEARCH_SHARES, tuple(experiment.shares), (0,))
        # what rounds to a step or more; no two of them are as many steps, for each share is thrice the one before it
        rounds, shares = (
            tuple(share for share in given if round(self.whole.steps * share))
            for given in (SEARCH_SHARES, experiment.shares)
        )
        rates = rates_around(self.rate, experiment.rates if rounds else 1)
        return Sweep(self.name, rates, rounds, shares, tuple(range(experiment.seeds)))

    def left_out(self, experiment: Experiment) -> list[str]:
        """What of the experiment isn't run, for the budget is too small for it."""
        sweep = self.sweep(experiment)
        short = [fraction(share) for share in experiment.shares if share not in sweep.shares]
        lines = [f"{self.name}: {share} of the budget is less than a step, and isn't run" for share in short]
        if not self.counts and experiment.rates > len(sweep.rates):
            whole = f"the whole budget is {counted(self.whole.steps, 'step')}"
            lines.append(f"{self.name}: {whole}, too few to search for a learning rate; it has the recipe's own")
        return lines

    @property
    def learns_from(self) -> int:
        """The tokens of the text that it is trained on, each counted once."""
        total = len(self.corpus.shards.train)
        return min(total, self.recipe.data.tokens or total)

    def steps(self, job: Job) -> int:
        """Those of a job; what is counted takes one."""
        if self.counts:
            return 1
        return max(1, round(self.whole.steps * job.share)) if job.share else PROBE

    def settled(self, job: Job) -> SettledRecipe:
        if self.counts:
            text = {"tokens": max(2, round(self.learns_from * job.share))} if job.share < 1 else {}
            return _settled(self.recipe, {"seed": job.seed, "data": text}, self.corpus, self.device)
        changes: dict[str, Any] = {"seed": self.recipe.seed + job.seed, "steps": self.steps(job)}
        if job.lr is not None:
            noam = isinstance(self.whole.schedule, Noam)
            changes |= {"schedule": {"scale": job.lr}} if noam else {"optimizer": {"lr": job.lr}}
        if not job.share:
            changes |= {"compile": self.whole.compile, "schedule": _least(self.recipe), "log": {"every": PROBE // 4}}
        return _settled(self.recipe, changes, self.corpus, self.device)


def make_ready(experiment: Experiment, folder: Path, device: str, log: Log) -> list[ReadyContender]:
    """Every contender with its text as tokens in `folder`, those with the same tokenizer sharing them. `device` is
    "cpu" or "cuda". Steps are those of a budget in FLOPs or tokens; for minutes they are found later."""
    recipes = {name: _resolved(experiment, name) for name in experiment.contenders}
    corpora = _corpora(experiment, recipes, folder, device, log)
    if experiment.budget.axis == "tokens" and len({corpus.path for corpus in corpora.values()}) > 1:
        raise ConfigError(
            f"--tokens {experiment.budget.tokens}: a token is not the same to contenders with different tokenizers; "
            "give one tokenizer to all (tokenizer=bpe), or a budget in --flops or --minutes"
        )
    made = []
    for name, recipe in recipes.items():
        corpus, asked = corpora[name], experiment.contenders[name]
        if asked.parameters is not None or experiment.sizes == "budget":
            model = recipe.model.replace(vocab_size=corpus.facts.vocab_size)  # which is part of its size
            model = sized(model, asked.parameters) if asked.parameters else sized_for(experiment.budget, model)
            recipe = recipe.replace(model=model.model_dump())
        if isinstance(recipe.model, NGram) and experiment.budget.tokens is not None:
            most = min(experiment.budget.tokens, len(corpus.shards.train))
            recipe = recipe.replace(data={**recipe.data.model_dump(exclude_none=True), "tokens": most})
        # how long it is follows from what a step costs, so its batch is chosen first
        whole = _settled(recipe, {"schedule": _least(recipe)}, corpus, device)
        each = ReadyContender(name, asked, recipe, corpus, whole, device)
        timed = each.counts or experiment.budget.axis == "minutes"
        made.append(each if timed else each.lasting(_steps(experiment.budget, each)))
    return made


def _resolved(experiment: Experiment, name: str) -> Recipe:
    each, data = experiment.contenders[name], experiment.data
    changes = merge(experiment.settings, each.changes)
    given = flat(changes)
    for key in given:
        if key.startswith("data.") and key.removeprefix("data.") not in OWN:
            raise ConfigError(f"{name}: {key}: all contenders read the comparison's own data; set it there")
        if key == "steps":
            raise ConfigError(f"{name}: steps: the budget decides how many each contender takes; leave it out")
    if not data.sources:
        raise ConfigError("there is no text to compare on; give it with --data, for instance --data book.txt")
    recipe = resolve(each.recipe, changes, list(data.sources), lambda line: None)
    its = {key: f"data.{key}" in given or getattr(recipe.data, key) for key in OWN}
    own = {key: getattr(recipe.data if its[key] else data, key) for key in OWN}
    recipe = recipe.replace(data={**data.model_dump(exclude_none=True), **own}, name=run_name(name))
    if recipe.optimizer is None:  # the same for all, where a run alone would choose what suits its model
        recipe = recipe.replace(optimizer={"kind": "adamw"})
    if recipe.objective.kind != "next-token":
        kind = recipe.objective.kind
        raise ConfigError(f"{name}: objective '{kind}' has no bits per byte; only next-token models are compared")
    if "-" in data.sources:
        raise DataError("'-': every contender reads the text, which standard input can't give twice; name a file")
    recipe.objective.check(recipe.model)
    refuse_unread(recipe)
    return recipe


def _corpora(
    experiment: Experiment, recipes: dict[str, Recipe], folder: Path, device: str, log: Log
) -> dict[str, Corpus]:
    """The text as tokens for each contender; trained and encoded once for each tokenizer that is asked for."""
    made, found, data = dict[str, Corpus](), dict[str, Corpus](), experiment.data
    text = data.text(data.parts[0])
    size = round(amount(list(data.sources), [data.column], data.encoding).bytes * data.training_share)
    for name, recipe in recipes.items():
        asked = json.dumps(recipe.tokenizer and recipe.tokenizer.model_dump(mode="json"), sort_keys=True)
        if asked not in made:
            place = folder / f"{len(made)}-{recipe.tokenizer.kind if recipe.tokenizer else 'chosen'}"
            config, choices = recipe.tokenizer, list[Choice]()
            if config is None or hasattr(config, "vocab_size"):
                config, choices = choose_tokenizer(recipe, size, device)
            if (place / INDEX).is_file() and (place / FILE).is_file():  # from an earlier start
                tokenizer = Tokenizer.load(place)
            else:
                texts = partial(require_text, train_texts(text), text.sources)
                tokenizer, _, choices = trained_tokenizer(config, choices, texts)
                for choice in choices:
                    log(f"  {choice}")
            if hasattr(config, "vocab_size"):
                config = config.replace(vocab_size=tokenizer.vocab_size)
            made[asked] = Corpus(place, config, prepare(text, place, tokenizer))
        found[name] = made[asked]
    for corpus in made.values():
        size = 0 if corpus.shards.validation is None else corpus.shards.validation.bytes
        if size < MIN_HELD_OUT_BYTES:
            raise DataError(
                f"{', '.join(data.sources)}: {size:,} bytes are held out to measure on, too few to tell models apart; "
                f"expected {MIN_HELD_OUT_BYTES:,} or more: give more text, or hold out more with data.validation"
            )
    return found


def _steps(budget: Budget, contender: ReadyContender) -> int:
    batch, tokens = contender.whole.batch, contender.tokens_per_step
    cost = contender.flops_per_step if budget.axis == "flops" else float(tokens)
    steps = int(budget.amount // cost)
    if steps < 1:
        what = f"{cost:.3g} FLOPs" if budget.axis == "flops" else f"{tokens:,} tokens"
        raise TooSmallError(
            f"{contender.name}: one step of {batch.size} × {batch.length} tokens takes {what}, more than the budget of "
            f"{budget}; give a larger budget, or a smaller model or batch.size",
            tokens=tokens,
        )
    return steps


def _least(recipe: Recipe) -> Tree:
    """A schedule's lengths as short as they can be, for a run whose rates are not looked at."""
    return {field: 1 for field in LENGTHS if getattr(recipe.schedule, field, None) is not None}


def _settled(recipe: Recipe, changes: dict[str, Any], corpus: Corpus, device: str) -> SettledRecipe:
    """A recipe with nothing left open, on the prepared text. With another number of steps, its lengths in steps are the
    same shares of the run as they were. Evaluations, checkpoints and log lines are chosen anew."""
    tree = recipe.model_dump(mode="json", exclude_none=True)
    if "steps" in changes:
        own = tree.pop("steps", None)
        for section in ("evaluate", "checkpoint", "log"):
            tree.get(section, {}).pop("every", None)
        for field in LENGTHS:
            given = tree["schedule"].get(field)
            if given and own is not None:
                tree["schedule"][field] = max(1, round(given * changes["steps"] / own))
    tree["tokenizer"] = corpus.tokenizer.model_dump(mode="json", exclude_none=True)
    settled, _ = settle(validate(Recipe, merge(tree, changes)), corpus.facts, device)
    whole = settled.model_dump(mode="json", exclude_none=True)
    kept = {key: whole["data"][key] for key in ("document_mask", "tokens") if key in whole["data"]}
    whole["data"] = {"prepared": str(corpus.path), **kept}
    whole["tokenizer"] = {"kind": "pretrained", "path": str(corpus.path)}
    return validate(SettledRecipe, whole)
