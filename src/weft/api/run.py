"""A trained model with all that belongs to it: what can be asked of a run."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from weft.config import validate
from weft.data.config import NoSplit
from weft.data.prepare import prepare as prepare_shards
from weft.data.shards import Tokens
from weft.decode.bulk import Job, bulk, texts_of
from weft.decode.completion import Completion
from weft.decode.config import Beam, Sampling
from weft.decode.constrain import Pattern, schema_text
from weft.decode.contrastive import Contrasted
from weft.decode.fast.quantize import check_bits, quantize
from weft.decode.generate import generate
from weft.decode.prompt import Prompt
from weft.decode.speculative import Draft, LookUp, speculate
from weft.decode.text import Chunk
from weft.decode.translate import Translator
from weft.errors import ConfigError, DataError, ModelError
from weft.evaluate.perplexity import Score
from weft.models.base import LanguageModel
from weft.models.heads import WordHead
from weft.models.transformer import Transformer
from weft.objectives.classify import predict
from weft.objectives.objective import Tokenizers, check_cut, lesson_for
from weft.objectives.tag import tag_words
from weft.objectives.text import corpora, held_out, noted_tokenizer, score_texts
from weft.progress import bar
from weft.recipe.config import SOURCE_TOKENIZER, Recipe
from weft.recipe.objective import Classify, Pairs, Spans, Tag
from weft.recipe.objective import Score as Rating
from weft.runs.folder import RunFolder, load_model, open_run, read_lines
from weft.runs.journal import say_on_stderr
from weft.text.tokenizer import Tokenizer
from weft.training.precision import autocast, pick_device


def sampling(**given: Any) -> Sampling:
    """How to write: temperature, top_k, top_p, max_tokens, seed, stop …; what is None keeps its default."""
    return validate(Sampling, {key: value for key, value in given.items() if value is not None})


def beam(**given: Any) -> Beam:
    """How to search: beams, n, length_penalty, max_tokens, stop …; what is None keeps its default."""
    return validate(Beam, {key: value for key, value in given.items() if value is not None})


class BulkOptions(TypedDict, total=False):
    """What `Run.bulk` may be given beside prompts and settings."""

    n: int
    batch: int
    out: Path | str | None
    pattern: Pattern | None
    notes: Mapping[str, Any] | None


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
    ) -> Iterator[Chunk]:
        """The same chunk by chunk, as it is written.

        A `draft`, a smaller run with the same tokenizer, or a `lookup` of up to so many tokens in the text itself guess
        ahead, which is faster where the model is large. Greedy text is what it would be without; with a `draft`, text
        that is drawn is another one for the same seed, from the same distribution.
        """
        asked = Prompt.of(self.tokenizer, prompt, pattern)
        if draft is not None and lookup is not None:
            raise ConfigError("draft and lookup exclude each other")
        if lookup is not None:
            return speculate(self.model, LookUp(lookup), asked, settings)
        if draft is None:
            return generate(self.model, [asked], settings)
        if draft.tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise ConfigError(f"{draft.path}: a draft needs the tokenizer of {self.path}, but it has another one")
        return speculate(self.model, Draft(draft.model, asked, settings), asked, settings)

    def complete(self, prompts: Sequence[str], settings: Sampling | Beam) -> list[Completion]:
        """Continue several texts at once; each has its own seed, counted up from settings.seed. Beam search gives the
        best of each."""
        return [texts[0] for texts in self.candidates(prompts, settings)]

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
        check_several(prompts, "prompts")
        if n < 1:
            raise ConfigError(f"n = {n}: at least one text a prompt")
        job = Job(settings, n, max(1, len(prompts)), first, pattern)
        return list(texts_of(self.model, self.tokenizer, prompts, job))

    def bulk(self, prompts: Sequence[str], settings: Sampling | Beam, **options: Unpack[BulkOptions]) -> Iterator[str]:
        """Texts for many prompts as lines of JSON, in order: `n` for each, `batch` prompts at a time.

        With `out` they are written to that file as well, and what is there already is not written again. A file that
        another run, other settings or other `notes` began is refused. Texts keep to a `pattern`.
        """
        check_several(prompts, "prompts")
        n, batch, pattern = options.get("n", 1), options.get("batch", 16), options.get("pattern")
        if batch < 1:
            raise ConfigError(f"batch = {batch}: at least one prompt at a time")
        if n < 1:
            raise ConfigError(f"n = {n}: at least one text a prompt")
        noted = {"run": str(self.path), "n": n, **settings.model_dump(mode="json", exclude_defaults=True)}
        noted |= options.get("notes") or {}
        if pattern is not None:
            noted["pattern"] = pattern.expression
        out = options.get("out")
        job = Job(settings, n, batch, grammar=pattern, out=None if out is None else Path(out))
        return bulk(self.model, self.tokenizer, prompts, job, noted)

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
        texts = held_out(corpora(self.config, RunFolder(self.path)))
        if not texts:
            raise DataError(f"{self.path}: this run held out no text; say what to measure with --data")
        return self._score(texts, stride)

    def _score(self, texts: Sequence[Tokens], stride: int | None) -> Score:
        assert self.config.precision is not None
        with autocast(self.config.precision, device_of(self.model)), bar("measuring", sum(map(len, texts))) as advance:
            return score_texts(self.config, self.tokenizer, self.model, texts, stride=stride, progress=advance)

    def figures(self, data: Sequence[str] | str | None = None, targets: Sequence[str] = ()) -> dict[str, Any]:
        """How good the model is at what it learned: on held-out data, or on all of `data` (with their `targets`)."""
        assert self.config.precision is not None
        lesson, tokenizers = lesson_for(self.config), load_tokenizers(self.config, self.path)
        with (
            autocast(self.config.precision, device_of(self.model)),
            tempfile.TemporaryDirectory(prefix="weft-") as temp,
        ):
            folder, recipe = RunFolder(self.path), self.config
            if data is None and (not recipe.data.parts or isinstance(recipe.data.validation, NoSplit)):
                raise DataError(f"{self.path}: this run held out nothing; say what to measure with --data")
            if recipe.batch.size is None and recipe.batch.tokens is None:  # imported: it never had a batch
                recipe = recipe.replace(batch={**recipe.batch.model_dump(exclude_none=True), "size": 1})
            if data is not None:
                sources = [data] if isinstance(data, str) else list(data)
                given: dict[str, Any] = {"sources": sources, "targets": list(targets)}
                kept = {key: getattr(recipe.data, key) for key in ("column", "on_error")}
                recipe = recipe.replace(data={**kept, **given, "validation": {"kind": "files", **given}})
                folder = RunFolder(Path(temp))
                recipe, _ = lesson.prepare(recipe, folder, tokenizers, say_on_stderr)
            return lesson.open(recipe, folder, tokenizers).conclude(self.model).figures

    def against(self, amateur: "Run", strength: float = 0.5, plausible: float = 0.1) -> "Run":
        """This run contrasted with a weaker one of the same tokenizer (contrastive decoding; Li et al. 2023)."""
        if amateur.tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise ConfigError(f"{amateur.path}: it needs the tokenizer of {self.path}, but it has another one")
        return replace(self, model=Contrasted(self.model, amateur.model, strength, plausible))

    def translate(
        self,
        texts: Sequence[str],
        settings: Beam | Sampling | None = None,
        *,
        progress: Callable[[int], object] | None = None,
    ) -> list[str]:
        """What the model makes of each text, in their order; a blank text stays blank. Beam search unless told else."""
        check_several(texts, "texts")
        if not isinstance(self.config.objective, Pairs | Spans):
            kind = self.config.objective.kind
            raise ConfigError(f"{self.path}: it learned '{kind}', not to write one text from another")
        tokenizers = load_tokenizers(self.config, self.path)
        length = self.config.batch.length
        assert length is not None, "the recipe is settled"
        how = Beam(beams=5, max_tokens=length) if settings is None else settings
        translator = Translator(self.model, tokenizers.source, tokenizers.target, length)
        return translator.translate(texts, how, progress)

    def classify(self, texts: Sequence[str], second: Sequence[str] | None = None) -> list[dict[str, float]]:
        """The probability of each label for each text, or pair of texts, the likeliest first."""
        goal = self.config.objective
        if not isinstance(goal, Classify):
            raise ConfigError(f"{self.path}: it learned '{goal.kind}', not to classify")
        assert goal.labels is not None
        shares = torch.from_numpy(self._answers(goal, texts, second)).softmax(-1).tolist()
        return [dict(sorted(zip(goal.labels, row, strict=True), key=lambda pair: -pair[1])) for row in shares]

    def rate(self, texts: Sequence[str], second: Sequence[str] | None = None) -> list[float]:
        """The number that the model gives each text, or pair of texts."""
        goal = self.config.objective
        if not isinstance(goal, Rating):
            raise ConfigError(f"{self.path}: it learned '{goal.kind}', not to give a text a number")
        return [float(row[0]) for row in self._answers(goal, texts, second)]

    def tag(self, sentences: Sequence[Sequence[str]]) -> list[list[tuple[str, float]]]:
        """The likeliest tag of each word of each sentence, with its probability."""
        goal = self.config.objective
        if not isinstance(goal, Tag):
            raise ConfigError(f"{self.path}: it learned '{goal.kind}', not to tag words")
        assert goal.labels is not None
        check_several(sentences, "sentences")
        for sentence in sentences:
            check_several(sentence, "a sentence")
        with bar("tagging words", sum(len(words) for words in sentences)) as advance:
            found = tag_words(self.model, self.tokenizer, sentences, length=self.config.batch.length, progress=advance)
        return [[_likeliest(goal.labels, self._numbers(word)) for word in words] for words in found]

    def _answers(self, goal: Classify | Rating, texts: Sequence[str], second: Sequence[str] | None) -> NDArray[Any]:
        """What the head says of each text: (texts, labels)."""
        check_several(texts, "texts")
        if second is not None:
            check_several(second, "second")
            if len(second) != len(texts):
                raise ConfigError(f"second: {len(second)} texts, but there are {len(texts)} to stand before them")
        # what came from another program may have learned pairs: its files don't tell
        either = goal.second is None and RunFolder(self.path).origin.is_dir()
        if not either and (goal.second is None) != (second is None):
            asked = "one text" if goal.second is None else f"two texts, '{goal.text}' and '{goal.second}'"
            raise ConfigError(f"{self.path}: it learned to judge {asked} at a time")
        if not texts:
            return np.zeros((0, len(getattr(goal, "labels", None) or "1")))
        with bar("reading", len(texts)) as advance:
            found = predict(
                self.model, self.tokenizer, texts, second, length=self.config.batch.length, progress=advance
            )
        return self._numbers(found)

    def _numbers(self, found: NDArray[Any]) -> NDArray[Any]:
        """What a head says, where it says anything."""
        if not np.isfinite(found).all():
            raise ModelError(f"{self.path}: its answers are no numbers; its weights are damaged, or training diverged")
        return found

    def quantize(self, bits: str) -> None:
        """Keep the model's weights in 'int8' or 'int4' from here on; it can write and be measured, not be trained."""
        quantize(self.model, bits)

    def results(self) -> dict[str, Any]:
        """The figures that training ended with; empty for a run that hasn't ended."""
        ends = [line for line in read_lines(RunFolder(self.path).events) if line.get("event") == "result"]
        return {key: value for key, value in ends[-1].items() if key not in ("time", "event")} if ends else {}


def check_several(texts: Sequence[Any], name: str) -> None:
    """Refuse one text where several are asked for: its characters would each be one."""
    if isinstance(texts, str):
        raise ConfigError(f"{name} = {texts[:40]!r}: expected a list of texts, such as [{texts[:40]!r}]")


def _likeliest(labels: Sequence[str], logits: NDArray[np.float32]) -> tuple[str, float]:
    """The label with the greatest of some logits (labels,), and its probability."""
    best = int(logits.argmax())
    return labels[best], float(torch.from_numpy(logits).softmax(-1)[best])


def load(
    run: Path | str,
    device: torch.device | str | None = None,
    *,
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
) -> Run:
    """A run's model with its best weights, and its tokenizer. Damaged checkpoints are passed over, with a warning.

    `dtype` is what a Transformer's weights are kept in. By default that is float32, but 16 bits on a GPU for one that
    writes and that learned in bf16 or fp8, or came in 16 bits: writing reads every weight for every token. With
    `quantize` ('int8' or 'int4') they are kept in so many bits.
    """
    if quantize is not None:
        check_bits(quantize)
    folder = open_run(run)
    recipe = folder.recipe()
    model, damage = load_model(folder, device=device or pick_device())
    for line in damage:
        say_on_stderr(f"weft: {line}")
    if isinstance(model, Transformer):
        model.to(dtype or _written_in(recipe, model))
    tokenizer = Tokenizer.load(folder.path)
    check_cut(folder, Tokenizers(tokenizer, tokenizer), noted_tokenizer(folder))
    loaded = Run(folder.path, recipe, model, tokenizer)
    if quantize is not None:
        loaded.quantize(quantize)
    return loaded


def _written_in(recipe: Recipe, model: Transformer) -> torch.dtype:
    """What a model's weights are kept in for writing."""
    if model.decoder is None or not isinstance(model.output, WordHead) or device_of(model).type != "cuda":
        return torch.float32
    own = model.embedding.weight.dtype
    return torch.bfloat16 if own == torch.float32 and recipe.precision in ("bf16", "fp8") else own


def load_tokenizers(recipe: Recipe, run: Path) -> Tokenizers:
    """A run's tokenizers."""
    target = Tokenizer.load(run)
    return Tokenizers(target, target if recipe.source_tokenizer is None else Tokenizer.load(run / SOURCE_TOKENIZER))


def device_of(model: LanguageModel) -> torch.device:
    """Where a model's weights are; n-grams have none, and stand on the processor."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))
