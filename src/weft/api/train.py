"""weft from Python: prepare a text, train a model, resume a run.

Text, training, evaluation and the report are put together here; the commands parse, call these functions and print.
"""

import itertools
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from weft.api.arguments import Sources, checked, names_of
from weft.api.load import load
from weft.api.run import Run
from weft.config import flat, validate
from weft.data.config import HashSplit, Split, TextSource, held_out_files
from weft.data.messages import with_template
from weft.data.prepare import prepare as prepare_shards
from weft.data.shards import Shards
from weft.data.sources import files
from weft.data.split import some_texts, train_texts
from weft.errors import ConfigError, DataError, LostError, RunError, TokenizerError, WeftError
from weft.machine import pick_device, products
from weft.models.base import device_of
from weft.objectives import table as objectives
from weft.parallel.ranks import ALONE, Ranks, job, join, restarts, watched
from weft.progress import Log, log_to_stderr
from weft.recipe.config import Recipe, SettledRecipe
from weft.recipe.objective import Chat
from weft.recipe.optimizer import Constant, Noam
from weft.recipe.resolve import Changes, changed_tables, continues, extended, is_run, resolve
from weft.recipe.settle import Choice, Facts, choose_tokenizer, settle
from weft.recipe.unread import refuse_unread
from weft.runs import checkpoint
from weft.runs.folder import FollowedRun, RunFolder, claimed, held, note_files, open_run, report_changes
from weft.runs.journal import check_lines, check_log
from weft.runs.lines import read_lines
from weft.runs.report import write_report
from weft.text import builtin
from weft.text.config import Pretrained, TokenizerConfig
from weft.text.tokenizer import Tokenizer, build_tokenizer
from weft.text.training import DEFAULT_SIZE
from weft.training import schedule, start
from weft.training.objective import Objective
from weft.training.precision import reading
from weft.training.run_data import Tokenizers
from weft.training.worker import TrainingWorker


@checked
def prepare(
    sources: Sources | TextSource,
    out: Path | str,
    *,
    tokenizer: Tokenizer | TokenizerConfig,
    validation: Split | None = None,
    column: str = "text",
) -> Shards:
    """Turn text into token shards in the folder `out`, with a finished tokenizer or one trained on this text.

    A TextSource has all that is said of the text, its encoding too.
    """
    if isinstance(sources, TextSource):
        text = sources
    else:
        text = TextSource(names_of(sources), validation or HashSplit(), column)
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = build_tokenizer(tokenizer, train_texts(text))
    return prepare_shards(text, out, tokenizer)


@checked
@watched
def train(
    recipe: str | Path | Recipe,
    *,
    data: Sources = (),
    run: Path | str | None = None,
    changes: Changes = (),
    log: Log = log_to_stderr,
) -> Run:
    """Train a model and return it with its best weights.

        weft.train("gpt-tiny", data="book.txt", changes={"model.layers": 2, "optimizer.lr": 1e-3, "tokenizer": "char"})

    recipe   a preset, the name of a recipe that comes with weft, a .toml file or a Recipe; or a run's folder, whose
             weights are trained further on other data in a run of their own
    data     files, folders or patterns to learn from, in place of the recipe's
    run      the folder of the new run; a free one in runs/ if left out
    changes  settings by dotted keys, as a dict, or as on the command line: ["model.layers=2", "tokenizer=char"]
    log      is called with each message; they go to standard error if left out

    What the recipe leaves open is chosen, and each choice is logged. Processes that torchrun started train one model
    together; each returns it.
    """
    ranks = join()
    if not ranks.leads:
        return _follow(ranks)
    sources = names_of(data)
    if not isinstance(recipe, Recipe):
        source, above = str(recipe), changed_tables(changes)
        if is_run(source) and "init" not in above and not continues(source, above, sources):
            raise ConfigError(
                f"{source}: a run; to train its weights further on other text: weft train {source} --data FILE; to "
                f"continue it: weft train --resume {source}; to repeat it: weft train {Path(source) / 'config.toml'}"
            )
    wanted = resolve(recipe, changes, sources, log)
    _check(wanted)
    wanted.parallel.over(ranks.ranks)  # refused before anything is read
    begun = _begun(Path("runs") / wanted.name if run is None else Path(run), run is None)
    if begun is not None:
        log(f"{begun}: this job has begun it before it was restarted; continuing")
        return resume(begun, log=log)
    with claimed(free_folder(Path("runs") / wanted.name) if run is None else run) as folder:
        settled, objective, choices = _prepare(wanted, folder, log)
        ranks.share(lambda: _invitation(settled, folder))
        as_command = Path(sys.argv[0]).parts[-1:] == ("weft",) or Path(sys.argv[0]).parts[-2:] == (
            "weft",
            "__main__.py",
        )
        command = shlex.join(["weft", *sys.argv[1:]]) if as_command else None
        worker = TrainingWorker(ranks=ranks, log=log)
        chosen = [[choice.key, str(choice.value), choice.why] for choice in choices]
        notes = {"command": command, "choices": chosen} | ({"job": name} if (name := job()) is not None else {})
        start.train(settled, folder, objective, worker=worker, notes=notes)
        return finish(settled, folder, objective, ranks)


@checked
@watched
def resume(run: Path | str, *, changes: Changes = (), log: Log = log_to_stderr) -> Run:
    """Continue an interrupted run, as if it had never stopped; with as many processes as there are this time.

    `changes` let it train for longer, a finished run too: {"steps": 3000}; and evaluate, save or log at other steps.
    """
    ranks = join()
    if not ranks.leads:
        return _follow(ranks)
    folder = open_run(run)
    if not folder.recipe().data.parts:
        raise RunError(f"{run}: imported, not trained here; train it further with `weft train {run} --data FILE`")
    recipe = folder.settled_recipe()
    with held(folder):
        objective = objectives.build(recipe, folder)
        if changes:
            recipe = _extend(folder, recipe, changes, ranks, log)
        recipe.parallel.over(ranks.ranks)
        _check_data(objective, log)
        if recipe.model.kind != "ngram" and (found := checkpoint.standing(folder.checkpoints)):
            check_lines(folder, recipe, checkpoint.step_of(found[-1]))
        ranks.share(lambda: _invitation(recipe, folder))
        start.resume(recipe, folder, objective, worker=TrainingWorker(ranks=ranks, log=log))
        return finish(recipe, folder, objective, ranks)


def _begun(wanted: Path, free: bool) -> Path | None:
    """The run that torchrun's job began, where it has started the processes again; with `free` under any free name."""
    if not restarts():
        return None
    names = [wanted, *sorted(wanted.parent.glob(f"{wanted.name}-*"))] if free else [wanted]
    for path in names:
        if is_run(str(path)):
            begins = [line for line in read_lines(RunFolder(path).events) if line["event"] == "start"]
            if begins and begins[-1].get("job") == job():
                return path
    return None


def free_folder(wanted: Path) -> Path:
    """`wanted`, or the first of wanted-2, wanted-3 … that doesn't exist."""
    names = itertools.chain([wanted], (wanted.with_name(f"{wanted.name}-{n}") for n in itertools.count(2)))
    return next(path for path in names if not path.exists())


def _extend(folder: RunFolder, recipe: SettledRecipe, changes: Changes, ranks: Ranks, log: Log) -> SettledRecipe:
    """The recipe of a run that goes on longer than it was meant to, saved; and what that does to its learning rate."""
    longer, news = extended(recipe, changes)
    refuse_unread(longer)
    longer.parallel.over(ranks.ranks)
    check_log(longer.log)
    found = checkpoint.standing(folder.checkpoints)
    step, notes = (checkpoint.step_of(found[-1]), checkpoint.notes_of(found[-1])) if found else (0, {})
    if longer.steps < step:
        raise ConfigError(f"steps = {longer.steps}: the run has taken {step} already; give more")
    patience = longer.evaluate.patience
    if news and patience is not None and notes.get("worse", 0) >= patience and step < longer.steps:
        raise ConfigError(f"evaluate.patience = {patience}: it ended the run after step {step}; to continue, give more")
    if not news:
        return recipe
    if "steps" in news and not isinstance(recipe.schedule, Constant | Noam):
        before, after = (
            schedule.build(r.schedule, r.optimizer.lr or 0.0, r.steps, d_model=0) for r in (recipe, longer)
        )
        news["steps"] += f"; the {recipe.schedule.kind} schedule now spans {longer.steps} steps"
        if step:
            rates = f"was {before(step):.2g} at step {step} and is {after(step + 1):.2g} at step {step + 1}"
            news["steps"] += f": the learning rate {rates}"
    report_changes(folder, log)
    folder.write_config(longer)
    given = flat(longer.model_dump(mode="json"))
    words = [f"{key}={given[key] if isinstance(given[key], str) else json.dumps(given[key])}" for key in news]
    command = shlex.join(["weft", "train", "--resume", str(folder.path), *words])
    folder.event("recipe", step=step, changes=list(news.values()), command=command)
    note_files(folder)
    for line in news.values():
        log(line)
    return longer


def _check(recipe: Recipe) -> None:
    if not recipe.data.parts:
        raise ConfigError(f"{recipe.name}: there is no text to learn from; give it with --data FILE (in Python data=)")
    recipe.objective.check(recipe.model)
    refuse_unread(recipe)
    if any("-" in part.sources for part in recipe.data.parts):
        raise DataError("'-': training may read its text twice, which standard input can't; name a file")


def _prepare(recipe: Recipe, folder: RunFolder, log: Log) -> tuple[SettledRecipe, Objective[Any], list[Choice]]:
    device = pick_device().type
    config, choices, tokenizers = _tokenizers(recipe, folder, device)
    recipe = recipe.replace(tokenizer=config.model_dump(mode="json", exclude_none=True))
    column = recipe.data.column if recipe.objective.reads != "rows" else None
    data, held_out = recipe.data, held_out_files(recipe.data.validation)
    for sources, apart in () if data.targets else [*((part.sources, held_out) for part in data.parts), (held_out, ())]:
        files(sources, column, data.encoding, lambda line: folder.event("left out", line=line), apart)
    facts = objectives.build(recipe, folder, tokenizers).prepare(log)
    facts = replace(facts, trained=_tokens_learned(recipe.init))
    settled, more = settle(recipe, facts, device, products)
    choices = [*choices, *more]
    _announce(settled, facts, choices, log)
    return settled, objectives.build(settled, folder, tokenizers), choices


def _tokens_learned(init: str | None) -> int | None:
    """The tokens that a run's weights learned from, with those of the runs that it began with; None if not known."""
    total, seen = 0, set[str]()
    while init is not None and init not in seen:
        seen.add(init)
        run = RunFolder(init)
        read = [line["tokens"] for line in read_lines(run.metrics) if "tokens" in line] if run.metrics.is_file() else []
        if run.origin.is_dir() or not read:
            return None
        total, init = total + read[-1], run.recipe().init
    return total if seen else None


def _tokenizers(recipe: Recipe, folder: RunFolder, device: str) -> tuple[TokenizerConfig, list[Choice], Tokenizers]:
    """The tokenizers, in the run's folder; the settings of the first one, and what was chosen of them."""
    objective = objectives.build(recipe, folder)
    config, choices = _tokenizer_settings(recipe, objective, device)
    side: Literal["target"] | None = None if recipe.source_tokenizer is None else "target"
    target, config, choices = trained_tokenizer(config, choices, lambda: _texts(objective, side))
    if recipe.init is not None and target.fingerprint != Tokenizer.load(recipe.init).fingerprint:
        raise ConfigError(
            f"tokenizer: another one than that of init = '{recipe.init}', whose weights know only their own tokens; "
            "leave tokenizer out, and it is taken from there"
        )
    if isinstance(recipe.objective, Chat):
        target = with_template(target)  # saved with the run, so that `weft chat` frames turns as training did
    source = target
    target.save(folder.path)
    if recipe.source_tokenizer is not None:
        source = build_tokenizer(recipe.source_tokenizer, _texts(objective, "source"))
        source.save(folder.source_tokenizer)
    return config, choices, Tokenizers(target, source)


def trained_tokenizer(
    config: TokenizerConfig, choices: list[Choice], texts: Callable[[], Iterable[str]]
) -> tuple[Tokenizer, TokenizerConfig, list[Choice]]:
    """A tokenizer, trained on `texts` or loaded; its settings, and what was chosen of them.

    A size of the vocabulary that was our own choice is one that a short text may not support.
    """
    if not choices or choices[-1].key != "tokenizer.vocab_size":
        return build_tokenizer(config, texts()), config, choices
    chosen: int = choices[-1].value
    config = config.replace(vocab_size=None)
    # a text for which a small vocabulary was chosen is some megabytes long: held, it is read once
    held = list(texts()) if chosen < DEFAULT_SIZE else texts()
    try:
        found = build_tokenizer(config, held, default_size=chosen)
    except TokenizerError:
        if chosen >= DEFAULT_SIZE:
            raise
        found = build_tokenizer(config, held)  # it has more characters than were chosen
    if found.vocab_size != chosen:
        choices = [*choices[:-1], Choice("tokenizer.vocab_size", found.vocab_size, "all that this text supports")]
    return found, config.replace(vocab_size=found.vocab_size), choices


def _texts(objective: Objective[Any], side: Literal["target", "source"] | None) -> Iterator[str]:
    """The training text, for a tokenizer to learn from. Data of which nothing is left to train on is refused."""
    sources = [source for part in objective.recipe.data.parts for source in part.sources]
    return some_texts(objective.texts(side), sources, ", or hold out nothing with data.validation.kind=none")


def _tokenizer_settings(recipe: Recipe, objective: Objective[Any], device: str) -> tuple[TokenizerConfig, list[Choice]]:
    """The recipe's tokenizer, that of its prepared data, or one chosen for the amount of text."""
    prepared = [part.prepared for part in recipe.data.parts if part.prepared is not None]
    if prepared and recipe.tokenizer is None:
        return Pretrained(path=prepared[0]), []
    if prepared and not isinstance(recipe.tokenizer, Pretrained):
        kind = recipe.tokenizer.kind if recipe.tokenizer else None
        own = f"{prepared[0]} is prepared already, with a tokenizer of its own"
        raise ConfigError(f"tokenizer.kind = '{kind}': {own}; leave it out")
    if recipe.tokenizer is not None and not hasattr(recipe.tokenizer, "vocab_size"):
        return recipe.tokenizer, []
    return choose_tokenizer(recipe, objective.amount(), device)


def _announce(recipe: Recipe, facts: Facts, choices: Sequence[Choice], log: Log) -> None:
    texts = recipe.data.parts if recipe.objective.reads != "rows" else ()
    for name in [source for part in texts for source in part.sources if source.startswith("builtin:")]:
        corpus = builtin.corpus(name.removeprefix("builtin:"))
        log(f"{name}: {sum(map(len, corpus.documents)):,} characters, sha256 {corpus.sha256}")
    log(f"{facts} to learn from" + (", so I chose:" if choices else ""))
    for choice in choices:
        log(f"  {choice}")


def _check_data(objective: Objective[Any], log: Log) -> None:
    """Prepare the data of a run again if it has been removed, and refuse other data than the run began with."""
    folder = objective.folder
    if not folder.data.exists() and any(part.prepared is None for part in objective.recipe.data.parts):
        log(f"{folder.data}: missing; preparing the data again")
        objective.prepare(log)
    began: list[str] = next((event["corpus"] for event in read_lines(folder.events) if event["event"] == "start"), [])
    if began and began != list(objective.fingerprints):
        places = [part.prepared or str(folder.data) for part in objective.recipe.data.parts]
        raise RunError(f"{', '.join(places)}: not the data that this run began with; put that back, or start a new run")


def _invitation(recipe: SettledRecipe, folder: RunFolder) -> dict[str, Any]:
    """What the other processes need to take part, now that data and tokenizers are in the run's folder."""
    return {"run": str(folder.path.resolve()), "recipe": recipe.model_dump(mode="json", exclude_none=True)}


def _follow(ranks: Ranks) -> Run:
    """Take part in what the first process has prepared, and read what came out."""
    invited: dict[str, Any] = ranks.share(dict)
    folder = FollowedRun(invited["run"])
    try:
        recipe = validate(SettledRecipe, invited["recipe"])
        worker = TrainingWorker(ranks=ranks, log=lambda line: None, quiet=True)
        start.follow(recipe, folder, objectives.build(recipe, folder), worker=worker)
    except LostError:  # it says itself who is gone
        raise
    except WeftError as error:
        raise type(error)(f"process {ranks.rank} of {ranks.ranks}: {error}") from error
    ranks.barrier()
    return load(folder.path, dtype=torch.float32)


def finish(recipe: SettledRecipe, folder: RunFolder, objective: Objective[Any], ranks: Ranks = ALONE) -> Run:
    """Evaluate the finished run on everything that was held out, let it write, and put all that into the report."""
    done = load(folder.path, dtype=torch.float32)  # measured as it learned
    with reading(recipe.precision, device_of(done.model)):
        results = objective.final_evaluation(done.model)
    folder.event("result", **results.metrics, samples=results.samples, table=results.table)
    write_report(folder)
    ranks.barrier()
    return done
