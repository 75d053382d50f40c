"""What can be seen of a model: `run.explain` for one that is trained, `weft.architecture("gpt2")` for a preset.

Each view is a picture that shows itself in a notebook and saves itself:

    run.explain.attention("The cat sat on the mat.").save("attention.html")
    weft.architecture("gpt2").anatomy().save("gpt2.pdf")
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch

from weft.costs.count import count
from weft.decode.config import Branching
from weft.decode.prompt import Prompt
from weft.decode.tree import search_trees
from weft.errors import ConfigError, ModelError, RunError, WeftError
from weft.explain.activations import Activations, activations
from weft.explain.anatomy.anatomy import Anatomy, anatomy
from weft.explain.attention import AttentionMaps, attention_maps
from weft.explain.costs import Costs, costs
from weft.explain.gradient_norms import gradient_history, gradient_norms
from weft.explain.gradients import gradient_pictures
from weft.explain.graph.picture import GraphPicture, graph_picture
from weft.explain.growth import Growth, growth
from weft.explain.heads import ABLATED, HeadTable, head_statistics
from weft.explain.hidden import frame_for, longest
from weft.explain.histograms import Histograms, histograms
from weft.explain.lens import Lens, lens
from weft.explain.positions import Positions, positions
from weft.explain.reading import Reading, SourceTokens
from weft.explain.saliency import Saliency, saliency
from weft.explain.schedule import Schedule, schedule_picture
from weft.explain.search import SearchTrees
from weft.explain.surprise import Surprise, surprise
from weft.explain.timing import StepTime, step_time
from weft.explain.views import OF_A_TEXT, VIEWS
from weft.figures.picture import Album, Picture
from weft.models.base import LanguageModel, device_of
from weft.models.build import build
from weft.models.config import Bahdanau as BahdanauConfig
from weft.models.config import EncoderDecoder, NGram, TransformerConfig
from weft.models.transformer import Transformer
from weft.objectives.frame import text_frame
from weft.objectives.rows import RowObjective
from weft.objectives.tokens import TranslationObjective
from weft.recipe.config import Recipe
from weft.recipe.resolve import resolve
from weft.runs import checkpoint
from weft.runs.folder import RunFolder
from weft.training import schedule

if TYPE_CHECKING:
    from weft.api.run import Run

SENTENCE = "The animal didn't cross the street because it was too tired."
SHOWN = 40  # tokens of a text that nobody chose
FRAME = 4  # special tokens around it, at most
GRAPH_TOKENS = 4  # that pass through a graph which no text was given for
LARGE = 30_000_000  # parameters above which a preset isn't built, nor a step taken, just to look at it
ABLATED_FLOPS = 2e12  # of passes with a head taken out: some seconds on two cores


class GraphOptions(TypedDict, total=False):
    """How a graph is shown."""

    shapes: bool
    backward: bool
    open: str | Sequence[str]


@dataclass(frozen=True)
class Explain:
    """The views of a model, one method each; those of a text need a run, which has weights and a tokenizer.

    Where a run's view of a text is given none, it takes one of the run's own.
    """

    recipe: Recipe
    run: "Run | None" = None

    # ---- of the settings

    def anatomy(self) -> Anatomy:
        """The model on one page, block by block: shapes, counts, and the source lines that compute each part."""
        return anatomy(self.recipe.model)

    def costs(self, length: int | None = None) -> Costs:
        """Parameters, operations and bytes by component and layer, for texts of `length` tokens."""
        return costs(self.recipe.model, length)

    def growth(self) -> Growth:
        """How the costs grow with the length, the width, the depth and the vocabulary."""
        return growth(self.recipe.model)

    def activations(self) -> Activations:
        """Activation functions and their slopes."""
        return activations()

    def schedule(self) -> Schedule:
        """The learning rate at each step of the recipe."""
        if isinstance(self.recipe.model, NGram):
            raise ModelError(f"{self.recipe.name}: an n-gram model is counted in one pass; it has no learning rate")
        steps, lr, kind = self.recipe.steps, self.recipe.optimizer.lr, self.recipe.schedule.kind
        if steps is None or (lr is None and kind != "noam"):
            raise ConfigError(
                f"{self.recipe.name}: steps and optimizer.lr are chosen when training starts; give them, such as "
                "steps=1000 optimizer.lr=3e-4, or name a run"
            )
        rate = schedule.build(self.recipe.schedule, lr or 0.0, steps, getattr(self.recipe.model, "d_model", 1))
        return schedule_picture([rate(step) for step in range(1, steps + 1)], f"Learning rate, {kind}")

    def positions(self) -> Positions:
        """The position encoding as stripes and against distance: a run's own, or the one that the settings name."""
        model = self.recipe.model
        if not isinstance(model, TransformerConfig):
            raise ConfigError(f"{self.recipe.name}: a model of kind '{model.kind}' reads in order, without positions")
        own = None if self.run is None else self.run.model
        return positions(own if isinstance(own, Transformer) else model, min(128, model.longest or 128))

    def gradients(self, text: str | None = None, *, target: str | None = None) -> Picture:
        """The gradient's norm by layer: of a run on a text, from its first weights on; else of untrained stacks,
        pre-norm, post-norm, with skips and without (Xiong et al. 2020)."""
        if self.run is None:
            return gradient_pictures()
        reading = self.reading(text, target)
        now = gradient_norms(reading)
        stages = {name: gradient_norms(replace(reading, model=model)) for name, model in self._stages(self.run)}
        return gradient_history({**stages, "best": now}) if stages else now

    def _stages(self, run: "Run") -> Iterator[tuple[str, LanguageModel]]:
        """The model before its first step, and at the other checkpoints that are left, unless it is large or was
        trained elsewhere."""
        folder = RunFolder(run.path)
        if self._large or self.recipe.adapter is not None or folder.origin.is_dir():
            return
        if self.recipe.init is None:
            yield "at first", self._fresh().to(device_of(run.model))
        best = (folder.checkpoints / "best").resolve()
        for path in (path for path in checkpoint.standing(folder.checkpoints) if path.resolve() != best):
            model = build(self.recipe.model)
            with suppress(RunError):  # whoever loads the run has heard of damage
                checkpoint.verify(path)
                checkpoint.load_weights(path, model)
                yield f"step {checkpoint.step_of(path)}", model.to(device_of(run.model))

    # ---- of the model

    @cached_property
    def model(self) -> LanguageModel:
        """The run's model; of a preset one with fresh weights."""
        return self._fresh() if self.run is None else self.run.model

    def _fresh(self) -> LanguageModel:
        """The model as training would begin with it."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.seed)
            return build(self.recipe.model)

    def timing(self, length: int | None = None, *, batch: int = 1) -> StepTime:
        """The time of a real training step beside what its operations and bytes predict."""
        return step_time(self.model, length or min(128, getattr(self.recipe.model, "context", 128)), batch)

    def weights(self, text: str | None = None, *, target: str | None = None) -> Histograms:
        """Histograms of the weights, and with a run of the activations on a text."""
        return histograms(self.model, None if self.run is None else self.reading(text, target))

    def graph(
        self, text: str | None = None, *, target: str | None = None, **shown: Unpack[GraphOptions]
    ) -> GraphPicture:
        """The computation graph, folded by module; of a preset for a few tokens, without any weights.

        `shapes=True` shows those of all tensors, `backward=True` the backward pass with its formulas, and `open` names
        what is shown unfolded, such as "decoder.0".
        """
        if self.run is not None:
            reading = self.reading(self._text(text, GRAPH_TOKENS), target)
            return graph_picture(self.run.model, reading.tokens, **shown, **reading.given)
        with torch.device("meta"):
            model, tokens = build(self.recipe.model), torch.zeros(1, GRAPH_TOKENS, dtype=torch.long)
        both = isinstance(self.recipe.model, EncoderDecoder | BahdanauConfig)
        given: dict[str, Any] = {"source": SourceTokens(tokens)} if both else {}
        return graph_picture(model.eval(), tokens, **shown, **given)

    # ---- of a text

    def attention(self, text: str | None = None, *, target: str | None = None) -> AttentionMaps:
        """Who looks at whom: the probabilities of every head. `.head`, `.follow` and `.rollout` show parts of it."""
        return attention_maps(self.reading(text, target))

    def heads(self, text: str | None = None, *, target: str | None = None, ablate: bool = True) -> HeadTable:
        """What each head does, and with `ablate` what the text costs without it, in nats per token."""
        return head_statistics(self.reading(text, target), ablate)

    def surprise(self, text: str | None = None, *, target: str | None = None, top: int = 5) -> Surprise:
        """The surprisal of each token, and the `top` tokens that were expected."""
        return surprise(self.reading(text, target), top)

    def lens(self, text: str | None = None, *, target: str | None = None) -> Lens:
        """What each layer would predict (the logit lens)."""
        return lens(self.reading(text, target))

    def saliency(self, text: str | None = None, *, target: str | None = None, place: int | None = None) -> Saliency:
        """Which tokens the prediction after `place` depends on, by its gradient; by default the last prediction."""
        reading = self.reading(text, target)
        # a translation's last token is its end, after which nothing is predicted
        last = -1 if reading.source is None or len(reading.ids) < 2 else -2
        return saliency(reading, last if place is None else place)

    def search(self, text: str | None = None, *, settings: Branching | None = None) -> SearchTrees:
        """Greedy search, beam search and samples for a few tokens after a text, as trees."""
        run, text = self._trained("search"), self._text(text)
        prompt, source = Prompt.of(run.tokenizer, text), None
        if isinstance(run.objective, TranslationObjective):
            reading = self.reading(text, "")
            prompt, source = Prompt.of(reading.tokenizer, list(reading.ids)), reading.given["source"]
        return SearchTrees(text, tuple(search_trees(run.model, prompt, settings, source)))

    def reading(self, text: str | None = None, target: str | None = None) -> Reading:
        """A text as the run's model reads it, with what stands around it there.

        An encoder–decoder reads it and writes `target`, or what it writes of its own.
        """
        run, text = self._trained("a text"), self._text(text)
        if isinstance(run.objective, TranslationObjective):
            return self._pair(run.objective, text, target)
        if target:
            raise ConfigError(f"target: {run.path} is {run.config.objective.makes}, which reads one text")
        ids = run.tokenizer.encode(text)
        if run.config.objective.continues:
            before = text_frame(run.config, run.tokenizer).begins
            return Reading(run.model, run.tokenizer, (*before, *ids), len(before))
        if isinstance(run.objective, RowObjective):
            frame = run.objective.frame
            return Reading(run.model, run.tokenizer, (*frame.before, *ids, *frame.after), len(frame.before))
        framed = frame_for(run.model)(run.tokenizer, ids, None)
        return Reading(run.model, run.tokenizer, tuple(framed.ids), framed.before)

    def _pair(self, objective: TranslationObjective[Any], text: str, target: str | None) -> Reading:
        run = self._trained("a text")
        if target is None:
            target = run.translate([text])[0]
        source, own = objective.tokenizers.source, objective.tokenizers.target
        frame, starts, first = objective.direction
        read = (*frame.before, *source.encode(text), *frame.after)
        ids = (starts, *first, *own.encode(target), *((own.need("eos"),) if target else ()))
        return Reading(run.model, own, ids, 1 + len(first), read, source)

    def _text(self, text: str | None, most: int = SHOWN) -> str:
        """The text to look at: where none is given, the first tokens of one that the run held out or has written."""
        run = self._trained("a text")
        if text is not None:
            return text
        rows, samples = (run.results().get(name) or [] for name in ("table", "samples"))
        own = rows[1][0] if len(rows) > 1 else next((each for each in samples if each.strip()), SENTENCE)
        if isinstance(run.objective, TranslationObjective):
            return own
        fits, spans = longest(run.model), run.tokenizer.token_spans(own)
        few = spans[: most if fits is None else min(most, fits - FRAME)]
        return own[: few[-1].end] if few else own

    def _trained(self, what: str) -> "Run":
        if self.run is None:
            raise ConfigError(
                f"{what}: '{self.recipe.name}' has no weights yet; train it, and name its run: weft explain RUN"
            )
        return self.run

    # ---- all of it

    def all(self, text: str | None = None, *, target: str | None = None) -> Album:
        """One page with every view that a model of this kind has."""
        of_a_text: dict[str, Any] = {}
        if self.run is not None:
            text = self._text(text)
            if isinstance(self.run.objective, TranslationObjective) and target is None:
                target = self.run.translate([text])[0]  # once for all views
            self.reading(text, target)  # a text that can't be read has no page
            of_a_text = {"text": text, "target": target}
        pictures = []
        for name in VIEWS:
            with suppress(WeftError):  # it says why this model, or this text, has no such view
                pictures.append(self._view(name, of_a_text if name in OF_A_TEXT else {}))
        kind = f"{self.recipe.model.kind}, {count(self.recipe.model).parameters:,} parameters"
        shown = "; ".join(f"the {name}: {words[:80]}" for name, words in of_a_text.items() if words)
        return Album(self.recipe.name, "; ".join(filter(None, (kind, shown))), tuple(pictures))

    def _view(self, name: str, given: dict[str, Any]) -> Picture:
        """One view of the page; what would keep its reader waiting for minutes is left out."""
        if self._large and (name == "timing" or (name == "weights" and self.run is None)):
            raise ModelError("too large to be built just to be looked at")
        if name == "search":
            return self.search(given.get("text"))
        if name == "heads":
            return self.heads(**given, ablate=self._can_ablate())
        view: Callable[..., Picture] = getattr(self, name)
        return view(**given)

    @property
    def _large(self) -> bool:
        return count(self.recipe.model).parameters > LARGE

    def _can_ablate(self) -> bool:
        """Whether taking out each head in turn takes seconds."""
        model = self.recipe.model
        heads = model.attention.heads * model.layers if isinstance(model, TransformerConfig) else 0
        return heads * count(model, 1).forward * ABLATED <= ABLATED_FLOPS


def architecture(source: str, changes: Sequence[str] | Mapping[str, Any] = ()) -> Explain:
    """What can be seen of a preset or a recipe before it is trained, by its name; `changes` as for `train`."""
    return Explain(resolve(source, changes))
