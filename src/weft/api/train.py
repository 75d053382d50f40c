"""Prepare data, train a model, resume a run: the Python API, and what `weft prepare` and `weft train` call."""

import itertools
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from weft.api.arguments import Sources, checked, source_names
from weft.api.load import load
from weft.api.run import Run
from weft.config import flat, validate
from weft.data.config import HashSplit, Split, TextSource, held_out_files
from weft.data.messages import with_template
from weft.data.prepare import prepare as prepare_shards
from weft.data.shards import Shards
from weft.data.sources import find_files
from weft.data.split import require_text, train_texts
from weft.errors import ConfigError, DataError, LostError, RunError, TokenizerError, WeftError, quoted
from weft.machine import matmul_rates, pick_device
from weft.models.base import device_of
from weft.objectives import table as objectives
from weft.parallel.ranks import ALONE, Ranks, job, join, restarts, watched
from weft.progress import Log, log_to_stderr
from weft.recipe.config import Recipe, SettledRecipe
from weft.recipe.draft import ChosenSetting
from weft.recipe.objective import Chat
from weft.recipe.optimizer import Constant, Noam
from weft.recipe.resolve import Changes, changed_tables, extend_recipe, fine_tunes, is_run, resolve
from weft.recipe.settle import Facts, choose_tokenizer, settle
from weft.recipe.unread import refuse_unread
from weft.runs import checkpoint
from weft.runs.folder import FollowedRun, RunFolder, claim_run, lock_run, note_files, open_run, report_changes
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

Choices = list[ChosenSetting]


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

    A TextSource carries `validation` and `column` itself, and the encoding.
    """
    if not isinstance(sources, TextSource):
        sources = TextSource(source_names(sources), validation or HashSplit(), column)
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = build_tokenizer(tokenizer, train_texts(sources))
    return prepare_shards(sources, out, tokenizer)


@checked
@watched
def train(
    recipe: str | Path | Recipe,
    *,
    data: Sources = (),
    run: Path | str | None = None,
    changes: Changes = (),
    log: Log = log_to_stderr,
    command: str | None = None,
) -> Run:
    """Train a model and return it with its best weights.

        weft.train("gpt-tiny", data="book.txt", changes={"model.layers": 2, "optimizer.lr": 1e-3, "tokenizer": "char"})

    recipe   a preset, the name of a recipe that comes with weft, a .toml file or a Recipe; or a run's folder, whose
             weights are fine-tuned on other data in a new run
    data     files, folders or patterns to train on, instead of the recipe's
    run      the folder of the new run; by default a free one in runs/
    changes  settings by dotted keys, as a dict, or as on the command line: ["model.layers=2", "tokenizer=char"]
    log      is called with each message; by default they go to standard error
    command  the shell command that started the training, noted in the run

    Settings that the recipe leaves open are chosen, and each choice is logged. Under torchrun, all processes train one
    model, and each returns it.
    """
    ranks = join()
    if not ranks.leads:
        return _follow(ranks)
    sources = source_names(data)
    if not isinstance(recipe, Recipe):
        source, above = str(recipe), changed_tables(changes)
        if is_run(source) and "init" not in above and not fine_tunes(source, above, sources):
            shown, config = quoted(source), quoted(Path(source) / "config.toml")
            raise ConfigError(
                f"{source}: a run; to fine-tune its weights on other text: weft train {shown} --data FILE; to "
                f"resume it: weft train --resume {shown}; to repeat it: weft train {config}"
            )
    resolved = resolve(recipe, changes, sources, log=log)
    _check(resolved)
    resolved.parallel.over(ranks.ranks)  # refused before anything is read
    default = Path("runs") / resolved.name
    begun = _begun_by_this_job(default if run is None else Path(run), any_free_name=run is None)
    if begun is not None:
        log(f"{begun}: begun by this job before it was restarted; resuming")
        return resume(begun, log=log)
    with claim_run(free_folder(default) if run is None else run) as folder:
        settled, objective, choices = _prepare(resolved, folder, log)
        ranks.share(lambda: _invitation(settled, folder))
        worker = TrainingWorker(ranks=ranks, log=log)
        chosen = [[choice.key, str(choice.value), choice.why] for choice in choices]
        notes = {"command": command, "choices": chosen} | ({"job": name} if (name := job()) is not None else {})
        start.train(settled, folder, objective, worker=worker, notes=notes)
        return finish(settled, folder, objective, ranks=ranks)


@checked
@watched
def resume(run: Path | str, *, changes: Changes = (), log: Log = log_to_stderr) -> Run:
    """Resume an interrupted run as if it had never stopped; the number of processes may differ.

    `changes` may extend the training, even of a finished run: {"steps": 3000}; or when it evaluates, saves and logs.
    """
    ranks = join()
    if not ranks.leads:
        return _follow(ranks)
    folder = open_run(run)
    if not folder.recipe().data.parts:
        raise RunError(f"{run}: imported, not trained here; fine-tune it with `weft train {quoted(run)} --data FILE`")
    recipe = folder.settled_recipe()
    with lock_run(folder):
        objective = objectives.build(recipe, folder)
        if changes:
            recipe = _extend(folder, recipe, changes, ranks=ranks, log=log)
        recipe.parallel.over(ranks.ranks)
        _check_data(objective, log)
        if recipe.model.kind != "ngram" and (checkpoints := checkpoint.all_checkpoints(folder.checkpoints)):
            check_lines(folder, recipe, checkpoint.step_of(checkpoints[-1]))
        ranks.share(lambda: _invitation(recipe, folder))
        start.resume(recipe, folder, objective, worker=TrainingWorker(ranks=ranks, log=log))
        return finish(recipe, folder, objective, ranks=ranks)


def _begun_by_this_job(path: Path, *, any_free_name: bool) -> Path | None:
    """Return the run that this torchrun job began before it restarted its processes, if any."""
    if not restarts():
        return None
    for candidate in [path, *(sorted(path.parent.glob(f"{path.name}-*")) if any_free_name else ())]:
        if is_run(str(candidate)):
            starts = [line for line in read_lines(RunFolder(candidate).events) if line["event"] == "start"]
            if starts and starts[-1].get("job") == job():
                return candidate
    return None


def free_folder(path: Path) -> Path:
    """Return `path`, or the first of path-2, path-3 … that doesn't exist."""
    names = itertools.chain([path], (path.with_name(f"{path.name}-{n}") for n in itertools.count(2)))
    return next(candidate for candidate in names if not candidate.exists())


def _extend(folder: RunFolder, recipe: SettledRecipe, changes: Changes, *, ranks: Ranks, log: Log) -> SettledRecipe:
    """Apply `changes` to a run that is resumed, save its recipe, and log what they do to its learning rate."""
    longer, messages = extend_recipe(recipe, changes)
    refuse_unread(longer)
    longer.parallel.over(ranks.ranks)
    check_log(longer.log)
    paths = checkpoint.all_checkpoints(folder.checkpoints)
    step, notes = (checkpoint.step_of(paths[-1]), checkpoint.notes_of(paths[-1])) if paths else (0, {})
    if longer.steps < step:
        raise ConfigError(f"steps = {longer.steps}: the run has already taken {step}; give more")
    patience = longer.evaluate.patience
    if messages and patience is not None and notes.get("worse", 0) >= patience and step < longer.steps:
        raise ConfigError(f"evaluate.patience = {patience}: it stopped the run after step {step}; to resume, give more")
    if not messages:
        return recipe
    if "steps" in messages and not isinstance(recipe.schedule, Constant | Noam):
        old, new = (schedule.build(r.schedule, r.optimizer.lr or 0.0, r.steps, d_model=0) for r in (recipe, longer))
        messages["steps"] += f"; the {recipe.schedule.kind} schedule now spans {longer.steps} steps"
        if step:
            rates = f"was {old(step):.2g} at step {step} and is {new(step + 1):.2g} at step {step + 1}"
            messages["steps"] += f": the learning rate {rates}"
    report_changes(folder, log)
    folder.write_config(longer)
    values = flat(longer.model_dump(mode="json"))
    words = [f"{key}={values[key] if isinstance(values[key], str) else json.dumps(values[key])}" for key in messages]
    command = shlex.join(["weft", "train", "--resume", str(folder.path), *words])
    folder.event("recipe", step=step, changes=list(messages.values()), command=command)
    note_files(folder)
    for line in messages.values():
        log(line)
    return longer


def _check(recipe: Recipe) -> None:
    if not recipe.data.parts:
        raise ConfigError(f"{recipe.name}: no text to train on; give it with --data FILE (in Python data=)")
    recipe.objective.check(recipe.model)
    refuse_unread(recipe)
    if any("-" in part.sources for part in recipe.data.parts):
        raise DataError("'-': training may read its text twice, but standard input can be read once; name a file")


def _prepare(recipe: Recipe, folder: RunFolder, log: Log) -> tuple[SettledRecipe, Objective[Any], Choices]:
    """Train the tokenizer, tokenize the data and settle the recipe; also return what was chosen."""
    device = pick_device().type
    config, choices, tokenizers = _tokenizers(recipe, folder, device)
    recipe = recipe.replace(tokenizer=config.model_dump(mode="json", exclude_none=True))
    column = recipe.data.column if recipe.objective.reads != "rows" else None
    data, held_out = recipe.data, held_out_files(recipe.data.validation)
    parts = [] if data.targets else [*((part.sources, held_out) for part in data.parts), (held_out, ())]
    for sources, excluded in parts:
        find_files(
            sources, column, data.encoding, log=lambda line: folder.event("left out", line=line), held_out=excluded
        )
    facts = objectives.build(recipe, folder, tokenizers).prepare(log)
    facts = replace(facts, trained_tokens=_tokens_learned(recipe.init))
    settled, settled_choices = settle(recipe, facts, device, measure=matmul_rates)
    choices = [*choices, *settled_choices]
    _log_choices(settled, facts, choices, log=log)
    return settled, objectives.build(settled, folder, tokenizers), choices


def _tokens_learned(init: str | None) -> int | None:
    """Return the tokens that a run's weights were trained on, with those of its ancestors; None if unknown."""
    total, visited = 0, set[str]()
    while init is not None and init not in visited:
        visited.add(init)
        run = RunFolder(init)
        lines = read_lines(run.metrics) if run.metrics.is_file() else ()
        counts = [line["tokens"] for line in lines if "tokens" in line]
        if run.origin.is_dir() or not counts:
            return None
        total, init = total + counts[-1], run.recipe().init
    return total if visited else None


def _tokenizers(recipe: Recipe, folder: RunFolder, device: str) -> tuple[TokenizerConfig, Choices, Tokenizers]:
    """Train or load the tokenizers and save them in the run's folder; also return the target's settings and choices."""
    objective = objectives.build(recipe, folder)
    config, choices = _tokenizer_settings(recipe, objective, device)
    side: Literal["target"] | None = None if recipe.source_tokenizer is None else "target"
    target, config, choices = trained_tokenizer(config, choices, lambda: _texts(objective, side))
    if recipe.init is not None and target.fingerprint != Tokenizer.load(recipe.init).fingerprint:
        raise ConfigError(
            f"tokenizer: differs from that of init = '{recipe.init}', whose weights need its own; "
            "leave tokenizer out to use that one"
        )
    if isinstance(recipe.objective, Chat):
        target = with_template(target)  # saved with the run, for `weft chat`
    source = target
    target.save(folder.path)
    if recipe.source_tokenizer is not None:
        source = build_tokenizer(recipe.source_tokenizer, _texts(objective, "source"))
        source.save(folder.source_tokenizer)
    return config, choices, Tokenizers(target, source)


def trained_tokenizer(
    config: TokenizerConfig, choices: Choices, texts: Callable[[], Iterable[str]]
) -> tuple[Tokenizer, TokenizerConfig, Choices]:
    """Train a tokenizer on `texts`, or load it; return it with its settings and the choices made for it.

    A vocabulary size that was chosen, not set, shrinks or grows to what the text supports.
    """
    if not choices or choices[-1].key != "tokenizer.vocab_size":
        return build_tokenizer(config, texts()), config, choices
    chosen: int = choices[-1].value
    config = config.replace(vocab_size=None)
    # a small vocabulary is chosen for a text of a few megabytes: keep it in memory, to read it once
    corpus = list(texts()) if chosen < DEFAULT_SIZE else texts()
    try:
        tokenizer = build_tokenizer(config, corpus, default_size=chosen)
    except TokenizerError:
        if chosen >= DEFAULT_SIZE:
            raise
        tokenizer = build_tokenizer(config, corpus)  # the text has more distinct characters than `chosen`
    if tokenizer.vocab_size != chosen:
        size = ChosenSetting("tokenizer.vocab_size", tokenizer.vocab_size, "all that this text supports")
        choices = [*choices[:-1], size]
    return tokenizer, config.replace(vocab_size=tokenizer.vocab_size), choices


def _texts(objective: Objective[Any], side: Literal["target", "source"] | None) -> Iterator[str]:
    """Return the training text for a tokenizer; refuse data that leaves nothing to train on."""
    sources = [source for part in objective.recipe.data.parts for source in part.sources]
    return require_text(objective.texts(side), sources, ", or hold out nothing with data.validation.kind=none")


def _tokenizer_settings(recipe: Recipe, objective: Objective[Any], device: str) -> tuple[TokenizerConfig, Choices]:
    """Return the settings of the recipe's tokenizer, the prepared data's, or one chosen for the amount of text."""
    prepared = [part.prepared for part in recipe.data.parts if part.prepared is not None]
    if prepared and recipe.tokenizer is None:
        return Pretrained(path=prepared[0]), []
    if prepared and not isinstance(recipe.tokenizer, Pretrained):
        kind = recipe.tokenizer.kind if recipe.tokenizer else None
        raise ConfigError(f"tokenizer.kind = '{kind}': {prepared[0]} was prepared with another tokenizer; leave it out")
    if recipe.tokenizer is not None and not hasattr(recipe.tokenizer, "vocab_size"):
        return recipe.tokenizer, []
    return choose_tokenizer(recipe, objective.amount(), device)


def _log_choices(recipe: Recipe, facts: Facts, choices: Sequence[ChosenSetting], *, log: Log) -> None:
    texts = recipe.data.parts if recipe.objective.reads != "rows" else ()
    for name in [source for part in texts for source in part.sources if source.startswith("builtin:")]:
        corpus = builtin.corpus(name.removeprefix("builtin:"))
        about = builtin.ABOUT.get(name.removeprefix("builtin:"), "sentences drawn by weft")
        log(f"{name}: {about}: {sum(map(len, corpus.documents)):,} characters, sha256 {corpus.sha256}")
    log(f"{facts} to train on" + ("; chosen settings:" if choices else ""))
    for choice in choices:
        log(f"  {choice}")


def _check_data(objective: Objective[Any], log: Log) -> None:
    """Prepare a run's data again if it has been removed; refuse data that differs from what the run began with."""
    folder = objective.folder
    if not folder.data.exists() and any(part.prepared is None for part in objective.recipe.data.parts):
        log(f"{folder.data}: missing; preparing the data again")
        objective.prepare(log)
    began: list[str] = next((event["corpus"] for event in read_lines(folder.events) if event["event"] == "start"), [])
    if began and began != list(objective.fingerprints):
        paths = ", ".join(part.prepared or str(folder.data) for part in objective.recipe.data.parts)
        raise RunError(f"{paths}: not the data that this run began with; put that back, or start a new run")


def _invitation(recipe: SettledRecipe, folder: RunFolder) -> dict[str, Any]:
    """Return what the other ranks need, once data and tokenizers are in the run's folder."""
    return {"run": str(folder.path.resolve()), "recipe": recipe.model_dump(mode="json", exclude_none=True)}


def _follow(ranks: Ranks) -> Run:
    """Train on a rank other than 0, which has prepared the run, and load the result."""
    invitation: dict[str, Any] = ranks.share(dict)
    folder = FollowedRun(invitation["run"])
    try:
        recipe = validate(SettledRecipe, invitation["recipe"])
        worker = TrainingWorker(ranks=ranks, log=lambda line: None, quiet=True)
        start.follow(recipe, folder, objectives.build(recipe, folder), worker=worker)
    except LostError:  # it names the lost rank
        raise
    except WeftError as error:
        raise type(error)(f"process {ranks.rank} of {ranks.ranks}: {error}") from error
    ranks.barrier()
    return load(folder.path, dtype=torch.float32)


def finish(recipe: SettledRecipe, folder: RunFolder, objective: Objective[Any], *, ranks: Ranks = ALONE) -> Run:
    """Run the final evaluation on all held-out data, with samples, and write the report."""
    done = load(folder.path, dtype=torch.float32)  # evaluated in the precision it was trained in
    with reading(recipe.precision, device_of(done.model)):
        results = objective.final_evaluation(done.model)
    folder.event("result", **results.metrics, samples=results.samples, table=results.table)
    write_report(folder)
    ranks.barrier()
    return done
