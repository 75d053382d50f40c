"""The gradient on its way down a deep stack: before any training, and of a real model on a real text.

What norms and skip connections do to it shows in untrained stacks. A random direction is put on the output of the top
layer, and ‖∂/∂x_l‖ is read at the input x_l of every layer. There are two such directions, because without skips two
things can go wrong:

- `full` is any direction: the full gradient. Without skips and without norms it shrinks in every layer. Norms alone
  keep its size, for they divide by the size of what they are given.
- `token_specific` sums to zero over the tokens of a sequence: it is the part that distinguishes one token from another.
  Attention without skips makes all tokens alike (Dong et al. 2021), so this vanishes whatever the norms do.

A norm after the sum and a norm before it differ in what they leave of the skip (Xiong et al. 2020).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.errors import ConfigError, DataError, ModelError, counted
from weft.explain.capture import capture, taps
from weft.explain.groups import Group, grouped
from weft.explain.reading import Reading, predicts_words
from weft.explain.texts import TEXTS
from weft.figures.charts import Charts
from weft.figures.plot import Axis, Plot, lines, plain, scientific, whole_numbers
from weft.figures.tables import Table
from weft.models.base import evaluating
from weft.models.config import Decoder, Encoder
from weft.models.ngram import NGram
from weft.models.transformer import Transformer
from weft.nn.config import Attention, LayerNorm, Plain, XavierInit
from weft.nn.position_config import Learned

Placement = Literal["pre", "post", "none"]
NAMES: dict[Placement, str] = {"pre": "pre-norm", "post": "post-norm", "none": "no norm"}
BATCH, TIME = 8, 32
MASKED = 7  # of an encoder's text every so many-th token is masked and predicted


@dataclass(frozen=True)
class GradientFlow:
    """One stack: where its norms stand, whether it has skips, and the gradient from layer 0 to the top, which is 1."""

    placement: Placement
    residual: bool
    full: tuple[float, ...]
    token_specific: tuple[float, ...]


def gradient_flow(
    placement: Placement, residual: bool, layers: int = 24, d_model: int = 64, seed: int = 0
) -> GradientFlow:
    """Build a stack with Xavier weights, as the 2017 Transformer has them, and read the gradient between its layers."""
    inside = {"attention": Attention(heads=4), "feedforward": Plain(d_ff=4 * d_model), "norm": LayerNorm()}
    around = {"placement": placement, "residual": residual, "position": Learned(), "init": XavierInit()}
    sizes = {"vocab_size": 64, "context": TIME, "layers": layers, "d_model": d_model}
    settings = Decoder(**sizes, **inside, **around)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(settings)
        words = torch.randint(0, settings.vocab_size, (BATCH, TIME))
        direction = torch.randn(BATCH, TIME, d_model)
    assert model.decoder is not None
    states: list[Tensor] = []  # x_0 … x_layers, (batch, time, d_model) each
    for block in model.decoder.blocks:
        block.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    model.decoder.blocks[-1].register_forward_hook(lambda _, inputs, output: states.append(output))
    model.features(words)
    between_tokens = direction - direction.mean(dim=1, keepdim=True)
    return GradientFlow(placement, residual, _norms(states, direction), _norms(states, between_tokens))


def _norms(states: list[Tensor], direction: Tensor) -> tuple[float, ...]:
    """‖∂/∂x_l‖ of the output's part along `direction`, for every l, against the top's."""
    gradients = torch.autograd.grad(states[-1], states, direction, retain_graph=True)
    return tuple(float(gradient.norm() / direction.norm()) for gradient in gradients)


@dataclass(frozen=True)
class GradientFlows(Charts):
    """What norms and skips do to the gradient: all six kinds of stack."""

    layers: int
    d_model: int
    flows: tuple[GradientFlow, ...]

    title = "What skips and norms do to the gradient"
    about = TEXTS["gradient-flows"]

    def charts(self) -> list[Plot]:
        return [
            self._chart(f"{what}, {'with' if residual else 'without'} skips", part, residual)
            for part, what in (("full", "full gradient"), ("token_specific", "token-specific part"))
            for residual in (True, False)
        ]

    def tables(self) -> list[Table]:
        layers = self.layers
        depths = sorted({0, layers // 4, layers // 2, 3 * layers // 4, layers})
        rows = []
        for found in self.flows:
            norms = map(plain, (found.full[0], *(found.token_specific[depth] for depth in depths)))
            rows.append((NAMES[found.placement], "yes" if found.residual else "no", *norms))
        header = ("norm", "skips", "full", *(f"layer {depth}" if depth < layers else "top" for depth in depths))
        title = f"Gradient relative to the top's, {counted(layers, 'layer')} of width {self.d_model} at initialisation"
        return [Table(header, rows, title, [TEXTS["gradient-flows-table"]], text=(0, 1))]

    def _chart(self, title: str, part: str, residual: bool) -> Plot:
        norms = {NAMES[flow.placement]: getattr(flow, part) for flow in self.flows if flow.residual == residual}
        # the same axis for all four, so that they can be compared
        values = [value for flow in self.flows for value in (*flow.full, *flow.token_specific) if value > 0]
        low, high = max(min(values), 1e-24) / 3, max(values) * 10
        drawn = {name: [value if value >= low else 0.0 for value in each] for name, each in norms.items()}
        y = Axis("‖gradient‖ / the top's", log=True, named=scientific, holds=(low, high))
        return lines(title, drawn, range(self.layers + 1), whole_numbers("layer", self.layers + 1), y)


def gradient_flows(layers: int = 24, d_model: int = 64, seed: int = 0) -> GradientFlows:
    """The gradient by layer of untrained stacks: norm before, after or not at all, with skips and without."""
    if d_model % 4:
        raise ConfigError(f"d_model = {d_model}: expected a multiple of 4, because the stack has 4 heads")
    kinds = [(placement, residual) for residual in (True, False) for placement in NAMES]
    return GradientFlows(layers, d_model, tuple(gradient_flow(*kind, layers, d_model, seed) for kind in kinds))


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
    about = TEXTS["gradient-norms"]

    def charts(self) -> list[Plot]:
        stacks: dict[str, list[float]] = {}
        for name, value in self.stream.items():
            stacks.setdefault(name.split(".")[0], []).append(value)
        several = len({group.layer.split(".")[0] for group in self.parameters if group.layer}) > 1
        parts: dict[str, list[float]] = {}
        for group, (norm, _) in self.parameters.items():
            if group.layer:
                name = f"{group.layer.split('.')[0]} {group.part}" if several else group.part
                parts.setdefault(name, []).append(norm)
        return [*_stream_chart(stacks), _chart("of the parameters", parts, "layer")]

    def tables(self) -> list[Table]:
        parts = list(dict.fromkeys(group.part for group in self.parameters if group.layer))
        rows = []
        for layer in dict.fromkeys([*self.stream, *(group.layer for group in self.parameters if group.layer)]):
            found = (self.parameters.get(Group(layer, part)) for part in parts)
            cells = ["" if pair is None else plain(pair[0]) for pair in found]
            along = [plain(self.stream[layer]) if layer in self.stream else ""] if self.stream else []
            rows.append((layer, *along, *cells))
        around = [
            (group.part, plain(norm), plain(norm / size) if size else "")
            for group, (norm, size) in self.parameters.items()
            if not group.layer
        ]
        remark = f"The loss is {self.what}: {self.loss:.3f}."
        header = ("layer", *(["stream"] if self.stream else []), *parts)
        layered = Table(header, rows, "Norm of the gradient, by layer", [remark])
        return [layered, Table(("part", "norm", "/ weights'"), around, "Norm of the gradient, around the layers")]


@dataclass(frozen=True)
class GradientHistory(Charts):
    """The gradient of one model on one text at several stages of its training, by name, and in full at the last."""

    stages: dict[str, GradientNorms]

    title = GradientNorms.title
    about = f"{GradientNorms.about} Each line is one stage of training."

    def charts(self) -> list[Plot]:
        parameters = list(self.stages.values())[-1].charts()[-1]
        streams = {name: list(stage.stream.values()) for name, stage in self.stages.items()}
        return [*_stream_chart(streams), replace(parameters, title=f"{parameters.title}, now")]

    def tables(self) -> list[Table]:
        last = list(self.stages.values())[-1]
        rows = [(layer, *(plain(stage.stream[layer]) for stage in self.stages.values())) for layer in last.stream]
        rows.append(("loss", *(f"{stage.loss:.3f}" for stage in self.stages.values())))
        over = Table(("layer", *self.stages), rows, "Norm of the gradient in the residual stream")
        return [*([over] if last.stream else []), *last.tables()]


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
    shown = [name.removesuffix(".residual").replace(".dropout", ".in") for name in names]
    along = dict(zip(shown, map(_norm, found[: len(stream)]), strict=True))
    rest = iter(found[len(stream) :])
    parameters = {group: (_all([next(rest) for _ in each]), _all(each)) for group, each in groups.items()}
    return GradientNorms(what, float(loss.detach()), along, parameters)


def _loss(reading: Reading) -> tuple[Tensor, str]:
    model, tokens = reading.model, reading.tokens
    if not predicts_words(model):
        features = model.features(tokens, **reading.given)
        random = torch.randn(features.shape, generator=torch.Generator().manual_seed(0)).to(features)
        return (features * random).sum() / random.norm(), "a random direction of the features; no words are predicted"
    if isinstance(model.config, Encoder):
        return _masked_loss(reading)
    if tokens.shape[1] < 2:
        raise DataError("the text has one token; a loss takes at least two: one is read, and one is predicted")
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


def _norm(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.detach().float().norm())


def _all(tensors: Sequence[Tensor | None]) -> float:
    return sum(_norm(tensor) ** 2 for tensor in tensors) ** 0.5


def _stream_chart(norms: dict[str, list[float]]) -> list[Plot]:
    return [_chart("of the residual stream", norms, "after so many layers")] if any(norms.values()) else []


def _chart(title: str, norms: dict[str, list[float]], label: str) -> Plot:
    layers = max(map(len, norms.values()), default=0)
    return lines(title, norms, range(layers), whole_numbers(label, layers), Axis("norm of the gradient", log=True))
