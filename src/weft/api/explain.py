"""Views of a model's inside: `run.explain` for a trained one, `weft.architecture("gpt2")` for a preset.

Each view is a picture that a notebook displays and that can be saved:

    run.explain.attention("The cat sat on the mat.").save("attention.html")
    weft.architecture("gpt2").anatomy().save("gpt2.pdf")
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from weft.api import interventions
from weft.api.arguments import checked
from weft.api.example_pair import example_pair
from weft.api.prediction import RowPredictor
from weft.api.reading import default_beam, own_text, read_text, translation
from weft.api.settings import sampling
from weft.costs.count import count
from weft.decode.config import Branching
from weft.decode.prompt import Prompt
from weft.decode.tree import search_trees
from weft.errors import ConfigError, ModelError, RunError, WeftError
from weft.explain import views
from weft.explain.views import OF_A_TEXT, VIEWS
from weft.models.base import LanguageModel, device_of
from weft.models.build import build
from weft.models.config import Bahdanau, EncoderDecoder, NGram, Recurrent, StaticVectors, TransformerConfig
from weft.models.head_config import LMHead
from weft.models.transformer import Transformer
from weft.objectives.rows import RowObjective
from weft.objectives.tokens import TranslationObjective
from weft.progress import bar
from weft.recipe.config import Recipe
from weft.recipe.resolve import resolve
from weft.runs import checkpoint
from weft.runs.report import plots, read_record
from weft.training import schedule
from weft.training.objective import Objective

if TYPE_CHECKING:  # these modules draw, and are imported on first use
    from weft.explain.attention.maps import AttentionMaps
    from weft.explain.graph.picture import GraphPicture
    from weft.explain.step.step import StepPicture

SHOWN_TOKENS = 40  # of a text that the user did not choose
MAX_DRAWN_BEAMS = 10  # of a search tree
MAX_QUOTED = 160  # characters of a text in a note
GRAPH_TOKENS = 4  # length of the input to a computation graph when no text is given
MAX_PARAMETERS = 30_000_000  # of a preset that is built, and trained for a step, only to be shown
MAX_ABLATED_FLOPS = 2e12  # of all forward passes with one head ablated: a few seconds on two cores
Text = str | None
View = TypeVar("View", bound=Callable[..., Any])


def shows_text(tokens: int = SHOWN_TOKENS, *, untrained: bool = False) -> Callable[[View], View]:
    """Decorate a view of a text: without one, it shows `tokens` tokens of the run's own data, and its note says so.

    With `untrained`, the view exists for presets as well, which have no text.
    """

    def decorate(view: View) -> View:
        @wraps(view)
        def with_default_text(self: "Explain", text: Text = None, **options: Any) -> Any:
            if not untrained:
                self._require_trained(view.__name__)
            if text is not None or self.trained is None:
                return view(self, text, **options)
            text, origin = self.own_text(tokens)
            return views.picture.with_note(view(self, text, **options), f"{_quote('The text', text, origin)}.")

        return cast(View, with_default_text)

    return decorate


def _quote(name: str, text: str, origin: str) -> str:
    words = " ".join(text.split())
    quoted = words[:MAX_QUOTED] + ("…" if len(words) > MAX_QUOTED else "")
    return f"{name}{f' ({origin})' if origin else ''}: “{quoted}”"


@checked
@dataclass(frozen=True)
class Explain:
    """The views of a model, one method each. Views of a text need a `trained` model and the `objective` it learned.

    Without a text, a view of a text shows one of the run's held-out data, and its `note` says so.
    """

    recipe: Recipe
    trained: LanguageModel | None = None
    objective: Objective[Any] | None = None

    def anatomy(self) -> "views.anatomy.Anatomy":
        """Show the model on one page, block by block: shapes, counts, and the source lines that compute each part."""
        return views.anatomy.anatomy(self.recipe.model)

    def costs(self, length: int | None = None) -> "views.costs.Costs":
        """Show parameters, FLOPs and bytes by component and layer, for texts of `length` tokens."""
        return views.costs.costs(self.recipe.model, length)

    def cache(self, steps: int = 6) -> "views.cache.CacheSteps":
        """Show what the first `steps` steps of generation compute, with and without a KV cache."""
        return views.cache.cache_steps(self.recipe.model, steps)

    def growth(self) -> "views.growth.Growth":
        """Show how the costs grow with length, width, depth and vocabulary."""
        return views.growth.growth(self.recipe.model)

    def activations(self) -> "views.activations.Activations":
        """Show activation functions and their derivatives."""
        return views.activations.activations()

    def precision(self) -> "views.precision.Precision":
        """Show number formats bit by bit, and the size of the model in each."""
        return views.precision.precision(count(self.recipe.model).parameters)

    def training(self) -> "views.training.Training":
        """Show the run as it was logged: curves, losses by epoch, epochs by source, rollbacks."""
        folder = self._require_trained("training")[1].folder
        record = read_record(folder)
        curves, title = plots(record, record.last("result")), f"Training of {folder.path.resolve().name}"
        return views.training.Training(title, tuple(curves), tuple(record.tables()))

    @shows_text()
    def likelihood(self, text: Text = None, *, target: Text = None) -> "views.likelihood.Likelihood":
        """Derive the maximum-likelihood estimate of the words after a text, for an n-gram model."""
        model, objective = self._require_trained("likelihood")
        return views.likelihood.likelihood(model, objective.tokenizer, text or "")

    def schedule(self) -> "views.schedule.Schedule":
        """Show the learning rate at each step of the recipe."""
        if isinstance(self.recipe.model, NGram):
            raise ModelError(f"{self.recipe.name}: an n-gram model is counted in one pass and has no learning rate")
        if isinstance(self.recipe.model, StaticVectors):
            raise ModelError(f"{self.recipe.name}: the learning rate of word vectors is in the model's settings")
        steps, optimizer, kind = self.recipe.steps, self.recipe.optimizer, self.recipe.schedule.kind
        lr = None if optimizer is None else optimizer.lr
        if steps is None or (lr is None and kind != "noam"):
            raise ConfigError(
                f"{self.recipe.name}: steps and optimizer.lr are chosen when training starts; set them, such as "
                "steps=1000 optimizer.lr=3e-4, or name a run"
            )
        rate = schedule.build(self.recipe.schedule, lr or 0.0, steps, d_model=getattr(self.recipe.model, "d_model", 1))
        return views.schedule.schedule([rate(step) for step in range(1, steps + 1)], f"Learning rate, {kind}")

    def positions(self) -> "views.positions.Positions":
        """Show the position encoding, as a heat map and against distance: a trained one, or the recipe's."""
        model = self.recipe.model
        if not isinstance(model, TransformerConfig):
            raise ConfigError(f"{self.recipe.name}: a model of kind '{model.kind}' reads in order, without positions")
        shown = self.trained if isinstance(self.trained, Transformer) else model
        return views.positions.positions(shown, min(128, model.longest or 128))

    @shows_text(untrained=True)
    def gradients(self, text: Text = None, *, target: Text = None) -> "views.picture.Picture":
        """Show gradient norms by layer, and for a recurrent model by time step.

        For a run they are those of a text at each of its checkpoints. For a preset they are those of untrained stacks:
        with pre-norm and post-norm, with and without skip connections (Xiong et al. 2020), or of recurrent cells.
        """
        optimizer, model = self.recipe.optimizer, self.recipe.model
        clip = 1.0 if optimizer is None else optimizer.clip
        if self.trained is None:
            return views.gradients.untrained_gradients(model, clip)
        reading, norms = self.reading(text, target), partial(views.gradients.gradient_norms, clip=clip)
        history = {name: norms(replace(reading, model=model)) for name, model in self._checkpoints(self.trained)}
        best = norms(reading)
        return views.gradients.GradientHistory({**history, "best": best}) if history else best

    def _checkpoints(self, trained: LanguageModel) -> Iterator[tuple[str, LanguageModel]]:
        """Yield the model before its first step, and at its checkpoints other than the best; nothing if it is large or
        was trained elsewhere."""
        folder = self._require_trained("a text")[1].folder
        if self._large or self.recipe.adapter is not None or folder.origin.is_dir():
            return
        if self.recipe.init is None:
            yield "at first", self._fresh().to(device_of(trained))
        best = (folder.checkpoints / "best").resolve()
        for path in (path for path in checkpoint.all_checkpoints(folder.checkpoints) if path.resolve() != best):
            model = build(self.recipe.model)
            with suppress(RunError):  # damage was reported when the run was loaded
                checkpoint.verify(path)
                checkpoint.load_weights(path, model)
                yield f"step {checkpoint.step_of(path)}", model.to(device_of(trained))

    @cached_property
    def model(self) -> LanguageModel:
        """The trained model, or one with freshly initialised weights."""
        return self._fresh() if self.trained is None else self.trained

    def _fresh(self) -> LanguageModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.seed)
            return build(self.recipe.model)

    def timing(self, length: int | None = None, *, batch: int = 1) -> "views.timing.StepTiming":
        """Show the measured time of a training step beside the prediction from its FLOPs and bytes."""
        return views.timing.step_time(self.model, length or min(128, getattr(self.recipe.model, "context", 128)), batch)

    def neurons(self) -> "views.neurons.Neurons":
        """Show one step of an Elman network as units and the weights between them."""
        if not isinstance(self.recipe.model, Recurrent):
            raise ModelError(views.neurons.OTHERS)
        return views.neurons.neurons(self.model, None if self.objective is None else self.objective.tokenizer)

    @shows_text(untrained=True)
    def weights(self, text: Text = None, *, target: Text = None) -> "views.weights.Histograms":
        """Show histograms of the weights, and for a run of the activations on a text."""
        return views.weights.histograms(self.model, None if self.trained is None else self.reading(text, target))

    @shows_text(GRAPH_TOKENS, untrained=True)
    def graph(
        self,
        text: Text = None,
        *,
        target: Text = None,
        shapes: bool = False,
        backward: bool = False,
        open: str | Sequence[str] = (),
    ) -> "GraphPicture":
        """Show the computation graph, folded by module; of a preset for a few tokens, without weights.

        `shapes` adds the shapes of all tensors, `backward` the backward pass with its formulas, and `open` names the
        modules that are shown unfolded, such as "decoder.0".
        """
        predicts = not isinstance(self.recipe.model, TransformerConfig) or isinstance(self.recipe.model.head, LMHead)
        options: dict[str, Any] = {"shapes": shapes, "backward": backward, "open": open, "loss": predicts}
        if self.trained is not None:
            reading = self.reading(text, target)
            return views.graph.graph_picture(self.trained, reading.tokens, **options, **reading.model_kwargs)
        if isinstance(self.recipe.model, NGram):
            raise ModelError("an n-gram model's graph depends on its counts; name a run: weft explain RUN --only graph")
        tokens = torch.zeros(1, GRAPH_TOKENS, dtype=torch.long)
        with torch.device("meta"):
            model = build(self.recipe.model)
        if isinstance(self.recipe.model, EncoderDecoder | Bahdanau):
            options["source"] = views.reading.SourceTokens(tokens.clone())
        return views.graph.graph_picture(model.eval(), tokens, **options)

    @shows_text()
    def attention(self, text: Text = None, *, target: Text = None) -> "AttentionMaps":
        """Show the attention probabilities of every head; `.head`, `.follow` and `.rollout` show parts of them."""
        return views.heads.named_maps(self.reading(text, target))

    @shows_text()
    def heads(self, text: Text = None, *, target: Text = None, ablate: bool = True) -> "views.heads.HeadTable":
        """Show statistics of each head, and with `ablate` the increase of the loss without it, in nats per token."""
        return views.heads.head_statistics(self.reading(text, target), ablate)

    @shows_text()
    def surprise(self, text: Text = None, *, target: Text = None, top: int = 5) -> "views.surprise.Surprise":
        """Show the surprisal of each token, and the `top` likeliest tokens at its position."""
        return views.surprise.surprise(self.reading(text, target), top)

    @shows_text()
    def lens(self, text: Text = None, *, target: Text = None) -> "views.lens.Lens":
        """Show what each layer would predict (the logit lens)."""
        return views.lens.lens(self.reading(text, target))

    @shows_text()
    def experts(self, text: Text = None, *, target: Text = None) -> "views.experts.ExpertMap":
        """Show which experts of a mixture read each token, in every layer."""
        return views.experts.experts(self.reading(text, target))

    @shows_text()
    def saliency(
        self, text: Text = None, *, target: Text = None, place: int | None = None
    ) -> "views.saliency.Saliency":
        """Show how much the prediction after token `place`, by default the last, depends on each token (gradients)."""
        reading = self.reading(text, target)
        # nothing is predicted after the end-of-text token of a translation
        last = -1 if reading.source is None or len(reading.ids) < 2 else -2
        return views.saliency.saliency(reading, last if place is None else place)

    @shows_text()
    def search(self, text: Text = None, *, settings: Branching | None = None) -> "views.search.SearchTrees":
        """Show greedy search, beam search and samples for a few tokens after a text, as trees."""
        (model, objective), text = self._require_trained("search"), text or ""
        prompt, source = Prompt.of(objective.tokenizer, text), None
        if isinstance(objective, TranslationObjective):
            reading = self.reading(text, "")
            prompt, source = Prompt.of(reading.tokenizer, list(reading.ids)), reading.model_kwargs["source"]
            settings = settings or Branching()
            if "beams" not in settings.model_fields_set:
                settings = settings.replace(beams=min(default_beam(objective).beams, MAX_DRAWN_BEAMS))
        trees = tuple(search_trees(model, prompt, settings, source=source))
        return views.search.SearchTrees(text, trees, translates=source is not None)

    @shows_text()
    def step(
        self,
        text: Text = None,
        *,
        target: Text = None,
        place: int | tuple[int | None, int | None] | None = None,
        layer: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        threads: Sequence[int] = (),
    ) -> "StepPicture":
        """Follow one token through the model with its actual values, from ids to the choice of the next token.

        `place` is the position of the token, by default the last; of an encoder–decoder, a pair of positions is that of
        the token and that of the source's token to follow in the encoder, by default the most attended. `layer` is the
        block that is shown in detail, by default the first. `temperature`, `top_k` and `top_p` are the settings that
        the next token is chosen with. Of a long text, `threads` are the positions of other tokens to show.
        """
        _, objective = self._require_trained("step")
        settings = sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        labels = objective.labels if isinstance(objective, RowObjective) else ()
        reading = self.reading(text, target)
        position, source = place if isinstance(place, tuple) else (place, None)
        options: dict[str, Any] = {"position": position, "source_position": source, "layer": layer, "threads": threads}
        return views.step.step(reading, text=text or "", sampling=settings, labels=labels, **options)

    def patch(
        self,
        text: Text = None,
        other: Text = None,
        answer: tuple[str, str] | None = None,
        *,
        target: Text = None,
        pairs: str | Path | None = None,
        checkpoints: bool = False,
    ) -> "views.picture.Picture":
        """Show which activations of a text bring its answer back when they are put into an `other` text.

        `answer` are the next tokens of the two texts; of a masked model those at the mask, of an encoder–decoder those
        after the `target` so far. Or `pairs` names a table with the columns `clean`, `corrupt`, `answer` and `wrong`.
        With `checkpoints`, the strongest nodes and the circuit are measured at each of the run's checkpoints.
        """
        model, objective = self._require_trained("patch")
        given = {"clean": text, "corrupt": other, "target": target}
        given |= dict(zip(("answer", "wrong"), answer or (None, None), strict=True))
        found = interventions.text_pairs(model, objective, given, pairs=None if pairs is None else str(pairs))
        if checkpoints:
            return interventions.patch_over_time(found, self._checkpoints(model), objective)
        return views.patch.patch(found)

    def example_pair(self) -> dict[str, str]:
        """Return a pair of texts for `patch` from the run's data: `clean`, `corrupt`, `answer`, `wrong`, `target`."""
        return example_pair(*self._require_trained("patch"))

    def probe(self, labels: str | Path | None = None, *, checkpoints: bool = False) -> "views.picture.Picture":
        """Show what a linear classifier reads in each layer: accuracy, a control task and the selectivity.

        `labels` is a table with `words` and `tags`, or with `text`, a word of it in brackets, and its `label`; or
        "builtin:number", "builtin:depth", "builtin:tag" or "builtin:sense". With `checkpoints`, every checkpoint of the
        run is probed.
        """
        model, objective = self._require_trained("probe")
        if labels is None:
            raise ConfigError("probe: give a table of labels with --labels, or builtin:number, depth, tag or sense")
        found = self._checkpoints(model) if checkpoints else None
        return interventions.probe_labels(model, objective, str(labels), checkpoints=found)

    def prediction(self, text: Text = None, second: Text = None, *, output: str | int | None = None) -> dict[str, Any]:
        """Return what a classifier, a tagger, a regression model, an answer finder or an embedding model predicts.

        Some models read a `second` text: a question its context, an embedding model one to compare with. `saliency` has
        the gradients of one `output` by token: of a label, of the tag of a word, of the similarity to a text.
        """
        given = None if text is None else (text, *(() if second is None else (second,)))
        texts, origin = self._predictor.own_inputs() if given is None else (given, None)
        record = {"kind": self.recipe.objective.kind, "texts": list(texts), "origin": origin}
        return record | self._predictor.predict(texts, output)

    @cached_property
    def _predictor(self) -> RowPredictor:
        model, objective = self._require_trained("prediction")
        if not isinstance(objective, RowObjective) or not self.recipe.objective.input_columns:
            raise objective.cannot("predict labels, numbers or vectors")
        return RowPredictor(model, objective)

    def reading(self, text: Text = None, target: Text = None) -> "views.reading.Reading":
        """Return a text as the model's input, with special tokens around it.

        An encoder–decoder reads the text and writes `target`; if that is None, the model's own translation.
        """
        (model, objective), text = self._require_trained("a text"), self.own_text()[0] if text is None else text
        return read_text(self.recipe, model, objective, text=text, target=target)

    def own_text(self, tokens: int = SHOWN_TOKENS) -> tuple[str, str]:
        """Return a text of the run's held-out data, or else of its training data, and its origin in words."""
        return own_text(*self._require_trained("a text"), tokens)

    def _require_trained(self, view: str) -> tuple[LanguageModel, Objective[Any]]:
        if self.trained is None or self.objective is None:
            untrained = f"'{self.recipe.name}' has no weights yet"
            raise ConfigError(f"{view}: {untrained}; train it, and name its run: weft explain RUN")
        return self.trained, self.objective

    def all(self, text: Text = None, *, target: Text = None) -> "views.picture.Album":
        """Show all views of this model on one page."""
        inputs: dict[str, Any] = {}
        name, origin = self.recipe.name, ""
        if self.trained is not None and self.objective is not None:
            name = self.objective.folder.path.resolve().name
            text, origin = self.own_text() if text is None else (text, "")
            if isinstance(self.objective, TranslationObjective) and target is None:
                target = translation(self.trained, self.objective, text)  # once, not in every view
            self.reading(text, target)  # raises for a text that the model cannot read
            inputs = {"text": text, "target": target}
        pictures = []
        with bar("drawing", len(VIEWS)) as advance:
            for view in VIEWS:
                with suppress(WeftError):  # this model, or this text, has no such view
                    pictures.append(self._view(view, inputs if view in OF_A_TEXT else {}))
                advance(1)
        parameters = count(self.recipe.model).parameters  # an n-gram model has none
        kind = self.recipe.model.kind + (f", {parameters:,} parameters" if parameters else "")
        shown = [_quote(f"the {key}", words, origin if key == "text" else "") for key, words in inputs.items() if words]
        return views.picture.Album(name, "; ".join((kind, *shown)), tuple(pictures))

    def _view(self, name: str, inputs: dict[str, Any]) -> "views.picture.Picture":
        """Draw one view of the page, without parts that would take minutes."""
        if self._large and (name == "timing" or (name == "weights" and self.trained is None)):
            raise ModelError("too large to be built only to be shown")
        if name == "search":
            return self.search(inputs.get("text"))
        if name == "heads":
            model = self.recipe.model
            heads = model.attention.heads * model.layers if isinstance(model, TransformerConfig) else 0
            flops = heads * count(model, 1).forward * views.heads.ABLATED_TOKENS
            return self.heads(**inputs, ablate=flops <= MAX_ABLATED_FLOPS)
        view: Callable[..., views.picture.Picture] = getattr(self, name)
        return view(**inputs)

    @property
    def _large(self) -> bool:
        return count(self.recipe.model).parameters > MAX_PARAMETERS


@checked
def architecture(source: str, changes: Sequence[str] | Mapping[str, Any] = ()) -> Explain:
    """Return the views of a preset or a recipe before it is trained; `changes` are as for `train`."""
    return Explain(resolve(source, changes))
