"""What can be seen of a model: `run.explain` for one that is trained, `weft.architecture("gpt2")` for a preset.

Each view is a picture that shows itself in a notebook and saves itself:

    run.explain.attention("The cat sat on the mat.").save("attention.html")
    weft.architecture("gpt2").anatomy().save("gpt2.pdf")
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any, TypedDict, TypeVar, Unpack, cast

import torch

from weft.api.arguments import checked
from weft.api.settings import generation_defaults, translation_beam
from weft.config import validate
from weft.costs.count import count
from weft.decode.config import Branching, Sampling
from weft.decode.prompt import Prompt
from weft.decode.tree import search_trees
from weft.errors import ConfigError, ModelError, RunError, WeftError
from weft.explain import views
from weft.explain.views import OF_A_TEXT, VIEWS
from weft.models.base import LanguageModel, device_of
from weft.models.build import build
from weft.models.config import Bahdanau as BahdanauConfig
from weft.models.config import EncoderDecoder, NGram, TransformerConfig
from weft.models.hidden import context_of, frame_for
from weft.models.transformer import Transformer
from weft.objectives.frame import text_frame
from weft.objectives.rows import RowObjective
from weft.objectives.tokens import TranslationObjective
from weft.progress import bar
from weft.recipe.config import Recipe
from weft.recipe.resolve import resolve
from weft.runs import checkpoint
from weft.training import schedule
from weft.training.objective import Objective

SENTENCE = "The animal didn't cross the street because it was too tired."
SHOWN_TOKENS = 40  # of a text that nobody chose
MAX_FRAME_TOKENS = 4  # special tokens around it
QUOTED = 160  # characters of a text that are told
GRAPH_TOKENS = 4  # that pass through a graph which no text was given for
MAX_PARAMETERS = 30_000_000  # of a preset that is built, and a step of it taken, just to look at it
MAX_ABLATED_FLOPS = 2e12  # of passes with a head taken out: some seconds on two cores


class GraphOptions(TypedDict, total=False):
    """How a graph is shown."""

    shapes: bool
    backward: bool
    open: str | Sequence[str]


class StepOptions(TypedDict, total=False):
    """Which token of a text is followed and which layer is opened, both counted from 0; how the next one is chosen."""

    place: int | None
    layer: int | None
    temperature: float
    top_k: int | None
    top_p: float | None


View = TypeVar("View", bound=Callable[..., Any])


def of_a_text(tokens: int = SHOWN_TOKENS, untrained: bool = False) -> Callable[[View], View]:
    """A view of a text: where it is given none, it takes so many tokens of the run's own, and says so.

    Some show a model as well that is `untrained`.
    """

    def wrapped(view: View) -> View:
        @wraps(view)
        def shown(self: "Explain", text: str | None = None, **options: Any) -> Any:
            if not untrained:
                self._learned(view.__name__)
            if text is not None or self.trained is None:
                return view(self, text, **options)
            own, origin = self.own_text(tokens)
            return views.picture.noted(view(self, own, **options), f"{_quoted('The text', own, origin)}.")

        return cast(View, shown)

    return wrapped


def _quoted(name: str, text: str, origin: str) -> str:
    words = " ".join(text.split())
    return f"{name}{f' ({origin})' if origin else ''}: “{words[:QUOTED]}{'…' if len(words) > QUOTED else ''}”"


@checked
@dataclass(frozen=True)
class Explain:
    """The views of a model, one method each; those of a text need one that is `trained`, and what it has learned.

    Where a view of a text is given none, it takes one that the run held out, and its `note` says so.
    """

    recipe: Recipe
    trained: LanguageModel | None = None
    objective: Objective[Any] | None = None

    def anatomy(self) -> "views.anatomy.Anatomy":
        """The model on one page, block by block: shapes, counts, and the source lines that compute each part."""
        return views.anatomy.anatomy(self.recipe.model)

    def costs(self, length: int | None = None) -> "views.costs.Costs":
        """Parameters, operations and bytes by component and layer, for texts of `length` tokens."""
        return views.costs.costs(self.recipe.model, length)

    def growth(self) -> "views.growth.Growth":
        """How the costs grow with the length, the width, the depth and the vocabulary."""
        return views.growth.growth(self.recipe.model)

    def activations(self) -> "views.activations.Activations":
        """Activation functions and their slopes."""
        return views.activations.activations()

    def schedule(self) -> "views.schedule.Schedule":
        """The learning rate at each step of the recipe."""
        if isinstance(self.recipe.model, NGram):
            raise ModelError(f"{self.recipe.name}: an n-gram model is counted in one pass; it has no learning rate")
        steps, optimizer, kind = self.recipe.steps, self.recipe.optimizer, self.recipe.schedule.kind
        lr = None if optimizer is None else optimizer.lr
        if steps is None or (lr is None and kind != "noam"):
            raise ConfigError(
                f"{self.recipe.name}: steps and optimizer.lr are chosen when training starts; give them, such as "
                "steps=1000 optimizer.lr=3e-4, or name a run"
            )
        rate = schedule.build(self.recipe.schedule, lr or 0.0, steps, d_model=getattr(self.recipe.model, "d_model", 1))
        return views.schedule.schedule([rate(step) for step in range(1, steps + 1)], f"Learning rate, {kind}")

    def positions(self) -> "views.positions.Positions":
        """The position encoding as stripes and against distance: a run's own, or the one that the settings name."""
        model = self.recipe.model
        if not isinstance(model, TransformerConfig):
            raise ConfigError(f"{self.recipe.name}: a model of kind '{model.kind}' reads in order, without positions")
        own = self.trained if isinstance(self.trained, Transformer) else model
        return views.positions.positions(own, min(128, model.longest or 128))

    @of_a_text(untrained=True)
    def gradients(self, text: str | None = None, *, target: str | None = None) -> "views.picture.Picture":
        """The gradient's norm by layer: of a run on a text, from its first weights on; else of untrained stacks,
        pre-norm, post-norm, with skips and without (Xiong et al. 2020)."""
        if self.trained is None:
            return views.gradients.gradient_flows()
        reading, norms = self.reading(text, target), views.gradients.gradient_norms
        stages = {name: norms(replace(reading, model=model)) for name, model in self._stages(self.trained)}
        now = norms(reading)
        return views.gradients.GradientHistory({**stages, "best": now}) if stages else now

    def _stages(self, trained: LanguageModel) -> Iterator[tuple[str, LanguageModel]]:
        """The model before its first step, and at the other checkpoints that are left, unless it is large or was
        trained elsewhere."""
        folder = self._learned("a text")[1].folder
        if self._large or self.recipe.adapter is not None or folder.origin.is_dir():
            return
        if self.recipe.init is None:
            yield "at first", self._fresh().to(device_of(trained))
        best = (folder.checkpoints / "best").resolve()
        for path in (path for path in checkpoint.standing(folder.checkpoints) if path.resolve() != best):
            model = build(self.recipe.model)
            with suppress(RunError):  # whoever loads the run has heard of damage
                checkpoint.verify(path)
                checkpoint.load_weights(path, model)
                yield f"step {checkpoint.step_of(path)}", model.to(device_of(trained))

    @cached_property
    def model(self) -> LanguageModel:
        """The trained model; else one with fresh weights."""
        return self._fresh() if self.trained is None else self.trained

    def _fresh(self) -> LanguageModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.seed)
            return build(self.recipe.model)

    def timing(self, length: int | None = None, *, batch: int = 1) -> "views.timing.StepTime":
        """The time of a real training step beside what its operations and bytes predict."""
        return views.timing.step_time(self.model, length or min(128, getattr(self.recipe.model, "context", 128)), batch)

    @of_a_text(untrained=True)
    def weights(self, text: str | None = None, *, target: str | None = None) -> "views.weights.Histograms":
        """Histograms of the weights, and with a run of the activations on a text."""
        return views.weights.histograms(self.model, None if self.trained is None else self.reading(text, target))

    @of_a_text(GRAPH_TOKENS, untrained=True)
    def graph(
        self, text: str | None = None, *, target: str | None = None, **shown: Unpack[GraphOptions]
    ) -> "views.graph.GraphPicture":
        """The computation graph, folded by module; of a preset for a few tokens, without any weights.

        `shapes=True` shows those of all tensors, `backward=True` the backward pass with its formulas, and `open` names
        what is shown unfolded, such as "decoder.0".
        """
        if self.trained is not None:
            reading = self.reading(text, target)
            return views.graph.graph_picture(self.trained, reading.tokens, **shown, **reading.given)
        if isinstance(self.recipe.model, NGram):
            raise ModelError("the graph of an n-gram model follows from its counts: weft explain RUN --only graph")
        tokens = torch.zeros(1, GRAPH_TOKENS, dtype=torch.long)
        with torch.device("meta"):
            model = build(self.recipe.model)
        both = isinstance(self.recipe.model, EncoderDecoder | BahdanauConfig)
        given: dict[str, Any] = {"source": views.reading.SourceTokens(tokens.clone())} if both else {}
        return views.graph.graph_picture(model.eval(), tokens, **shown, **given)

    @of_a_text()
    def attention(self, text: str | None = None, *, target: str | None = None) -> "views.attention.AttentionMaps":
        """Who looks at whom: the probabilities of every head. `.head`, `.follow` and `.rollout` show parts of it."""
        return views.heads.named_maps(self.reading(text, target))

    @of_a_text()
    def heads(
        self, text: str | None = None, *, target: str | None = None, ablate: bool = True
    ) -> "views.heads.HeadTable":
        """What each head does, and with `ablate` what the text costs without it, in nats per token."""
        return views.heads.head_statistics(self.reading(text, target), ablate)

    @of_a_text()
    def surprise(
        self, text: str | None = None, *, target: str | None = None, top: int = 5
    ) -> "views.surprise.Surprise":
        """The surprisal of each token, and the `top` tokens that were expected."""
        return views.surprise.surprise(self.reading(text, target), top)

    @of_a_text()
    def lens(self, text: str | None = None, *, target: str | None = None) -> "views.lens.Lens":
        """What each layer would predict (the logit lens)."""
        return views.lens.lens(self.reading(text, target))

    @of_a_text()
    def saliency(
        self, text: str | None = None, *, target: str | None = None, place: int | None = None
    ) -> "views.saliency.Saliency":
        """Which tokens the prediction after `place` depends on, by its gradient; by default the last prediction."""
        reading = self.reading(text, target)
        # a translation's last token is its end, after which nothing is predicted
        last = -1 if reading.source is None or len(reading.ids) < 2 else -2
        return views.saliency.saliency(reading, last if place is None else place)

    @of_a_text()
    def search(self, text: str | None = None, *, settings: Branching | None = None) -> "views.search.SearchTrees":
        """Greedy search, beam search and samples for a few tokens after a text, as trees."""
        (model, objective), text = self._learned("search"), self.own_text()[0] if text is None else text
        prompt, source = Prompt.of(objective.tokenizer, text), None
        if isinstance(objective, TranslationObjective):
            reading = self.reading(text, "")
            prompt, source = Prompt.of(reading.tokenizer, list(reading.ids)), reading.given["source"]
        trees = tuple(search_trees(model, prompt, settings, source=source))
        return views.search.SearchTrees(text, trees, translates=source is not None)

    @of_a_text()
    def step(
        self, text: str | None = None, *, target: str | None = None, **asked: Unpack[StepOptions]
    ) -> "views.step.Step":
        """One token's way through the model with its real numbers, from ids to the choice of the next token.

        `place` is the token that is followed, by default the last; `layer` the block whose inside is shown, by default
        the first; `temperature`, `top_k` and `top_p` say how the next token is chosen.
        """
        (_, objective), text = self._learned("step"), self.own_text()[0] if text is None else text
        place, layer = asked.pop("place", None), asked.pop("layer", None)
        settings = validate(Sampling, asked)
        labels = objective.labels if isinstance(objective, RowObjective) else ()
        wanted = views.step.Asked(text, place, layer, settings, labels)
        return views.step.step(self.reading(text, target), wanted)

    def reading(self, text: str | None = None, target: str | None = None) -> "views.reading.Reading":
        """A text as the run's model reads it, with what stands around it there.

        An encoder–decoder reads it and writes `target`, or what it writes of its own.
        """
        (model, objective), text = self._learned("a text"), self.own_text()[0] if text is None else text
        tokenizer = objective.tokenizer
        if isinstance(objective, TranslationObjective):
            return self._pair(objective, text, target)
        if target:
            raise ConfigError(f"target: {objective.folder.path} is {self.recipe.objective.makes}, which reads one text")
        ids = tokenizer.encode(text)
        if self.recipe.objective.continues:
            before: tuple[int, ...] = text_frame(self.recipe, tokenizer).begins
            return views.reading.Reading(model, tokenizer, (*before, *ids), len(before))
        if isinstance(objective, RowObjective):
            before, after = objective.frame.before, objective.frame.after
            return views.reading.Reading(model, tokenizer, (*before, *ids, *after), len(before))
        framed = frame_for(model)(tokenizer, ids, None)
        return views.reading.Reading(model, tokenizer, tuple(framed.ids), framed.before)

    def _pair(self, objective: TranslationObjective[Any], text: str, target: str | None) -> "views.reading.Reading":
        # what the model writes has an end, even where it writes nothing; a target that is empty is yet to begin
        ends = target is None or bool(target)
        target = self._translation(objective, text) if target is None else target
        source, own = objective.tokenizers.source, objective.tokenizers.target
        frame, starts, first = objective.direction
        read = (*frame.before, *source.encode(text), *frame.after)
        ids = (starts, *first, *own.encode(target), *((own.need("eos"),) if ends else ()))
        return views.reading.Reading(self.model, own, ids, 1 + len(first), read, source)

    def _translation(self, objective: TranslationObjective[Any], text: str) -> str:
        defaults = generation_defaults(objective.folder, objective.tokenizer)[1]
        settings = translation_beam(objective.length, defaults)
        return objective.translator(self.model).translate([text], settings)[0]

    def own_text(self, tokens: int = SHOWN_TOKENS) -> tuple[str, str]:
        """A text that the run held out, or else one that it was trained on, and where it is from."""
        model, objective = self._learned("a text")
        own, origin = SENTENCE, "an example, for the run's own text is not there"
        with suppress(WeftError):  # data may be gone, and an imported model never had any
            if held_out := objective.excerpt("validation", tokens):
                own, origin = held_out, "from what the run held out"
            elif learned := objective.excerpt("train", tokens):
                own, origin = learned, "from what the run was trained on, for it held nothing out"
        context, spans = context_of(model), objective.tokenizers.source.token_spans(own)
        few = spans[: tokens if context is None else min(tokens, context - MAX_FRAME_TOKENS)]
        return (own[: few[-1].end] if few else own), origin

    def _learned(self, what: str) -> tuple[LanguageModel, Objective[Any]]:
        if self.trained is None or self.objective is None:
            untrained = f"'{self.recipe.name}' has no weights yet"
            raise ConfigError(f"{what}: {untrained}; train it, and name its run: weft explain RUN")
        return self.trained, self.objective

    def all(self, text: str | None = None, *, target: str | None = None) -> "views.picture.Album":
        """One page with every view that a model of this kind has."""
        given: dict[str, Any] = {}
        name, origin = self.recipe.name, ""
        if self.trained is not None and self.objective is not None:
            name = self.objective.folder.path.resolve().name
            text, origin = self.own_text() if text is None else (text, "")
            if isinstance(self.objective, TranslationObjective) and target is None:
                target = self._translation(self.objective, text)  # once for all views
            self.reading(text, target)  # a text that can't be read has no page
            given = {"text": text, "target": target}
        pictures = []
        with bar("drawing", len(VIEWS)) as advance:
            for view in VIEWS:
                with suppress(WeftError):  # it says why this model, or this text, has no such view
                    pictures.append(self._view(view, given if view in OF_A_TEXT else {}))
                advance(1)
        parameters = count(self.recipe.model).parameters  # an n-gram model has none
        kind = self.recipe.model.kind + (f", {parameters:,} parameters" if parameters else "")
        shown = [_quoted(f"the {key}", words, origin if key == "text" else "") for key, words in given.items() if words]
        return views.picture.Album(name, "; ".join((kind, *shown)), tuple(pictures))

    def _view(self, name: str, given: dict[str, Any]) -> "views.picture.Picture":
        """One view of the page; what would keep its reader waiting for minutes is left out."""
        if self._large and (name == "timing" or (name == "weights" and self.trained is None)):
            raise ModelError("too large to be built just to be looked at")
        if name == "search":
            return self.search(given.get("text"))
        if name == "heads":
            model = self.recipe.model
            heads = model.attention.heads * model.layers if isinstance(model, TransformerConfig) else 0
            flops = heads * count(model, 1).forward * views.heads.ABLATED_TOKENS
            return self.heads(**given, ablate=flops <= MAX_ABLATED_FLOPS)
        view: Callable[..., views.picture.Picture] = getattr(self, name)
        return view(**given)

    @property
    def _large(self) -> bool:
        return count(self.recipe.model).parameters > MAX_PARAMETERS


@checked
def architecture(source: str, changes: Sequence[str] | Mapping[str, Any] = ()) -> Explain:
    """What can be seen of a preset or a recipe before it is trained, by its name; `changes` as for `train`."""
    return Explain(resolve(source, changes))
