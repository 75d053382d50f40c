"""A trained model with all that belongs to it: what can be asked of a run."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from weft.api.arguments import Sources, checked, names_of
from weft.api.evaluation import Evaluation, evaluation_on, text_surprisal
from weft.api.explain import Explain
from weft.api.export_model import export_model
from weft.api.settings import BulkOptions, generation_defaults, sampling, translation_beam, with_defaults
from weft.costs.count import count
from weft.decode.bulk import BulkJob, bulk, generate_many
from weft.decode.config import Beam, Sampling
from weft.decode.constrain import Grammar, json_schema, lark, regex
from weft.decode.contrastive import ContrastiveModel
from weft.decode.fast.quantize import quantize
from weft.decode.generate import generate
from weft.decode.prompt import CHAT_DEFAULTS, Message, Prompt, chat_prompt, context_window, max_prompt_tokens
from weft.decode.speculative import Draft, LookUp, speculate
from weft.decode.text import Chunk, Completion
from weft.decode.translate import LENGTH_RATIO
from weft.errors import ConfigError, DataError
from weft.evaluate.perplexity import Score, Surprisal
from weft.models.base import LanguageModel
from weft.objectives import table as objectives
from weft.objectives.answer import Answer, AnswerSpan
from weft.objectives.classify import Classify
from weft.objectives.contrastive import Contrastive, EmbeddingOptions, Pooling, embed
from weft.objectives.frame import ANY_LANGUAGES, LanguagePair
from weft.objectives.pairs import Pairs
from weft.objectives.regress import Regress
from weft.objectives.spans import Spans
from weft.objectives.tag import Tag
from weft.progress import Advance, warn
from weft.recipe.config import Recipe
from weft.runs.folder import RunFolder
from weft.text.tokenizer import Tokenizer
from weft.training.objective import Objective
from weft.training.run_data import Tokenizers

T = TypeVar("T", bound=Objective[Any])


@checked
@dataclass(frozen=True)
class Run:
    """A trained model with all that belongs to it, read from its run's folder.

    Language models: generate, chat, perplexity, surprisal; write, reply, complete, candidates and bulk give more of a
    say. What else a run has learned: classify, rate, tag, answer, translate, embed. Any: evaluate, explain, results,
    export.
    """

    path: Path
    config: Recipe
    model: LanguageModel
    tokenizer: Tokenizer
    quantized: str | None = None  # the width that `load` gave it

    def __repr__(self) -> str:
        best, results = RunFolder(self.path).checkpoints / "best", self.results()
        facts = [f"{self.config.model.kind} of {count(self.config.model).parameters:,} parameters"]
        if (step := best.resolve().name.removeprefix("step-")).isdecimal():
            facts.append(f"step {int(step)}")
        metric = "perplexity" if (own := self.config.evaluate.metric) == "loss" and "perplexity" in results else own
        if isinstance(results.get(metric), float):
            facts.append(f"{metric.replace('_', ' ')} {results[metric]:.4g}")
        return f"Run({str(self.path)!r}: {', '.join(facts)})"

    @cached_property
    def _generation(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return generation_defaults(RunFolder(self.path), self.tokenizer)

    @property
    def defaults(self) -> dict[str, Any]:
        """How the makers of an imported checkpoint have it write (generation_config.json); of other runs, nothing."""
        return self._generation[0]

    @property
    def beam_defaults(self) -> dict[str, Any]:  # the same for beam search
        return self._generation[1]

    @property
    def chat_defaults(self) -> dict[str, Any]:
        """The same for replies, with gentler settings than for running text where its makers gave none."""
        return self.defaults if "temperature" in self.defaults else {**CHAT_DEFAULTS, **self.defaults}

    def generate(self, prompt: str = "", **settings: Any) -> str:
        """What the model writes after `prompt`.

        Settings are those of `weft.sampling`; those left out are the checkpoint's own where it has any (`defaults`).
        """
        return self.complete([prompt], sampling(**with_defaults(settings, self.defaults)))[0].text

    def chat(self, messages: Sequence[Message] | str, **settings: Any) -> str:
        """The model's reply to a user's words, or to a list of {"role": …, "content": …} messages.

        Roles are system, user and assistant, and the last message is the user's. Settings as for `generate`; those left
        out are the checkpoint's own, or else gentle ones (`chat_defaults`).
        """
        asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        chosen = sampling(**with_defaults(settings, self.chat_defaults))
        return "".join(chunk.text for chunk in self.reply(asked, chosen))

    def reply(self, messages: Sequence[Message], settings: Sampling) -> Iterator[Chunk]:
        """The same chunk by chunk, as it is written. The oldest turns are left out where the window is too small."""
        if not self.config.objective.continues:
            raise self.objective.cannot("chat")
        max_prompt = max_prompt_tokens(context_window(self.model), settings.max_tokens)
        return generate(self.model, [chat_prompt(self.tokenizer, messages, max_prompt)], settings)

    def pattern(self, expression: str) -> Grammar:
        """Texts that match a regular expression, for `write`, `candidates` and `bulk`."""
        return regex(self.tokenizer, expression)

    def schema(self, schema: Any) -> Grammar:
        """Texts that are JSON of this schema, likewise."""
        return json_schema(self.tokenizer, schema)

    def grammar(self, text: str) -> Grammar:
        """Texts of a context-free grammar in Lark's syntax, likewise."""
        return lark(self.tokenizer, text)

    def write(
        self,
        prompt: str,
        settings: Sampling,
        *,
        pattern: Grammar | None = None,
        draft: "Run | None" = None,
        lookup: int | None = None,
    ) -> Iterator[Chunk]:
        """The same chunk by chunk, as it is written.

        A `draft`, a smaller run with the same tokenizer, or a `lookup` of up to that many tokens in the text itself
        guesses ahead, which is faster where the model is large. Greedy text is what it would be without; with a
        `draft`, sampled text differs for the same seed, but comes from the same distribution.
        """
        asked = Prompt.of(self.tokenizer, prompt, pattern)
        if draft is not None and lookup is not None:
            raise ConfigError("draft and lookup exclude each other")
        if lookup is not None:
            return speculate(self.model, asked, settings, drafter=LookUp(lookup))
        if draft is None:
            return generate(self.model, [asked], settings)
        if draft.tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise ConfigError(f"{draft.path}: a draft needs the tokenizer of {self.path}, but it has another one")
        return speculate(self.model, asked, settings, drafter=Draft(draft.model, asked, settings))

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
        pattern: Grammar | None = None,
    ) -> list[list[Completion]]:
        """Several texts for each prompt: n samples, or the settings.n best of beam search, best first.

        Prompts are numbered from `first` on; what is drawn for a prompt depends on its number and the seed.
        """
        if n < 1:
            raise ConfigError(f"n = {n}: at least one text a prompt")
        job = BulkJob(settings, n=n, batch=max(1, len(prompts)), grammar=pattern)
        return list(generate_many(self.model, self.tokenizer, prompts, job=job, first=first))

    def bulk(self, prompts: Sequence[str], settings: Sampling | Beam, **options: Unpack[BulkOptions]) -> Iterator[str]:
        """Texts for many prompts as lines of JSON, in order: `n` for each, `batch` prompts at a time.

        With `out` they are written to that file as well, and what is there already is not written again. A file that
        another run, other settings or other `notes` began is refused. Texts keep to a `pattern`. With
        `quantize_cache` ('int8') keys and values have so many bits.
        """
        n, batch = options.get("n", 1), options.get("batch", 16)
        out, pattern = options.get("out"), options.get("pattern")
        if batch < 1:
            raise ConfigError(f"batch = {batch}: at least one prompt at a time")
        if n < 1:
            raise ConfigError(f"n = {n}: at least one text a prompt")
        noted = {"run": str(self.path), "n": n, **settings.model_dump(mode="json", exclude_defaults=True)}
        noted |= options.get("notes") or {}
        if pattern is not None:
            noted |= pattern.notes
        small = options.get("quantize_cache")
        noted |= {} if small is None else {"quantize_cache": small}
        path = None if out is None else Path(out)
        job = BulkJob(settings, n=n, batch=batch, grammar=pattern, out=path, quantize_cache=small)
        return bulk(self.model, self.tokenizer, prompts, job=job, notes=noted)

    @cached_property
    def objective(self) -> Objective[Any]:
        """What the run has learned, with its data."""
        folder, source = RunFolder(self.path), self.tokenizer
        if self.config.source_tokenizer is not None:
            source = Tokenizer.load(folder.source_tokenizer)
            source = source.reading_specials() if self.tokenizer.finds_specials else source
        return objectives.build(self.config, folder, Tokenizers(self.tokenizer, source))

    def evaluation(
        self, data: Sources | None = None, targets: Sequence[str] = (), encoding: str = "utf-8"
    ) -> AbstractContextManager[Evaluation]:
        """The run on its held-out data, or on all of `data`, for as long as the `with` lasts.

        It has `metrics`, and for a language model `details` and the `overlap` with the training text.
        """
        given = None if data is None else {"sources": names_of(data), "targets": targets, "encoding": encoding}
        return evaluation_on(self.objective, self.model, given)

    def evaluate(
        self,
        data: Sources | None = None,
        targets: Sequence[str] = (),
        *,
        stride: int | None = None,
        encoding: str = "utf-8",
    ) -> dict[str, Any]:
        """All metrics of the run's objective, on its held-out data or on all of `data` (with their `targets`).

        A language model's windows of text overlap with `stride`: each starts that many tokens after the one before. Its
        metrics have 95 % `intervals`, where the text has more than one section, by a bootstrap over them.
        """
        with self.evaluation(data, targets, encoding) as text:
            return text.metrics(stride)

    def perplexity(self, text: str | Sequence[str] | None = None) -> float:
        """exp of the mean surprisal of a token: of `text`, of all tokens of several texts, or of what was held out.

        What a text begins with for this model stands before it (bos, or the end of the text before), so that its first
        token counts as well; nothing does for an imported model whose tokenizer puts nothing there, as GPT-2's. Files
        are measured with `evaluate`: the same for the same text, beyond a window with `stride` of half of it.
        """
        if text is not None:
            texts = text if isinstance(text, Sequence) and not isinstance(text, str) else [text]
            scored = [each.nats for one in texts for each in self.surprisal(one) if each.nats is not None]
            if not scored:
                raise DataError("there is nothing to score: no text, or none with a token before another")
            return Score(sum(scored), len(scored), 0).perplexity
        metrics = self.evaluate()
        if "perplexity" not in metrics:
            kind = self.config.objective.kind
            raise ConfigError(f"{self.path}: objective '{kind}' has no perplexity; use evaluate()")
        return metrics["perplexity"]

    def surprisal(self, text: str) -> list[Surprisal]:
        """The tokens of a text with their surprisals, −log p in nats, of which `perplexity` takes the mean.

        Nothing predicts the first token, whose surprisal is None, where nothing stands before a text: with
        document_mask, and in imported models whose tokenizer puts nothing there. What it puts after one is scored too.
        """
        return text_surprisal(self.objective, self.model, text)

    def against(self, amateur: "Run", strength: float = 0.5, plausible: float = 0.1) -> "Run":
        """This run contrasted with a weaker one of the same tokenizer (contrastive decoding; Li et al. 2023)."""
        if amateur.tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise ConfigError(f"{amateur.path}: it needs the tokenizer of {self.path}, but it has another one")
        return replace(self, model=ContrastiveModel(self.model, amateur.model, strength, plausible=plausible))

    def reading_specials(self) -> "Run":
        """This run where texts may hold special tokens, such as BART's <mask>; else what looks like one is text."""
        return replace(self, tokenizer=self.tokenizer.reading_specials())

    def translate(
        self,
        texts: Sequence[str],
        settings: Beam | Sampling | None = None,
        languages: LanguagePair = ANY_LANGUAGES,
        progress: Advance | None = None,
        ratio: float | None = LENGTH_RATIO,
    ) -> list[str]:
        """What the model writes for each text, in their order; a blank text stays blank. Beam search by default.

        An answer has at most `ratio` times its source's tokens and 50 more; None leaves that to the settings. A model
        of several languages is told which to read and write: `languages=("en_XX", "de_DE")`.
        """
        if not isinstance(self.objective, Pairs | Spans):
            raise self.objective.cannot("translate")
        chosen = settings or translation_beam(self.objective.length, self.beam_defaults)
        return self.objective.translator(self.model, LanguagePair(*languages), ratio).translate(texts, chosen, progress)

    def classify(self, texts: Sequence[str], second: Sequence[str] | None = None) -> list[dict[str, float]]:
        """The probability of each label for each text, or pair of texts, the likeliest first."""
        return self._learned(Classify, "classify").predict(self.model, texts, second)

    def rate(self, texts: Sequence[str], second: Sequence[str] | None = None) -> list[float]:
        """The number that the model predicts for each text, or pair of texts."""
        return self._learned(Regress, "predict numbers").predict(self.model, texts, second)

    def tag(self, sentences: Sequence[Sequence[str]]) -> list[list[tuple[str, float]]]:
        """The likeliest tag of each word of each sentence, with its probability."""
        return self._learned(Tag, "tag words").predict(self.model, sentences)

    def answer(self, questions: Sequence[str], contexts: Sequence[str]) -> list[AnswerSpan]:
        """The likeliest answer to each question in its text, with its probability and its place there."""
        return self._learned(Answer, "answer questions").predict(self.model, questions, contexts)

    def embed(
        self, texts: Sequence[str], *, pooling: Pooling | None = None, normalise: bool = True, batch: int = 32
    ) -> npt.NDArray[np.float32]:
        """A vector for each text: (texts, d_model), in their order, of length 1 with `normalise`.

        `pooling` is "mean", "first" or "last", by default as the model was trained to embed, else the mean.
        A model that was reads as much of a text as it did then (`batch.length`).
        """
        length = self.objective.length if isinstance(self.objective, Contrastive) else None
        settings = EmbeddingOptions(pooling, normalise, batch, length)
        return embed(self.model, self.tokenizer, texts, options=settings, log=warn)

    def _learned(self, wanted: type[T], verb: str) -> T:
        if not isinstance(self.objective, wanted):
            raise self.objective.cannot(verb)
        return self.objective

    def quantize(self, bits: str) -> None:
        """Keep the model's weights in 'bf16', 'int8' or 'int4' from here on; it can write, not be trained."""
        quantize(self.model, bits)

    def export(self, to: str, dest: Path | str, *, dtype: str | None = None) -> Path:
        """Write the run's best weights for another program, and return the place.

        `to` is "hf", "peft" or "onnx" (a folder), "gguf" (a file) or "weft" (a run); `dtype` as for `weft export`.
        """
        export_model(self.path, to, dest, dtype=dtype)
        return Path(dest)

    @cached_property
    def explain(self) -> Explain:
        """What can be seen inside of the model: `run.explain.attention("A text.")`, `.surprise`, `.anatomy()` …"""
        return Explain(self.config, self.model, self.objective)

    def results(self) -> dict[str, Any]:
        """The metrics and samples that training ended with; empty for a run that hasn't finished."""
        return RunFolder(self.path).results()
