"""The gradient of a real model on a real text: how large it is in every layer, and for every group of parameters."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.errors import DataError, ModelError
from weft.explain.capture import capture, taps
from weft.explain.groups import Group, grouped
from weft.explain.reading import Reading, predicts_words
from weft.figures.charts import Chart, Charts, grid, legend_below, line
from weft.figures.tables import Table
from weft.models.base import evaluating
from weft.models.config import Encoder
from weft.models.ngram import NGram

MASKED = 7  # of an encoder's text every so many-th token is masked and predicted


@dataclass(frozen=True)
class GradientNorms(Charts):
    """Norms of the gradient of `loss`.

    `stream` by place in the residual stream ("decoder.3": after layer 3); `parameters` by group, with the norm of the
    weights themselves.
    """

    what: str
    loss: float
    stream: dict[str, float]
    parameters: dict[Group, tuple[float, float]]

    title = "Gradient norms"
    about = (
        "How large the gradient of the loss is on its way down: at the residual stream after every layer, and for the"
        " parameters of every layer, on a logarithmic axis. It should arrive at the bottom neither a thousand times"
        " larger nor smaller than at the top."
    )

    def charts(self) -> list[Chart]:
        drawn = [Chart("of the residual stream", self._stream)] if self.stream else []
        return [*drawn, Chart("of the parameters", self._parameters)]

    def tables(self) -> list[Table]:
        """A line a layer."""
        parts = list(dict.fromkeys(group.part for group in self.parameters if group.layer))
        rows = []
        for layer in dict.fromkeys([*self.stream, *(group.layer for group in self.parameters if group.layer)]):
            found = (self.parameters.get(Group(layer, part)) for part in parts)
            cells = ["" if pair is None else f"{pair[0]:.2e}" for pair in found]
            along = [f"{self.stream[layer]:.2e}" if layer in self.stream else ""] if self.stream else []
            rows.append((layer, *along, *cells))
        around = [
            (group.part, f"{norm:.2e}", f"{norm / size:.1e}" if size else "")
            for group, (norm, size) in self.parameters.items()
            if not group.layer
        ]
        remark = f"The loss is {self.what}: {self.loss:.3f}."
        header = ("layer", *(["stream"] if self.stream else []), *parts)
        layered = Table(header, rows, "Norm of the gradient, by layer", [remark])
        return [layered, Table(("around the layers", "norm", "/ weights'"), around, "and around them")]

    def _stream(self, axes: Any) -> None:
        stacks = dict.fromkeys(name.split(".")[0] for name in self.stream)
        for number, stack in enumerate(stacks):
            values = [value for name, value in self.stream.items() if name.split(".")[0] == stack]
            line(axes, range(len(values)), values, number, stack, marker="o", markersize=3)
        _log(axes, "after so many layers")

    def _parameters(self, axes: Any) -> None:
        kinds = dict.fromkeys((group.layer.split(".")[0], group.part) for group in self.parameters if group.layer)
        stacks = {stack for stack, _ in kinds}
        for number, (stack, part) in enumerate(kinds):
            norms = [
                norm for group, (norm, _) in self.parameters.items()
                if group.layer.split(".")[0] == stack and group.part == part
            ]  # fmt: skip
            label = f"{stack} {part}" if len(stacks) > 1 else part
            line(axes, range(len(norms)), norms, number, label, marker="os^vD"[number % 5], markersize=3)
        _log(axes, "layer")


@dataclass(frozen=True)
class GradientHistory(Charts):
    """The gradient of one model on one text at several stages of its training, by name, and in full at the last."""

    stages: dict[str, GradientNorms]

    title = GradientNorms.title
    about = f"{GradientNorms.about} Each line is one stage of training."

    def charts(self) -> list[Chart]:
        """The residual stream at each stage; of the last one the parameters too."""
        last = list(self.stages.values())[-1]
        parameters = last.charts()[-1]
        drawn = [Chart("of the residual stream", self._streams)] if last.stream else []
        return [*drawn, parameters._replace(title=f"{parameters.title}, now")]

    def tables(self) -> list[Table]:
        """The residual stream, a line a layer and a column a stage; then the last stage in full."""
        last = list(self.stages.values())[-1]
        rows = [(layer, *(f"{stage.stream[layer]:.2e}" for stage in self.stages.values())) for layer in last.stream]
        rows.append(("loss", *(f"{stage.loss:.3f}" for stage in self.stages.values())))
        over = Table(("layer", *self.stages), rows, "Norm of the gradient in the residual stream")
        return [*([over] if last.stream else []), *last.tables()]

    def _streams(self, axes: Any) -> None:
        for number, (name, stage) in enumerate(self.stages.items()):
            line(axes, range(len(stage.stream)), list(stage.stream.values()), number, name, marker="o", markersize=3)
        _log(axes, "after so many layers")


def gradient_norms(reading: Reading) -> GradientNorms:
    """The norms of the loss's gradient, of a model as it stands, trained or fresh; nothing in it is changed."""
    model = reading.model
    if isinstance(model, NGram):
        raise ModelError("an n-gram model learns by counting; it has no gradient")
    places = [name for name in taps(model) if name.endswith(".residual")]
    below = [f"{stack}.dropout" for stack in ("encoder", "decoder") if f"{stack}.0.residual" in places]
    names = [name for stack in ("encoder", "decoder") for name in (*below, *places) if name.startswith(stack)]
    groups = grouped(model)
    with evaluating(model), _learning(model), capture(model, *names, grads=True) as seen, torch.enable_grad():
        loss, what = _loss(reading)
        stream = [seen[name] for name in names]
        weights = [weight for group in groups.values() for weight in group]
        found = torch.autograd.grad(loss, [*stream, *weights], allow_unused=True)
    along = dict(zip(map(_place, names), map(_norm, found[: len(stream)]), strict=True))
    rest, parameters = iter(found[len(stream) :]), {}
    for group, members in groups.items():
        parameters[group] = (_all([next(rest) for _ in members]), _all(members))
    return GradientNorms(what, float(loss.detach()), along, parameters)


def _loss(reading: Reading) -> tuple[Tensor, str]:
    """What is derived, and what it is called."""
    model, tokens = reading.model, reading.tokens
    if not predicts_words(model):
        features = model.features(tokens, **reading.given)
        direction = torch.randn(features.shape, generator=torch.Generator().manual_seed(0)).to(features)
        along = (features * direction).sum() / direction.norm()
        return along, "a random direction of the features; no words are predicted"
    if isinstance(model.config, Encoder):
        return _masked_loss(reading)
    if tokens.shape[1] < 2:
        raise DataError(
            "the text has one token; a loss takes at least two: one that is read, and one that is predicted"
        )
    logits = model(tokens[:, :-1], **reading.given)
    return F.cross_entropy(logits[0].float(), tokens[0, 1:]), "−log p of each next token, the mean in nats"


def _masked_loss(reading: Reading) -> tuple[Tensor, str]:
    tokens, mask = reading.tokens, reading.tokenizer.mask_id
    chosen = torch.zeros_like(tokens, dtype=torch.bool)
    chosen[:, reading.before :: MASKED] = True
    read = tokens if mask is None else tokens.masked_fill(chosen, mask)
    out: Any = reading.model(read, **reading.given)
    words = out.words if hasattr(out, "words") else out
    what = f"−log p of every {MASKED}th token, {'masked' if mask is not None else 'not masked'}, the mean in nats"
    return F.cross_entropy(words[chosen].float(), tokens[chosen]), what


@contextmanager
def _learning(model: nn.Module) -> Iterator[None]:
    """All weights with gradients, also those that are frozen; afterwards as they were."""
    before = [(weight, weight.requires_grad) for weight in model.parameters()]
    for weight, _ in before:
        weight.requires_grad_(True)
    try:
        yield
    finally:
        for weight, learned in before:
            weight.requires_grad_(learned)


def _place(name: str) -> str:
    stack, where = name.split(".")[:2]
    return f"{stack}.in" if where == "dropout" else f"{stack}.{where}"


def _norm(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.detach().float().norm())


def _all(tensors: Sequence[Tensor | None]) -> float:
    """The norm of several tensors as one vector."""
    return sum(_norm(tensor) ** 2 for tensor in tensors) ** 0.5


def _log(axes: Any, label: str) -> None:
    axes.set_yscale("log")
    axes.set_xlabel(label, fontsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.minorticks_off()
    grid(axes)
    if len(axes.lines) > 1:
        legend_below(axes)
