"""weft from Python: prepare a text, train a model, load a run, measure it, let it write.

Text, training, evaluation and the report are put together here; the commands parse, call these functions and print.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from weft.api.run import Run, beam, device_of, load, load_tokenizers, sampling
from weft.config import merge, validate
from weft.data.config import HashSplit, Split, TextSource
from weft.data.messages import with_template
from weft.data.prepare import prepare as prepare_shards
from weft.data.shards import Shards
from weft.data.split import train_texts
from weft.errors import ConfigError, DataError, RunError, TokenizerError, WeftError
from weft.objectives.objective import Lesson, Material, Tokenizers, lesson_for
from weft.parallel.ranks import Ranks, join
from weft.recipe.config import SOURCE_TOKENIZER, Recipe
from weft.recipe.objective import Chat
from weft.recipe.resolve import resolve
from weft.recipe.settle import Choice, TextFacts, check_trainable, fit_vocabulary, settle
from weft.recipe.unread import refuse_unread
from weft.runs.folder import FollowedRun, RunFolder, claimed, held, open_run
from weft.runs.journal import Say, say_on_stderr
from weft.runs.report import write_report
from weft.text import builtin
from weft.text.config import Pretrained, TokenizerConfig
from weft.text.tokenizer import Tokenizer, build_tokenizer
from weft.training import start
from weft.training.precision import autocast, pick_device

__all__ = ["Run", "beam", "load", "prepare", "resume", "sampling", "train"]


def prepare(
    sources: Sequence[str] | str,
    out: Path | str,
    *,
    tokenizer: Tokenizer | TokenizerConfig,
    validation: Split | None = None,
    column: str = "text",
) -> Shards:
    """Turn text into token shards in the folder `out`, with a finished tokenizer or one trained on this text."""
    sources = [sources] if isinstance(sources, str) else list(sources)
    text = TextSource(sources, validation or HashSplit(), column)
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = build_tokenizer(tokenizer, train_texts(text), progress=True)
    return prepare_shards(text, out, tokenizer)


# ---- training


def train(
    recipe: str | Path | Recipe,
    *,
    data: Sequence[str] | str = (),
    run: Path | str | None = None,
    changes: Sequence[str] | Mapping[str, Any] = (),
    say: Say = say_on_stderr,
) -> Run:
    """Train a model and return it with its best weights.

    `recipe` is a preset, a recipe's name, a .toml file or a Recipe; `changes` are key=value words or a table. Without
    `run` a free folder in runs/ is taken. What the recipe leaves open is chosen, and each choice is told to `say`.
    Processes that torchrun started train one model together; each returns it.
    """
    ranks = join()
    if not ranks.leads:
        return _follow(ranks)
    sources = [data] if isinstance(data, str) else list(data)
    if isinstance(recipe, Recipe):
        if sources or changes:
            above: dict[str, Any] = {"data": {"sources": sources}} if sources else {}
            assert isinstance(changes, Mapping), "a Recipe is changed by a table"
            recipe = validate(Recipe, merge(merge(recipe.model_dump(mode="json", exclude_none=True), changes), above))
    else:
        recipe = resolve(str(recipe), changes, sources)
    if not recipe.data.parts:
        raise ConfigError(
            f"{recipe.name}: there is no text to learn from; give it with --data, for instance a .txt file"
        )
    check_trainable(recipe, 0)
    refuse_unread(recipe)
    lesson = lesson_for(recipe)
    with claimed(free_folder(Path("runs") / recipe.name) if run is None else run) as folder:
        settled, choices, text = _settle(recipe, lesson)
        settled, tokenizers, more = _tokenizers(settled, choices, lesson)
        settled, found = lesson.prepare(settled, folder, tokenizers, say)
        settled, fitted = fit_vocabulary(settled, tokenizers.target.vocab_size, tokenizers.source.vocab_size)
        choices = [*choices, *more, *found, *fitted]
        _tell(settled, text, choices, say)
        if settled.source_tokenizer is not None:
            tokenizers.source.save(folder.path / SOURCE_TOKENIZER)
        material = lesson.open(settled, folder, tokenizers)
        if not ranks.alone:
            tokenizers.target.save(folder.path)  # where the others read it
        ranks.share(lambda: _invitation(settled, folder))
        start.train(
            settled,
            folder,
            corpus=material.corpus,
            tokenizer=tokenizers.target,
            evaluators=material.evaluators,
            choices=choices,
            command=" ".join(["weft", *sys.argv[1:]]) if Path(sys.argv[0]).name == "weft" else None,
            writer=material.writer,
            say=say,
            ranks=ranks,
        )
        return _conclude(folder, material, ranks)


def resume(run: Path | str, *, say: Say = say_on_stderr) -> Run:
    """Go on with an interrupted run, as if it had never stopped; with as many processes as there are this time."""
    ranks = join()
    if not ranks.leads:
        return _follow(ranks)
    folder = open_run(run)
    recipe = folder.recipe()
    if not recipe.data.parts:
        raise RunError(f"{run}: imported, not trained here; learn on with `weft train … init={run}`")
    with held(folder):
        material = lesson_for(recipe).open(recipe, folder, load_tokenizers(recipe, folder.path))
        ranks.share(lambda: _invitation(recipe, folder))
        start.resume(
            folder,
            corpus=material.corpus,
            evaluators=material.evaluators,
            writer=material.writer,
            say=say,
            ranks=ranks,
        )
        return _conclude(folder, material, ranks)


def _invitation(recipe: Recipe, folder: RunFolder) -> dict[str, Any]:
    """What the other processes need to take part, now that data and tokenizers are in the run's folder."""
    return {"run": str(folder.path.resolve()), "recipe": recipe.model_dump(mode="json", exclude_none=True)}


def _follow(ranks: Ranks) -> Run:
    """Take part in what the first process has prepared, and read what came out."""
    invited: dict[str, Any] = ranks.share(dict)
    folder = FollowedRun(Path(invited["run"]))
    try:
        recipe = validate(Recipe, invited["recipe"])
        material = lesson_for(recipe).open(recipe, folder, load_tokenizers(recipe, folder.path))
        start.follow(recipe, folder, corpus=material.corpus, evaluators=material.evaluators, ranks=ranks)
    except WeftError as error:
        raise type(error)(f"process {ranks.rank + 1} of {ranks.ranks}: {error}") from error
    ranks.wait()
    return load(folder.path, dtype=torch.float32)


def free_folder(wanted: Path) -> Path:
    """`wanted`, or the first of wanted-2, wanted-3 … that doesn't exist."""
    names = itertools.chain([wanted], (wanted.with_name(f"{wanted.name}-{n}") for n in itertools.count(2)))
    return next(path for path in names if not path.exists())


def _settle(recipe: Recipe, lesson: Lesson) -> tuple[Recipe, list[Choice], TextFacts]:
    """Choose what the recipe leaves open, from the amount of data and the device."""
    prepared = [part.prepared for part in recipe.data.parts if part.prepared is not None]
    if prepared and recipe.tokenizer is None:
        recipe = recipe.replace(tokenizer=Pretrained(path=prepared[0]))
    if prepared and not isinstance(recipe.tokenizer, Pretrained):
        kind = recipe.tokenizer.kind if recipe.tokenizer else None
        raise ConfigError(
            f"tokenizer.kind = '{kind}': {prepared[0]} is prepared already, with a tokenizer of its own; leave it out"
        )
    if any("-" in part.sources for part in recipe.data.parts):
        raise DataError("'-': training reads its text several times, which standard input can't; name a file")
    text = lesson.measure(recipe)
    if not text.bytes:
        names = ", ".join(source for part in recipe.data.parts for source in part.sources)
        raise DataError(
            f"{names}: too short to learn from one part and hold out another; give some thousand characters, "
            "or hold out nothing with data.validation.kind=none"
        )
    return *settle(recipe, text, pick_device().type), text


def _tell(recipe: Recipe, text: TextFacts, choices: Sequence[Choice], say: Say) -> None:
    """Which text it is, and what was chosen and why, now that it holds; of two words on a key the last one counts."""
    texts = recipe.data.parts if recipe.objective.reads != "rows" else ()
    for name in [source for part in texts for source in part.sources if source.startswith("builtin:")]:
        corpus = builtin.corpus(name.removeprefix("builtin:"))
        say(f"{name}: {sum(map(len, corpus.documents)):,} characters, sha256 {corpus.sha256}")
    last = {choice.key: choice for choice in choices}
    say(f"{text}{' of text' if text.rows is None else ''} to learn from" + (", so I chose:" if last else ""))
    for choice in last.values():
        say(f"  {choice}")


def _tokenizers(recipe: Recipe, choices: Sequence[Choice], lesson: Lesson) -> tuple[Recipe, Tokenizers, list[Choice]]:
    """Train or load the recipe's tokenizers. A vocabulary size that was our choice gives way where text is short."""
    own = recipe.source_tokenizer
    recipe, target, made = _tokenizer(recipe, choices, lambda: _said(recipe, lesson))
    if recipe.init is not None and target.fingerprint != Tokenizer.load(recipe.init).fingerprint:
        raise ConfigError(
            f"tokenizer: another one than that of init = '{recipe.init}', whose weights know their own tokens alone; "
            "leave tokenizer out, and it is taken from there"
        )
    if isinstance(recipe.objective, Chat):
        target = with_template(target)  # saved with the run, so that `weft chat` frames turns as training did
    if own is None:
        return recipe, Tokenizers(target, target), made
    source = build_tokenizer(own, lesson.texts(recipe, "source"), progress=True)
    return recipe, Tokenizers(target, source), made


def _said(recipe: Recipe, lesson: Lesson) -> Iterator[str]:
    """What the tokenizer learns from: what is written, and what is read unless that has a tokenizer of its own."""
    yield from lesson.texts(recipe, "target")
    if recipe.source_tokenizer is None and recipe.objective.reads == "rows":
        yield from lesson.texts(recipe, "source")


def _tokenizer(
    recipe: Recipe, choices: Sequence[Choice], texts: Callable[[], Iterator[str]]
) -> tuple[Recipe, Tokenizer, list[Choice]]:
    assert recipe.tokenizer is not None, "the recipe is settled"
    try:
        return recipe, build_tokenizer(recipe.tokenizer, texts(), progress=True), []
    except TokenizerError:
        if "tokenizer.vocab_size" not in [choice.key for choice in choices]:
            raise
    open_size = {key: value for key, value in recipe.tokenizer.model_dump().items() if key != "vocab_size"}
    tokenizer = build_tokenizer(type(recipe.tokenizer).model_validate(open_size), texts(), progress=True)
    smaller = Choice("tokenizer.vocab_size", tokenizer.vocab_size, "all that this text supports")
    return recipe.replace(tokenizer={**open_size, "vocab_size": tokenizer.vocab_size}), tokenizer, [smaller]


def _conclude(folder: RunFolder, material: Material, ranks: Ranks) -> Run:
    """Measure the finished run on everything that was held out, let it answer, and put all that into the report."""
    done = load(folder.path, dtype=torch.float32)  # measured as it learned
    assert done.config.precision is not None
    with autocast(done.config.precision, device_of(done.model)):
        ending = material.conclude(done.model)
    figures = {key: value if _finite(value) else None for key, value in ending.figures.items()}
    folder.event("result", **figures, samples=ending.samples)
    write_report(folder)
    ranks.wait()
    return done


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
