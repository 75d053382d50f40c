"""`Run`: a trained model with its tokenizer and settings, and everything it can do."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any, TypeVar, Unpack

import numpy as np
import numpy.typing as npt
from torch import Tensor

from weft.api.abilities import QUESTIONS, abilities, checkpoint_models, over_time
from weft.api.arguments import Sources, checked, source_names, takes_settings
from weft.api.evaluation import Evaluation, EvaluationMetrics, evaluation_on, text_surprisal
from weft.api.explain import Explain
from weft.api.export_model import export_model
from weft.api.minimal_pairs import minimal_pairs
from weft.api.settings import SamplingSettings, generation_defaults, sampling, translation_beam, with_defaults
from weft.costs.count import count
from weft.decode.bulk import BulkJob, bulk, generate_many
from weft.decode.config import CHAT_DEFAULTS, Beam, Sampling
from weft.decode.constrain import Grammar, json_schema, lark, regex
from weft.decode.contrastive import ContrastiveModel
from weft.decode.fast.quantize import quantize
from weft.decode.generate import generate
from weft.decode.prompt import Message, Prompt, chat_prompt, context_window, max_prompt_tokens
from weft.decode.speculative import Draft, LookUp, speculate
from weft.decode.text import Chunk, Completion
from weft.decode.translate import LENGTH_RATIO
from weft.errors import ConfigError, DataError
from weft.evaluate.abilities.result import Abilities, OverTime
from weft.evaluate.minimal_pairs import MinimalPair, MinimalPairs, check_pairs, read_pairs
from weft.evaluate.perplexity import Surprisal, perplexity
from weft.explain.interventions.recording import Shape, patched, record_texts, tap_shapes
from weft.models.base import LanguageModel, device_of
from weft.models.head_config import Pooling
from weft.models.hidden import LayerMix
from weft.objectives import table as objectives
from weft.objectives.answer import Answer, AnswerSpan
from weft.objectives.classify import Classify, ZeroShot
from weft.objectives.contrastive import Contrastive, EmbeddingOptions, embed
from weft.objectives.frame import ANY_LANGUAGES, LanguagePair
from weft.objectives.pairs import Pairs
from weft.objectives.regress import Regress
from weft.objectives.spans import Spans
from weft.objectives.tag import Tag
from weft.progress import Advance, warn
from weft.recipe.config import Recipe
from weft.runs.folder import RunFolder
from weft.runs.lines import read_lines
from weft.text.tokenizer import Tokenizer
from weft.training.objective import Objective
from weft.training.run_data import Tokenizers

T = TypeVar("T", bound=Objective[Any])


@checked
@dataclass(frozen=True)
class Run:
    """A trained model with its tokenizer and settings, loaded from a run's folder.

    Language models: generate, chat, perplexity, surprisal; write, reply, complete, candidates and bulk give more
    control. Models of other objectives: classify, rate, tag, answer, translate, embed. All: evaluate, explain, results,
    export; taps, activations and patch reach inside the model.
    """

    path: Path
    config: Recipe
    model: LanguageModel
    tokenizer: Tokenizer
    quantized: str | None = None  # width of the weights, if `load` quantised them

    def __repr__(self) -> str:
        best, results = RunFolder(self.path).checkpoints / "best", self.results()
        facts = [f"{self.config.model.kind} of {count(self.config.model).parameters:,} parameters"]
        if (step := best.resolve().name.removeprefix("step-")).isdecimal():
            facts.append(f"step {int(step)}")
        name = self.config.evaluate.metric
        if name == "loss" and "perplexity" in results:
            name = "perplexity"
        if isinstance(results.get(name), float):
            facts.append(f"{name.replace('_', ' ')} {results[name]:.4g}")
        return f"Run({str(self.path)!r}: {', '.join(facts)})"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>{EvaluationMetrics(self.results())._repr_html_()}"

    @property
    def metrics(self) -> Any:
        """Metrics logged during training, a row per line of metrics.jsonl: a DataFrame if pandas is installed, or else
        a dict of columns. What a row doesn't have is NaN or None."""
        rows = read_lines(RunFolder(self.path).metrics)
        names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "check"]
        columns = {name: [row.get(name) for row in rows] for name in names}
        try:
            import pandas
        except ImportError:
            return columns
        return pandas.DataFrame(columns)

    @cached_property
    def _generation_defaults(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return generation_defaults(RunFolder(self.path), self.tokenizer)

    @property
    def defaults(self) -> dict[str, Any]:
        """Sampling settings from an imported checkpoint's generation_config.json; empty for other runs."""
        return self._generation_defaults[0]

    @property
    def beam_defaults(self) -> dict[str, Any]:
        """Beam search settings from an imported checkpoint's generation_config.json; empty for other runs."""
        return self._generation_defaults[1]

    @property
    def chat_defaults(self) -> dict[str, Any]:
        """Sampling settings for replies: `defaults`, and if these have no temperature, a low one with a top_p."""
        return self.defaults if "temperature" in self.defaults else {**CHAT_DEFAULTS, **self.defaults}

    @property
    def decoding(self) -> dict[str, Sampling | Beam]:
        """Default settings of decoding, by the command that uses them: "translate", or "generate" and "chat".

        Empty if the model writes no text. The Python API, the server and the Explorer decode with the same settings.
        """
        if isinstance(self.objective, Pairs | Spans):
            return {"translate": translation_beam(self.objective.length, self.beam_defaults)}
        if not self.config.objective.continues:
            return {}
        return {"generate": sampling(**self.defaults), "chat": sampling(**self.chat_defaults)}

    @takes_settings(Sampling)
    def generate(self, prompt: str = "", **settings: Unpack[SamplingSettings]) -> str:
        """Return the text that the model writes after `prompt`.

        The settings are those of `weft.sampling`; the checkpoint's `defaults` hold for those left out.
        """
        return self.complete([prompt], sampling(**with_defaults(settings, self.defaults)))[0].text

    @takes_settings(Sampling)
    def chat(self, messages: Sequence[Message] | str, **settings: Unpack[SamplingSettings]) -> str:
        """Return the model's reply to a user's text, or to a list of {"role": …, "content": …} messages.

        Roles are system, user and assistant, and the last message is the user's. The settings are those of
        `weft.sampling`; `chat_defaults` hold for those left out.
        """
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        chosen = sampling(**with_defaults(settings, self.chat_defaults))
        return "".join(chunk.text for chunk in self.reply(turns, chosen))

    def reply(self, messages: Sequence[Message], settings: Sampling) -> Iterator[Chunk]:
        """Yield the reply to messages while it is written. The oldest turns are dropped if the window is too small."""
        self.objective.check_continues("chat")
        max_prompt = max_prompt_tokens(context_window(self.model), settings.max_tokens)
        return generate(self.model, [chat_prompt(self.tokenizer, messages, max_prompt)], settings)

    def pattern(self, expression: str) -> Grammar:
        """Return a regular expression as a grammar, for `write`, `candidates` and `bulk`."""
        return regex(self.tokenizer, expression)

    def schema(self, schema: Any) -> Grammar:
        """Return a JSON schema as a grammar, for `write`, `candidates` and `bulk`."""
        return json_schema(self.tokenizer, schema)

    def grammar(self, text: str) -> Grammar:
        """Return a context-free grammar from Lark's syntax, for `write`, `candidates` and `bulk`."""
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
        """Yield the text after `prompt` while it is written.

        For speculative decoding, which is faster where the model is large, give a `draft`, a smaller run with the same
        tokenizer, or `lookup`, the longest n-gram to look up in the text itself. Greedy text is the same as without;
        with a `draft`, sampled text differs for the same seed, but has the same distribution.
        """
        begun = Prompt.of(self.tokenizer, prompt, pattern)
        if draft is not None and lookup is not None:
            raise ConfigError("draft and lookup exclude each other")
        if lookup is not None:
            return speculate(self.model, begun, settings, drafter=LookUp(lookup))
        if draft is None:
            return generate(self.model, [begun], settings)
        self._check_same_tokenizer(draft)
        return speculate(self.model, begun, settings, drafter=Draft(draft.model, begun, settings))

    def complete(self, prompts: Sequence[str], settings: Sampling | Beam) -> list[Completion]:
        """Continue several prompts in one batch: the best text of a beam search, or samples with the seeds
        settings.seed, settings.seed + 1, …"""
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
        """Return several texts for each prompt: `n` samples, or the settings.n best of beam search, best first.

        Prompts are numbered from `first`; a prompt's samples depend on its number and the seed.
        """
        self.objective.check_continues("continue a text")
        job = BulkJob(settings, n=n, batch=max(1, len(prompts)), grammar=pattern)
        return list(generate_many(self.model, self.tokenizer, prompts, job=job, first=first))

    def bulk(
        self,
        prompts: Sequence[str],
        settings: Sampling | Beam,
        *,
        n: int = 1,
        batch: int = 16,
        out: Path | str | None = None,
        pattern: Grammar | None = None,
        quantize_cache: str | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Iterator[str]:
        """Yield the texts of many prompts as lines of JSON, in order: `n` for each, `batch` prompts at a time.

        With `out`, the lines are also written to that file, and prompts already in it are skipped; a file begun with
        another run, other settings or other `notes` is refused. Texts follow a `pattern`. `quantize_cache` is the width
        of the KV cache ('int8').
        """
        path = None if out is None else Path(out)
        job = BulkJob(settings, n=n, batch=batch, grammar=pattern, out=path, quantize_cache=quantize_cache)
        return bulk(self.model, self.tokenizer, prompts, job=job, notes=job.noted(str(self.path), notes or {}))

    @cached_property
    def objective(self) -> Objective[Any]:
        """The objective that the run was trained for, with its data."""
        folder, source = RunFolder(self.path), self.tokenizer
        if self.config.source_tokenizer is not None:
            source = Tokenizer.load(folder.source_tokenizer)
            source = source.reading_specials() if self.tokenizer.finds_specials else source
        return objectives.build(self.config, folder, Tokenizers(self.tokenizer, source))

    def evaluation(
        self, data: Sources | None = None, targets: Sequence[str] = (), encoding: str = "utf-8"
    ) -> AbstractContextManager[Evaluation]:
        """Open the run's held-out data, or all of `data`, for evaluation inside a `with` block.

        The evaluation has `metrics`, and for a language model `details` and the `overlap` with the training text.
        """
        source = None if data is None else {"sources": source_names(data), "targets": targets, "encoding": encoding}
        return evaluation_on(self.objective, self.model, source)

    def evaluate(
        self,
        data: Sources | None = None,
        targets: Sequence[str] = (),
        *,
        stride: int | None = None,
        encoding: str = "utf-8",
    ) -> EvaluationMetrics:
        """Return all metrics of the run's objective, on its held-out data or on all of `data` (with their `targets`).

        A language model's windows overlap if `stride` is given: each starts this many tokens after the previous one.
        Its metrics have 95 % `intervals`, bootstrapped over sections of the text, if it has more than one.
        """
        with self.evaluation(data, targets, encoding) as evaluation:
            return evaluation.metrics(stride)

    def minimal_pairs(self, data: str | Path | Sequence[MinimalPair | tuple[str, str]]) -> MinimalPairs:
        """Return how often the model finds the acceptable one of two sentences likelier (Warstadt et al. 2020).

        `data` is a table of pairs or a folder of them, in BLiMP's format or with columns `good` and `bad`, or the pairs
        (good, bad) themselves. Ties count half.
        """
        pairs = read_pairs(str(data)) if isinstance(data, str | Path) else check_pairs(data)
        return minimal_pairs(self.objective, self.model, pairs)

    def abilities(
        self, only: Sequence[str] = (), *, distances: Sequence[int] = (), questions: int = QUESTIONS, seed: int = 0
    ) -> Abilities:
        """Return how often the model finds the right continuation of made-up sequences likeliest, by distance.

        `only` names some of the abilities: agreement, brackets, copying, induction, recall, counting, reversal, sums,
        mapping. `distances` replace each ability's own. At each of them, `questions` are asked, made by `seed`.
        """
        return abilities(self.objective, self.model, only=only, distances=distances, questions=questions, seed=seed)

    def over_time(
        self, measure: Callable[["Run"], Abilities | MinimalPairs], checkpoints: str | Sequence[int] = "all"
    ) -> OverTime:
        """Return abilities or minimal pairs at the checkpoints of all steps, or of some, beside the validation loss.

        run.over_time(lambda run: run.abilities(["induction"]), [100, 200])
        """
        folder = RunFolder(self.path)
        models = checkpoint_models(folder, self.config, checkpoints, device=device_of(self.model))
        return over_time(folder, ((step, measure(replace(self, model=model))) for step, model in models))

    def perplexity(self, text: str | Sequence[str] | None = None) -> float:
        """Return exp of the mean surprisal per token, of a text, of several texts together, or of the held-out data.

        The first token of a text is scored as well, after whatever the model expects before a text: bos, or the end of
        the previous text. An imported model may expect nothing, as GPT-2 does. For files use `evaluate`; for a text
        longer than the window it agrees with a `stride` of half the window.
        """
        if text is not None:
            texts = [text] if isinstance(text, str) else text
            nats = [token.nats for each in texts for token in self.surprisal(each) if token.nats is not None]
            if not nats:
                raise DataError("nothing to score: no text, or none with a token that follows another")
            return perplexity(sum(nats) / len(nats))
        if (found := self.evaluate().get("perplexity")) is None:
            raise ConfigError(
                f"{self.path}: objective '{self.config.objective.kind}' has no perplexity; use evaluate()"
            )
        return found

    def surprisal(self, text: str) -> list[Surprisal]:
        """Return the tokens of a text with their surprisals, −log p in nats; `perplexity` takes their mean.

        The first token's surprisal is None if the model expects nothing before a text: with data.document_mask, and in
        imported models whose tokenizer adds nothing. Tokens that it adds after a text are scored too.
        """
        return text_surprisal(self.objective, self.model, text)

    def against(self, amateur: "Run", strength: float = 0.5, plausible: float = 0.1) -> "Run":
        """Contrast this run with a weaker one of the same tokenizer (contrastive decoding; Li et al. 2023)."""
        self._check_same_tokenizer(amateur)
        return replace(self, model=ContrastiveModel(self.model, amateur.model, strength, plausible=plausible))

    def _check_same_tokenizer(self, other: "Run") -> None:
        if other.tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise ConfigError(f"{other.path}: its tokenizer differs from that of {self.path}; both must be the same")

    def reading_specials(self) -> "Run":
        """Return this run, with special tokens such as BART's <mask> recognised in texts instead of read as text."""
        return replace(self, tokenizer=self.tokenizer.reading_specials())

    def translate(
        self,
        texts: Sequence[str],
        settings: Beam | Sampling | None = None,
        languages: LanguagePair = ANY_LANGUAGES,
        *,
        progress: Advance | None = None,
        ratio: float | None = LENGTH_RATIO,
    ) -> list[str]:
        """Return what the model writes for each text, by beam search unless `settings` say otherwise.

        A blank text stays blank. A translation has at most `ratio` times its source's tokens and 50 more; None leaves
        the limit to the settings. For a multilingual model, give the languages of texts and translations:
        `languages=("en_XX", "de_DE")`.
        """
        if not isinstance(self.objective, Pairs | Spans):
            raise self.objective.cannot("translate")
        chosen = settings or self.decoding["translate"]
        return self.objective.translator(self.model, LanguagePair(*languages), ratio).translate(texts, chosen, progress)

    def classify(
        self,
        texts: Sequence[str],
        second: Sequence[str] | None = None,
        *,
        labels: Sequence[str] | None = None,
        template: str = "This example is {}.",
        multi_label: bool = False,
    ) -> list[dict[str, float]]:
        """Return the probability of each label for each text, or pair of texts, the likeliest first.

        With `labels`, a model of natural-language inference classifies texts by labels that it was not trained on: each
        label becomes a hypothesis by the `template`. With `multi_label`, several may be right.
        """
        objective = self._trained_for(Classify, "classify")
        if labels is None:
            return objective.predict(self.model, texts, second)
        return objective.zero_shot(self.model, texts, labels, options=ZeroShot(template, multi_label))

    def rate(self, texts: Sequence[str], second: Sequence[str] | None = None) -> list[float]:
        """Return the number that the model predicts for each text, or pair of texts."""
        return self._trained_for(Regress, "predict numbers").predict(self.model, texts, second)

    def tag(self, sentences: Sequence[Sequence[str]]) -> list[list[tuple[str, float]]]:
        """Return the likeliest tag of each word of each sentence, with its probability."""
        return self._trained_for(Tag, "tag words").predict(self.model, sentences)

    def answer(self, questions: Sequence[str], contexts: Sequence[str]) -> list[AnswerSpan]:
        """Return the likeliest answer to each question in its context, with its probability and its position."""
        return self._trained_for(Answer, "answer questions").predict(self.model, questions, contexts)

    def embed(
        self,
        texts: Sequence[str],
        *,
        word: str | None = None,
        layer: int | None = None,
        mix: Sequence[float] | None = None,
        pooling: Pooling | None = None,
        normalise: bool = True,
        batch: int = 32,
    ) -> npt.NDArray[np.float32]:
        """Return a vector for each text, (texts, d_model); of length 1 with `normalise`. ELMo's are 2 · d_model wide.

        With `word`, return a vector for each of its occurrences in the texts, in order; `word="[]"` are the words in
        brackets: "the river [bank]". `layer` chooses a layer, where 0 is the embeddings; `mix` has a weight for each,
        whose softmax mixes them. By default the vectors are those of the last layer, or ELMo's mean of all layers.

        `pooling` is "mean", "first", "last", "max", "mean-sqrt" or "weighted-mean"; by default the one that the model
        was trained with, or else the mean. A model trained to embed reads at most `batch.length` tokens of a text.
        """
        if word is not None and pooling is not None:
            raise ConfigError(f"pooling = {pooling}: a word's vector is the mean over its tokens; leave it out")
        if layer is not None and mix is not None:
            raise ConfigError("layer and mix exclude each other")
        layers = None if layer is None and mix is None else LayerMix(layer, None if mix is None else tuple(mix))
        settings = EmbeddingOptions(pooling, normalise, batch, layers=layers, word=word)
        if isinstance(self.objective, Contrastive):
            frame = self.objective.frame
            settings = replace(settings, length=self.objective.length, frame=(frame.before, frame.after))
        return embed(self.model, self.tokenizer, texts, options=settings, log=warn)

    def _trained_for(self, objective: type[T], verb: str) -> T:
        if not isinstance(self.objective, objective):
            raise self.objective.cannot(verb)
        return self.objective

    def quantize(self, bits: str) -> None:
        """Quantise the model's weights in place, to 'bf16', 'int8' or 'int4'; it can then generate, not be trained."""
        quantize(self.model, bits)

    def export(self, to: str, dest: Path | str, *, dtype: str | None = None) -> Path:
        """Write the run's best weights for another program, and return the path.

        `to` is "hf", "peft" or "onnx" (a folder), "gguf" (a file) or "weft" (a run); `dtype` is as for `weft export`.
        """
        export_model(self.path, to, dest, dtype=dtype)
        return Path(dest)

    @cached_property
    def explain(self) -> Explain:
        """Views of the model's inside: `run.explain.attention("A text.")`, `.surprise`, `.anatomy()` …"""
        return Explain(self.config, self.model, self.objective)

    @cached_property
    def taps(self) -> dict[str, Shape]:
        """Names of the tensors inside the model that `activations` returns and `patch` changes, with their shapes."""
        return tap_shapes(self.model)

    def activations(
        self,
        texts: str | Sequence[str],
        taps: str | Sequence[str],
        *,
        targets: Sequence[str] | None = None,
        file: Path | str | None = None,
    ) -> dict[str, list[Tensor]]:
        """Return the activations of texts at the `taps`: for each name a list of tensors, one per text, on the CPU.

        Taps are names from `run.taps`, in which `*` matches one part: `"decoder.*.residual"`. An encoder–decoder reads
        the texts and writes `targets`, by default its own translations. With `file`, activations are written there
        text by text (safetensors), and the tensors are mapped from it.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        patterns = [taps] if isinstance(taps, str) else taps
        written: Sequence[str | None] = [None] * len(texts) if targets is None else list(targets)
        if len(written) != len(texts):
            raise ConfigError(f"{len(written)} targets for {len(texts)} texts; give one target per text")
        readings = [partial(self.explain.reading, *pair) for pair in zip(texts, written, strict=True)]
        return record_texts(readings, self.model, patterns=patterns, file=None if file is None else Path(file))

    def patch(self, changes: Mapping[str, Callable[[Tensor], Tensor]]) -> AbstractContextManager[object]:
        """Change tensors inside the model while the context is open, whatever the run does there.

        Each function gets the tensor at its tap, by a name as in `activations`, and returns one of the same shape and
        type; a recurrent model's come one token at a time, as those of a Transformer do while it generates.
        """
        return patched(self.model, changes, reached=self.taps)

    def results(self) -> dict[str, Any]:
        """Return the metrics and samples of the final evaluation; empty for an unfinished run."""
        return RunFolder(self.path).results()
