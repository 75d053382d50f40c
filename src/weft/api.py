"""weft from Python: prepare a text, train a model, load a run, measure it, let it write.

Text, training, evaluation and the report are put together here; the commands parse, call these functions and print.
"""

import itertools
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.config import merge, validate
from weft.data.config import HashSplit, NoSplit, Part, Split
from weft.data.prepare import prepare as prepare_shards
from weft.data.shards import Shards, Tokens
from weft.data.split import train_texts
from weft.decode.bulk import Results, bulk
from weft.decode.config import Beam, Sampling
from weft.decode.constrain import Pattern, schema_text
from weft.decode.search import search_texts
from weft.decode.speculative import write_ahead
from weft.decode.writing import Completion, Piece, complete, write
from weft.errors import ConfigError, DataError, RunError, TokenizerError
from weft.evaluate import baseline
from weft.evaluate.perplexity import Score, score, score_counts
from weft.models.base import LanguageModel
from weft.models.ngram import NGram
from weft.progress import bar
from weft.text import builtin
from weft.text.config import Pretrained, TokenizerConfig
from weft.text.tokenizer import Tokenizer
from weft.train import loop
from weft.train.choose import Choice, TextFacts, check_trainable, fit_vocabulary, measure, settle
from weft.train.config import Recipe, resolve
from weft.train.metrics import Say, say_on_stderr
from weft.train.precision import autocast, pick_device
from weft.train.report import write_report
from weft.train.run import RunFolder, claim, load_model, open_run, read_lines

EVALUATED_TOKENS = 8192  # read at once when scoring
BASELINE_TOKENS = 4_000_000  # of the training text, for the character frequencies
SAMPLES = 3


def sampling(**given: Any) -> Sampling:
    """How to write: temperature, top_k, top_p, max_tokens, seed, stop …; what is None keeps its default."""
    return validate(Sampling, {key: value for key, value in given.items() if value is not None})


def beam(**given: Any) -> Beam:
    """How to search: beams, n, length_penalty, max_tokens, stop …; what is None keeps its default."""
    return validate(Beam, {key: value for key, value in given.items() if value is not None})


@dataclass(frozen=True)
class Run:
    """A trained model with all that belongs to it, read from its run's folder."""

    path: Path
    config: Recipe
    model: LanguageModel
    tokenizer: Tokenizer

    def generate(self, prompt: str = "", **settings: Any) -> str:
        """What the model writes after `prompt`; settings as for `sampling`."""
        return self.complete([prompt], sampling(**settings))[0].text

    def pattern(self, expression: str) -> Pattern:
        """Texts that match a regular expression, for `write`, `candidates` and `bulk`."""
        return Pattern(self.tokenizer, expression)

    def schema(self, schema: Any) -> Pattern:
        """Texts that are JSON of this schema, likewise."""
        return schema_text(self.tokenizer, schema)

    def write(
        self,
        prompt: str,
        settings: Sampling,
        *,
        pattern: Pattern | None = None,
        draft: "Run | None" = None,
        lookup: int | None = None,
    ) -> Iterator[Piece]:
        """The same piece by piece, as it is written.

        A `draft`, a smaller run with the same tokenizer, or a `lookup` of up to so many tokens in the text itself guess
        ahead: the text is what it would be, only faster where the model is large.
        """
        if draft is None and lookup is None:
            within = None if pattern is None else [pattern.begin()]
            return write(self.model, self.tokenizer, [prompt], settings, constraints=within)
        if draft is not None and draft.tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise ConfigError(f"{draft.path}: a draft needs the tokenizer of {self.path}, but it has another one")
        guess = None if draft is None else draft.model
        constraint = None if pattern is None else pattern.begin()
        return write_ahead(
            self.model, self.tokenizer, prompt, settings, draft=guess, lookup=lookup, constraint=constraint
        )

    def complete(self, prompts: Sequence[str], settings: Sampling) -> list[Completion]:
        """Continue several texts at once; each has its own seed, counted up from settings.seed."""
        return complete(self.model, self.tokenizer, prompts, settings)

    def candidates(
        self,
        prompts: Sequence[str],
        settings: Sampling | Beam,
        *,
        n: int = 1,
        first: int = 0,
        pattern: Pattern | None = None,
    ) -> list[list[Completion]]:
        """Several texts for each prompt: n samples, or the settings.n best of beam search, best first.

        Prompts are numbered from `first` on; what is drawn for a prompt depends on its number and the seed.
        """
        if isinstance(settings, Beam):
            if pattern is not None:
                raise ConfigError("beam search can't be held to a pattern; leave one of them out")
            return search_texts(self.model, self.tokenizer, prompts, settings)
        seeds = [settings.seed + first * n + row for row in range(len(prompts) * n)]
        within = None if pattern is None else [pattern.begin() for _ in seeds]
        texts = complete(self.model, self.tokenizer, prompts, settings, copies=n, seeds=seeds, constraints=within)
        return [texts[place : place + n] for place in range(0, len(texts), n)]

    def bulk(
        self,
        prompts: Sequence[str],
        settings: Sampling | Beam,
        *,
        n: int = 1,
        batch: int = 16,
        out: Path | None = None,
        pattern: Pattern | None = None,
    ) -> Iterator[str]:
        """Texts for many prompts as lines of JSON, in order. With `out` they are written there as well, and what is
        there already is not written again."""
        said = {"n": n, **settings.model_dump(mode="json", exclude_defaults=True)}
        if pattern is not None:
            said["pattern"] = pattern.expression
        results = None if out is None else Results(out, prompts, said)
        done = 0 if results is None else results.done

        def some(texts: Sequence[str], first: int) -> list[list[Completion]]:
            return self.candidates(texts, settings, n=n, first=first, pattern=pattern)

        with bar("writing", len(prompts) - done) as advance:
            for lines in bulk(prompts, some, said, batch=batch, first=done):
                if results is not None:
                    results.append(lines)
                advance(len(lines))
                yield from lines
        if results is not None:
            results.close()

    def perplexity(self, data: Sequence[str] | str | None = None) -> float:
        """exp of the mean negative log-likelihood of a token, on held-out text or on `data`."""
        return self.score(data).perplexity

    def score(self, data: Sequence[str] | str | None = None, *, stride: int | None = None) -> Score:
        """Loss, perplexity and bits per byte over all of the run's held-out text, or over the sources `data`."""
        if data is not None:
            sources = [data] if isinstance(data, str) else list(data)
            with tempfile.TemporaryDirectory(prefix="weft-") as folder:
                shards = prepare_shards(
                    sources, Path(folder) / "data", self.tokenizer, validation=NoSplit(), column=self.config.data.column
                )
                return self._score([shards.train], stride)
        texts = _held_out(_corpora(self.config, RunFolder(self.path)))
        if not texts:
            raise DataError(f"{self.path}: this run held out no text; say what to measure with --data")
        return self._score(texts, stride)

    def _score(self, texts: Sequence[Tokens], stride: int | None) -> Score:
        assert self.config.precision is not None
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        with autocast(self.config.precision, device), bar("measuring", sum(map(len, texts))) as advance:
            return score_texts(self.config, self.tokenizer, self.model, texts, stride=stride, progress=advance)

    def results(self) -> dict[str, Any]:
        """The figures that training ended with; empty for a run that hasn't ended."""
        ends = [line for line in read_lines(RunFolder(self.path).events) if line.get("event") == "result"]
        return {key: value for key, value in ends[-1].items() if key not in ("time", "event")} if ends else {}


def load(run: Path | str, device: torch.device | str | None = None) -> Run:
    """A run's model with its best weights, and its tokenizer. Damaged checkpoints are passed over, with a warning."""
    folder = open_run(run)
    model, damage = load_model(folder, device=device or pick_device())
    for line in damage:
        say_on_stderr(f"weft: {line}")
    return Run(folder.path, folder.recipe(), model, Tokenizer.load(folder.path))


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
    split = validation or HashSplit()
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = tokenizer.train(train_texts(sources, split, column=column), progress=True)
    return prepare_shards(sources, out, tokenizer, validation=split, column=column)


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
    """
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
    folder = claim(free_folder(Path("runs") / recipe.name) if run is None else run)
    try:
        settled, choices, text = _settle(recipe)
        settled, tokenizer, more = _tokenizer(settled, choices)
        corpora = _prepare(settled, folder, tokenizer)
        settled, fitted = fit_vocabulary(settled, tokenizer.vocab_size)
        choices = [*choices, *more, *fitted]
        _tell(settled, text, choices, say)
        loop.train(
            settled,
            folder,
            corpus=corpora if len(corpora) > 1 else corpora[0],
            tokenizer=tokenizer,
            evaluators=_evaluators(settled, tokenizer, corpora),
            choices=choices,
            command=" ".join(["weft", *sys.argv[1:]]) if Path(sys.argv[0]).name == "weft" else None,
            writer=_writer(tokenizer),
            say=say,
        )
    except BaseException:
        _tidy(folder)
        raise
    return _conclude(folder, corpora)


def resume(run: Path | str, *, say: Say = say_on_stderr) -> Run:
    """Go on with an interrupted run, as if it had never stopped."""
    folder = open_run(run)
    recipe = folder.recipe()
    corpora = _corpora(recipe, folder)
    tokenizer = Tokenizer.load(folder.path)
    evaluators = _evaluators(recipe, tokenizer, corpora)
    loop.resume(
        folder,
        corpus=corpora if len(corpora) > 1 else corpora[0],
        evaluators=evaluators,
        writer=_writer(tokenizer),
        say=say,
    )
    return _conclude(folder, corpora)


def free_folder(wanted: Path) -> Path:
    """`wanted`, or the first of wanted-2, wanted-3 … that doesn't exist."""
    names = itertools.chain([wanted], (wanted.with_name(f"{wanted.name}-{n}") for n in itertools.count(2)))
    return next(path for path in names if not path.exists())


def _tidy(folder: RunFolder) -> None:
    """A start that failed before its first step leaves nothing behind."""
    if not folder.config.exists():
        shutil.rmtree(folder.data, ignore_errors=True)
        if folder.path.is_dir() and not any(folder.path.iterdir()):
            folder.path.rmdir()


def _settle(recipe: Recipe) -> tuple[Recipe, list[Choice], TextFacts]:
    """Choose what the recipe leaves open, from the amount of text and the device."""
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
    sizes = [_measure(recipe, part) for part in recipe.data.parts]
    text = TextFacts(sum(size.bytes for size in sizes), all(size.whole for size in sizes))
    if not text.bytes:
        names = ", ".join(source for part in recipe.data.parts for source in part.sources)
        raise DataError(
            f"{names}: too short to learn from one part and hold out another; give some thousand characters, "
            "or hold out nothing with data.validation.kind=none"
        )
    return *settle(recipe, text, pick_device().type), text


def _tell(recipe: Recipe, text: TextFacts, choices: Sequence[Choice], say: Say) -> None:
    """Which text it is, and what was chosen and why, now that it holds; of two words on a key the last one counts."""
    for name in [source for part in recipe.data.parts for source in part.sources if source.startswith("builtin:")]:
        corpus = builtin.corpus(name.removeprefix("builtin:"))
        say(f"{name}: {sum(map(len, corpus.documents)):,} characters, sha256 {corpus.sha256}")
    last = {choice.key: choice for choice in choices}
    say(f"{text} of text to learn from" + (", so I chose:" if last else ""))
    for choice in last.values():
        say(f"  {choice}")


def _measure(recipe: Recipe, part: Part) -> TextFacts:
    if part.prepared is not None:
        return TextFacts(Shards.open(part.prepared).train.bytes)
    return measure(train_texts(part.sources, recipe.data.validation, column=recipe.data.column))


def _tokenizer(recipe: Recipe, choices: Sequence[Choice]) -> tuple[Recipe, Tokenizer, list[Choice]]:
    """Train or load the recipe's tokenizer. A vocabulary size that was our choice gives way to a text that is short."""
    assert recipe.tokenizer is not None, "the recipe is settled"

    def texts() -> Iterator[str]:
        for part in recipe.data.parts:
            yield from train_texts(part.sources, recipe.data.validation, column=recipe.data.column)

    try:
        return recipe, recipe.tokenizer.train(texts(), progress=True), []
    except TokenizerError:
        if "tokenizer.vocab_size" not in [choice.key for choice in choices]:
            raise
    open_size = {key: value for key, value in recipe.tokenizer.model_dump().items() if key != "vocab_size"}
    tokenizer = type(recipe.tokenizer).model_validate(open_size).train(texts(), progress=True)
    smaller = Choice("tokenizer.vocab_size", tokenizer.vocab_size, "all that this text supports")
    return recipe.replace(tokenizer={**open_size, "vocab_size": tokenizer.vocab_size}), tokenizer, [smaller]


def _places(recipe: Recipe, folder: RunFolder) -> list[Path]:
    """Where each part's tokens are: the prepared folder it names, or one inside the run."""
    parts = recipe.data.parts
    inside = [folder.data] if len(parts) == 1 else [folder.data / f"part-{n}" for n in range(1, len(parts) + 1)]
    return [Path(part.prepared) if part.prepared is not None else own for part, own in zip(parts, inside, strict=True)]


def _prepare(recipe: Recipe, folder: RunFolder, tokenizer: Tokenizer) -> list[Shards]:
    if (folder.data / "plan.json").exists():  # from a start that was killed; it may have been of another text
        shutil.rmtree(folder.data)
    for part, place in zip(recipe.data.parts, _places(recipe, folder), strict=True):
        if part.prepared is None:
            prepare_shards(part.sources, place, tokenizer, validation=recipe.data.validation, column=recipe.data.column)
    corpora = _corpora(recipe, folder)
    for part, corpus in zip(recipe.data.parts, corpora, strict=True):
        if corpus.index.tokenizer != tokenizer.fingerprint:
            raise DataError(
                f"{part.prepared}: prepared with another tokenizer than this run's; "
                f'set tokenizer={{kind="pretrained", path="{part.prepared}"}}'
            )
    return corpora


def _corpora(recipe: Recipe, folder: RunFolder) -> list[Shards]:
    try:
        return [Shards.open(place) for place in _places(recipe, folder)]
    except DataError as error:
        raise RunError(f"{folder.path}: its text can't be read: {error}") from None


def _held_out(corpora: Sequence[Shards]) -> list[Tokens]:
    return [corpus.validation for corpus in corpora if corpus.validation is not None]


# ---- measuring


def score_texts(
    recipe: Recipe,
    tokenizer: Tokenizer,
    model: LanguageModel,
    texts: Sequence[Tokens],
    *,
    limit: int | None = None,
    stride: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> Score:
    """One score over several texts, each read in the windows that the model was trained on."""
    if isinstance(model, NGram):
        scores = [score_counts(model, text, limit=limit) for text in texts]
    else:
        length = recipe.batch.length
        assert length is not None, "the recipe is settled"
        mask = recipe.data.document_mask
        scores = [
            score(
                model,
                text,
                length=length,
                batch=max(1, EVALUATED_TOKENS // length),
                stride=stride,
                first=None if mask else tokenizer.eos_id,
                limit=limit,
                document_mask=mask,
                progress=progress,
            )
            for text in texts
        ]
    return Score(sum(s.nats for s in scores), sum(s.tokens for s in scores), sum(s.bytes for s in scores))


def _evaluators(recipe: Recipe, tokenizer: Tokenizer, corpora: Sequence[Shards]) -> list[loop.Evaluator]:
    """What the loop asks now and then: the figures on (the beginning of) the held-out text."""
    texts = _held_out(corpora)
    if not texts:
        return []
    return [lambda model: score_texts(recipe, tokenizer, model, texts, limit=recipe.evaluate.tokens).numbers()]


def _writer(tokenizer: Tokenizer) -> Callable[[LanguageModel], list[str]]:
    """What the loop asks after each evaluation: a few words, to see in the report how they become better."""
    settings = sampling(max_tokens=30, temperature=0.8, top_p=0.95)
    return lambda model: [complete(model, tokenizer, [""], settings)[0].text]


def character_baseline(tokenizer: Tokenizer, corpora: Sequence[Shards]) -> baseline.Measure:
    """What character frequencies of the training text need for the held-out text."""
    model = baseline.fit(
        text for corpus in corpora for text in _decoded(tokenizer, corpus.train, BASELINE_TOKENS // len(corpora))
    )
    return baseline.measure(model, (t for held in _held_out(corpora) for t in _decoded(tokenizer, held)))


def _decoded(tokenizer: Tokenizer, tokens: Tokens, most: int | None = None) -> Iterator[str]:
    """The text that tokens spell, a part at a time."""
    end = len(tokens) if most is None else min(most, len(tokens))
    for start in range(0, end, 1 << 16):
        yield tokenizer.decode(tokens.read(start, min(1 << 16, end - start)).tolist())


def _conclude(folder: RunFolder, corpora: Sequence[Shards]) -> Run:
    """Measure the finished run on everything that was held out, let it write, and put all that into the report."""
    done = load(folder.path)
    figures: dict[str, Any] = {}
    if _held_out(corpora):
        scored, characters = done.score(), character_baseline(done.tokenizer, corpora)
        figures = {
            **scored.numbers(),
            "nats_per_character": scored.nats / characters.characters if characters.characters else math.nan,
            "baseline_bits_per_byte": characters.bits_per_byte,
        }
        figures = {key: value if math.isfinite(value) else None for key, value in figures.items()}
    settings = sampling(max_tokens=100, temperature=0.8, top_p=0.95)
    samples = [completion.text for completion in done.complete([""] * SAMPLES, settings)]
    folder.event("result", **figures, samples=samples)
    write_report(folder)
    return done
