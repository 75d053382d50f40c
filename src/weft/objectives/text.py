"""Lessons from running text: the next token, masked words, or spans that were cut out."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.data.batch import Batch, evaluation_batches
from weft.data.config import Part
from weft.data.corrupt import Masking, Spans, masked_batch, spans_batch
from weft.data.prepare import prepare as prepare_shards
from weft.data.sampler import rows
from weft.data.shards import INDEX, Shards, Tokens
from weft.data.split import train_texts
from weft.decode.config import Sampling
from weft.decode.many import complete
from weft.decode.prompt import Prompt
from weft.errors import DataError, RunError
from weft.evaluate import baseline
from weft.evaluate.objective import mean_loss
from weft.evaluate.perplexity import Score, score, score_counts
from weft.models.base import LanguageModel
from weft.models.ngram import NGram
from weft.objectives.objective import Ending, Material, Tokenizers, check_cut
from weft.recipe import objective as goals
from weft.recipe.config import Recipe
from weft.recipe.settle import Choice, TextFacts, measure
from weft.runs.folder import RunFolder
from weft.runs.journal import Say
from weft.text.tokenizer import Tokenizer
from weft.training.loader import feed

EVALUATED_TOKENS = 8192  # read at once when scoring
BASELINE_TOKENS = 4_000_000  # of the training text, for the character frequencies
SAMPLES = 3


class TextLesson:
    """Documents become shards of tokens, read in windows."""

    def texts(self, recipe: Recipe, side: str = "target") -> Iterator[str]:
        """The training text of all parts."""
        for part in recipe.data.parts:
            yield from train_texts(part.sources, recipe.data.validation, column=recipe.data.column)

    def measure(self, recipe: Recipe) -> TextFacts:
        """Bytes of text, of prepared parts too."""
        sizes = [_measure(recipe, part) for part in recipe.data.parts]
        return TextFacts(sum(size.bytes for size in sizes), all(size.whole for size in sizes))

    def prepare(
        self, recipe: Recipe, folder: RunFolder, tokenizers: Tokenizers, say: Say
    ) -> tuple[Recipe, list[Choice]]:
        """Shards for every part that isn't prepared yet."""
        tokenizer = tokenizers.target
        if (folder.data / "plan.json").exists():  # from a start that was killed; it may have been of another text
            shutil.rmtree(folder.data)
        for part, place in zip(recipe.data.parts, _places(recipe, folder), strict=True):
            if part.prepared is None:
                prepare_shards(
                    part.sources, place, tokenizer, validation=recipe.data.validation, column=recipe.data.column
                )
        for part, corpus in zip(recipe.data.parts, corpora(recipe, folder), strict=True):
            if corpus.index.tokenizer != tokenizer.fingerprint:
                raise DataError(
                    f"{part.prepared}: prepared with another tokenizer than this run's; "
                    f'set tokenizer={{kind="pretrained", path="{part.prepared}"}}'
                )
        return recipe, []

    def open(self, recipe: Recipe, folder: RunFolder, tokenizers: Tokenizers) -> Material:
        """The shards, and what is measured on their held-out part."""
        found, tokenizer = corpora(recipe, folder), tokenizers.target
        for corpus in found:
            check_cut(folder, tokenizers, {"tokenizer": corpus.index.tokenizer})
        held = held_out(found)
        if isinstance(recipe.objective, goals.Masked | goals.Spans):
            return _corrupted(recipe, found, held, tokenizer)

        def figures(model: LanguageModel) -> dict[str, float]:
            return score_texts(recipe, tokenizer, model, held, limit=recipe.evaluate.tokens).numbers()

        return Material(
            corpus=found if len(found) > 1 else found[0],
            evaluators=[figures] if held else [],
            writer=a_few_words(tokenizer),
            conclude=lambda model: _conclude(recipe, model, tokenizer, found),
        )


# ---- the text


def _measure(recipe: Recipe, part: Part) -> TextFacts:
    if part.prepared is not None:
        return TextFacts(Shards.open(part.prepared).train.bytes)
    return measure(train_texts(part.sources, recipe.data.validation, column=recipe.data.column))


def _places(recipe: Recipe, folder: RunFolder) -> list[Path]:
    """Where each part's tokens are: the prepared folder it names, or one inside the run."""
    parts = recipe.data.parts
    inside = [folder.data] if len(parts) == 1 else [folder.data / f"part-{n}" for n in range(1, len(parts) + 1)]
    return [Path(part.prepared) if part.prepared is not None else own for part, own in zip(parts, inside, strict=True)]


def corpora(recipe: Recipe, folder: RunFolder) -> list[Shards]:
    """The prepared text of a run, part by part."""
    try:
        return [Shards.open(place) for place in _places(recipe, folder)]
    except DataError as error:
        raise RunError(f"{folder.path}: its text can't be read: {error}") from None


def noted_tokenizer(folder: RunFolder) -> dict[str, str]:
    """The fingerprint of the tokenizer that cut a run's own text, where it has text and that says so."""
    try:
        noted = json.loads((folder.data / INDEX).read_text(encoding="utf-8"))["tokenizer"]
    except (OSError, ValueError, LookupError, TypeError):  # no text of its own, or damage, which concerns others
        return {}
    return {"tokenizer": noted} if isinstance(noted, str) else {}


def held_out(found: Sequence[Shards]) -> list[Tokens]:
    """What isn't learned from."""
    return [corpus.validation for corpus in found if corpus.validation is not None]


# ---- text that is corrupted first

# windows of text and their numbers → what is read, and what should be said
Spoil = Callable[[Batch, Sequence[int]], Batch]


def _corrupted(recipe: Recipe, found: Sequence[Shards], held: Sequence[Tokens], tokenizer: Tokenizer) -> Material:
    """Windows of text, in which words are masked or from which spans are cut as they are read."""
    size, length = recipe.batch.size, recipe.batch.length
    assert size is not None and length is not None
    spoil, frame = _spoiler(recipe, tokenizer, recipe.seed)
    # held-out text is spoiled the same way each time, and so that evaluations compare, by a seed of its own
    spoil_held, _ = _spoiler(recipe, tokenizer, recipe.seed + 1)
    inside = length - frame
    windows = recipe.replace(batch={**recipe.batch.model_dump(exclude_none=True), "length": inside})
    plain = feed(windows, found if len(found) > 1 else found[0])
    batches = replace(
        plain,
        make=lambda step, rank, ranks: spoil(plain.make(step, rank, ranks), rows(step - 1, size, rank, ranks).tolist()),
        row=f"sequence of {length} tokens",
        fingerprints=tuple(corpus.fingerprint for corpus in found),
    )
    objective = recipe.objective.build()
    few = max(1, EVALUATED_TOKENS // length)

    def held_batches(most: int | None) -> Iterator[Batch]:
        read = 0
        for text in held:
            for batch in evaluation_batches(text, inside, few):
                if batch.tokens.shape[1] < inside or (most is not None and read >= most):
                    break
                yield spoil_held(batch, range(read, read + len(batch.tokens)))
                read += batch.tokens.numel()

    enough = any(len(text) > inside for text in held)
    return Material(
        corpus=batches,
        evaluators=[lambda model: mean_loss(objective, model, held_batches(recipe.evaluate.tokens))] if enough else [],
        writer=None,
        conclude=lambda model: Ending(dict(mean_loss(objective, model, held_batches(None))) if enough else {}),
    )


def _spoiler(recipe: Recipe, tokenizer: Tokenizer, seed: int) -> tuple[Spoil, int]:
    """How windows are spoiled, and how many tokens a row gains by it."""
    goal = recipe.objective
    if isinstance(goal, goals.Masked):
        masking = Masking.of(tokenizer, goal.rate, goal.whole_words)
        return lambda batch, numbers: masked_batch(batch, numbers, masking, seed), masking.frame
    assert isinstance(goal, goals.Spans)
    spans = Spans.of(tokenizer, goal.rate, goal.mean)
    return lambda batch, numbers: spans_batch(batch.tokens.numpy(), numbers, spans, seed), 0


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


def a_few_words(tokenizer: Tokenizer) -> Callable[[LanguageModel], list[str]]:
    """What the loop asks after each evaluation: a few words, to see in the report how they become better."""
    settings = Sampling(max_tokens=30, temperature=0.8, top_p=0.95)
    return lambda model: [complete(model, [Prompt.of(tokenizer, "")], settings)[0].text]


def character_baseline(tokenizer: Tokenizer, found: Sequence[Shards]) -> baseline.Measure:
    """What character frequencies of the training text need for the held-out text."""
    model = baseline.fit(
        text for corpus in found for text in _decoded(tokenizer, corpus.train, BASELINE_TOKENS // len(found))
    )
    return baseline.measure(model, (t for held in held_out(found) for t in _decoded(tokenizer, held)))


def _decoded(tokenizer: Tokenizer, tokens: Tokens, most: int | None = None) -> Iterator[str]:
    """The text that tokens spell, a part at a time."""
    end = len(tokens) if most is None else min(most, len(tokens))
    for start in range(0, end, 1 << 16):
        yield tokenizer.decode(tokens.read(start, min(1 << 16, end - start)).tolist())


def _conclude(recipe: Recipe, model: LanguageModel, tokenizer: Tokenizer, found: Sequence[Shards]) -> Ending:
    """The figures over everything that was held out, beside what character frequencies give, and some texts."""
    figures: dict[str, Any] = {}
    held = held_out(found)
    if held:
        scored, characters = score_texts(recipe, tokenizer, model, held), character_baseline(tokenizer, found)
        figures = {
            **scored.numbers(),
            "nats_per_character": scored.nats / characters.characters if characters.characters else math.nan,
            "baseline_bits_per_byte": characters.bits_per_byte,
        }
    settings = Sampling(max_tokens=100, temperature=0.8, top_p=0.95)
    texts = complete(model, [Prompt.of(tokenizer, "")] * SAMPLES, settings)
    return Ending(figures, [text.text for text in texts])
