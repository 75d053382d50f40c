"""Gradient on its way down a deep stack: before any training, and of a trained model on a text.

The effect of norms and skip connections shows in untrained stacks. A random direction is put on the output of the top
layer, and ‖∂/∂x_l‖ is read at the input x_l of every layer. Two directions are used, because without skips two things
can go wrong:

- `full` is an arbitrary direction: the full gradient. Without skips and norms it shrinks in every layer. Norms alone
  keep its size, because they divide by the size of their input.
- `token_specific` sums to zero over the tokens of a sequence: it is the part that distinguishes one token from another.
  Attention without skips makes all tokens alike (Dong et al. 2021), so it vanishes whatever the norms do.

A norm after the sum and a norm before it differ in how much of the skip they preserve (Xiong et al. 2020).
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.config import Config
from weft.errors import ConfigError, DataError, ModelError, counted
from weft.explain.capture import capture, taps
from weft.explain.groups import ParameterGroup, parameter_groups
from weft.explain.reading import Reading, predicts_tokens
from weft.explain.texts import TEXTS
from weft.explain.time_gradients import (
    StateGradients,
    TimeGradients,
    state_chart,
    state_gradients,
    state_table,
    time_gradients,
)
from weft.figures.charts import Charts
from weft.figures.formats import table_number
from weft.figures.plot import Axis, Plot, integer_axis, lines
from weft.figures.tables import Table
from weft.models import config
from weft.models.bahdanau import Bahdanau
from weft.models.base import evaluating
from weft.models.elmo import ELMo
from weft.models.ngram import NGram
from weft.models.recurrent import Recurrent
from weft.models.transformer import Transformer
from weft.models.word_table import WordTable
from weft.nn.config import Attention, LayerNorm, Plain, XavierInit
from weft.nn.position_config import Learned

Placement = Literal["pre", "post", "none"]
NAMES: dict[Placement, str] = {"pre": "pre-norm", "post": "post-norm", "none": "no norm"}
BATCH, TIME = 8, 32
NO_GRADIENT = "an n-gram model learns by counting; it has no gradient"
MASK_STRIDE = 7  # an encoder's text has every 7th token masked and predicted


@dataclass(frozen=True)
class GradientFlow:
    """Gradient norms of one stack, from layer 0 to the top, relative to the top."""

    placement: Placement
    residual: bool
    full: tuple[float, ...]
    token_specific: tuple[float, ...]


def gradient_flow(
    placement: Placement, residual: bool, layers: int = 24, *, d_model: int = 64, seed: int = 0
) -> GradientFlow:
    """Build a stack with Xavier weights, as in the 2017 Transformer, and return the gradient between its layers."""
    parts: dict[str, Any] = {"attention": Attention(heads=4), "feedforward": Plain(d_ff=4 * d_model)}
    parts |= {"norm": LayerNorm(), "position": Learned(), "init": XavierInit()}
    parts |= {"placement": placement, "residual": residual}
    settings = config.Decoder(vocab_size=64, context=TIME, layers=layers, d_model=d_model, **parts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(settings)
        tokens = torch.randint(0, settings.vocab_size, (BATCH, TIME))
        direction = torch.randn(BATCH, TIME, d_model)
    assert model.decoder is not None
    states: list[Tensor] = []  # x_0 … x_layers, (batch, time, d_model) each
    for block in model.decoder.blocks:
        block.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    model.decoder.blocks[-1].register_forward_hook(lambda _, inputs, output: states.append(output))
    model.features(tokens)
    norms = []  # ‖∂/∂x_l‖ of the output's component along each direction, relative to the top
    for along in (direction, direction - direction.mean(dim=1, keepdim=True)):
        gradients = torch.autograd.grad(states[-1], states, along, retain_graph=True)
        norms.append(tuple(float(gradient.norm() / along.norm()) for gradient in gradients))
    return GradientFlow(placement, residual, full=norms[0], token_specific=norms[1])


@dataclass(frozen=True)
class GradientFlows(Charts):
    """Gradients of all six combinations of norm placement and skips."""

    layers: int
    d_model: int
    flows: tuple[GradientFlow, ...]

    title = "What skips and norms do to the gradient"
    about = TEXTS["gradient-flows"]

    def charts(self) -> list[Plot]:
        """Return four charts that share one axis."""
        values = [value for flow in self.flows for value in (*flow.full, *flow.token_specific) if value > 0]
        low, high = max(min(values), 1e-24) / 3, max(values) * 10
        y = Axis("‖gradient‖ / the top's", log=True, format="scientific", includes=(low, high))
        layers, charts = integer_axis("layer", self.layers + 1), []
        for part, name in (("full", "full gradient"), ("token_specific", "token-specific part")):
            for residual, skips in ((True, "with skips"), (False, "without skips")):
                norms = {NAMES[flow.placement]: getattr(flow, part) for flow in self.flows if flow.residual == residual}
                drawn = {norm: [value if value >= low else 0.0 for value in each] for norm, each in norms.items()}
                charts.append(lines(f"{name}, {skips}", drawn, range(self.layers + 1), x=layers, y=y))
        return charts

    def tables(self) -> list[Table]:
        layers = self.layers
        depths = sorted({0, layers // 4, layers // 2, 3 * layers // 4, layers})
        rows = []
        for flow in self.flows:
            norms = map(table_number, (flow.full[0], *(flow.token_specific[depth] for depth in depths)))
            rows.append((NAMES[flow.placement], "yes" if flow.residual else "no", *norms))
        header = ("norm", "skips", "full", *(f"layer {depth}" if depth < layers else "top" for depth in depths))
        title = f"Gradient relative to the top's, {counted(layers, 'layer')} of width {self.d_model} at initialisation"
        return [Table(header, rows, title, [TEXTS["gradient-flows-table"]], text=(0, 1))]


def gradient_flows(layers: int = 24, d_model: int = 64, seed: int = 0) -> GradientFlows:
    """Return the gradients of untrained stacks: norm before, after or none, with and without skips."""
    if d_model % 4:
        raise ConfigError(f"d_model = {d_model}: expected a multiple of 4, because the stack has 4 heads")
    stacks = [(placement, residual) for residual in (True, False) for placement in NAMES]
    flows = (gradient_flow(*stack, layers, d_model=d_model, seed=seed) for stack in stacks)
    return GradientFlows(layers, d_model, tuple(flows))


def untrained_gradients(model: Config, clip: float) -> GradientFlows | TimeGradients:
    """Return the gradients before training: by time step of a recurrent model, or else of deep stacks of layers."""
    if isinstance(model, config.NGram):
        raise ModelError(NO_GRADIENT)
    if isinstance(model, config.StaticVectors | config.Bengio):
        raise ModelError("word vectors and Bengio's model have no layers or time steps to show")
    if isinstance(model, config.Bahdanau | config.ELMo):  # its decoder, or each of its directions, is recurrent
        sizes = {"vocab_size": model.vocab_size, "d_model": model.d_model, "layers": model.layers}
        cell = model.cell if isinstance(model, config.Bahdanau) else "lstm"
        model = config.Recurrent(**sizes, cell=cell, init=model.init)
    return time_gradients(model, clip=clip) if isinstance(model, config.Recurrent) else gradient_flows()


@dataclass(frozen=True)
class GradientNorms(Charts):
    """Norms of the gradient of a loss."""

    what: str  # is the loss
    loss: float
    stream: dict[str, float]  # by layer of the residual stream: "decoder.3" is after layer 3
    parameters: dict[ParameterGroup, tuple[float, float]]  # norms of the gradient and of the weights themselves
    clip: float = 0.0  # maximum norm of the gradient in training; 0: none
    states: dict[str, StateGradients] = field(default_factory=dict)  # of a recurrent model, by direction of reading

    title = "Gradient norms"
    about = TEXTS["gradient-norms"]

    def charts(self) -> list[Plot]:
        stacks: dict[str, list[float]] = {}
        for name, value in self.stream.items():
            stacks.setdefault(name.split(".")[0], []).append(value)
        layered = [(group.layer.split(".")[0], group.part, norm) for group, (norm, _) in self.parameters.items()]
        several = len({stack for stack, _, _ in layered if stack}) > 1
        parts: dict[str, list[float]] = {}
        for stack, part, norm in (row for row in layered if row[0]):
            parts.setdefault(f"{stack} {part}" if several else part, []).append(norm)
        through_time = [state_chart(self.named_states("norm"))] if self.states else []
        return [*through_time, *_stream_chart(stacks), _chart("of the parameters", parts, "layer")]

    def tables(self) -> list[Table]:
        parts = list(dict.fromkeys(group.part for group in self.parameters if group.layer))
        rows = []
        for layer in dict.fromkeys([*self.stream, *(group.layer for group in self.parameters if group.layer)]):
            norms = (self.parameters.get(ParameterGroup(layer, part)) for part in parts)
            cells = ["" if pair is None else table_number(pair[0]) for pair in norms]
            stream = [table_number(self.stream[layer]) if layer in self.stream else ""] if self.stream else []
            rows.append((layer, *stream, *cells))
        alone = [(group.part, *norms) for group, norms in self.parameters.items() if not group.layer]
        outside = [(part, table_number(norm), table_number(norm / size) if size else "") for part, norm, size in alone]
        norm = sum(part**2 for part, _ in self.parameters.values()) ** 0.5
        remark = f"The loss is {self.what}: {self.loss:.3f}. The norm of its whole gradient is {table_number(norm)}."
        if 0 < self.clip < norm:
            remark += f" Clipping to {self.clip:g} divides it by {norm / self.clip:.3g}."
        header = ("layer", *(["stream"] if self.stream else []), *parts)
        layered = Table(header, rows, "Norm of the gradient, by layer", [remark])
        through_time = [state_table(self.named_states("norm"))] if self.states else []
        outer = Table(("part", "norm", "/ weights'"), outside, "Norm of the gradient, outside the layers")
        return [*through_time, layered, outer]

    def named_states(self, name: str) -> dict[str, StateGradients]:
        """Return the gradients through time by `name`, and by direction if there are two."""
        alone = len(self.states) == 1
        return {name if alone else f"{name}, {direction}": states for direction, states in self.states.items()}


@dataclass(frozen=True)
class GradientHistory(Charts):
    """Gradients of one model on one text at several stages of its training, by name; the last one in full."""

    stages: dict[str, GradientNorms]

    title = GradientNorms.title
    about = f"{GradientNorms.about} Each line is one stage of training."

    def charts(self) -> list[Plot]:
        parameters = list(self.stages.values())[-1].charts()[-1]
        streams = {name: list(stage.stream.values()) for name, stage in self.stages.items()}
        last = list(self.stages.values())[-1].states
        through_time = [
            state_chart(self._states(direction), f"of the hidden states{f', {direction}' if len(last) > 1 else ''}")
            for direction in last
        ]
        return [*through_time, *_stream_chart(streams), replace(parameters, title=f"{parameters.title}, now")]

    def _states(self, direction: str) -> dict[str, StateGradients]:
        return {name: stage.states[direction] for name, stage in self.stages.items()}

    def tables(self) -> list[Table]:
        stages, last = self.stages.values(), list(self.stages.values())[-1]
        rows = [(layer, *(table_number(stage.stream[layer]) for stage in stages)) for layer in last.stream]
        rows.append(("loss", *(f"{stage.loss:.3f}" for stage in stages)))
        streams = Table(("layer", *self.stages), rows, "Norm of the gradient in the residual stream")
        named = {name: each for key, stage in self.stages.items() for name, each in stage.named_states(key).items()}
        through_time = [state_table(named)] if named else []
        return [*through_time, *([streams] if last.stream else []), *replace(last, states={}).tables()]


def gradient_norms(reading: Reading, *, clip: float = 0.0) -> GradientNorms:
    """Return the norms of the loss's gradient for a model, trained or not; the model is not changed."""
    model, states = reading.model, dict[str, StateGradients]()
    if isinstance(model, NGram):
        raise ModelError(NO_GRADIENT)
    if isinstance(model, WordTable):
        raise ModelError("word vectors are trained word by word, without back-propagation; they have no layers to show")
    residuals = [name for name in taps(model) if name.endswith(".residual")]
    inputs = [f"{stack}.dropout" for stack in ("encoder", "decoder") if f"{stack}.0.residual" in residuals]
    names = [name for stack in ("encoder", "decoder") for name in (*inputs, *residuals) if name.startswith(stack)]
    groups = parameter_groups(model)
    with ExitStack() as contexts:
        for context in (evaluating(model), _unfrozen(model), torch.backends.cudnn.flags(enabled=False)):
            contexts.enter_context(context)  # cuDNN's recurrent kernels have no backward pass in evaluation mode
        if isinstance(model, Recurrent | Bahdanau | ELMo) and len(reading.ids) > 1:
            states["forward"] = state_gradients(model, reading.tokens, **reading.model_kwargs)[0]
        if isinstance(model, ELMo) and len(reading.ids) > 1:
            states["backward"] = state_gradients(model, reading.tokens, backward=True)[0]
        captured = contexts.enter_context(capture(model, *names, grads=True))
        contexts.enter_context(torch.enable_grad())
        loss, what = _loss(reading)
        weights = [weight for group in groups.values() for weight in group]
        gradients = torch.autograd.grad(loss, [*(captured[name] for name in names), *weights], allow_unused=True)
    labels = [name.removesuffix(".residual").replace(".dropout", ".in") for name in names]
    stream = dict(zip(labels, map(_norm, gradients[: len(names)]), strict=True))
    left = iter(gradients[len(names) :])
    parameters = {group: (_total([next(left) for _ in members]), _total(members)) for group, members in groups.items()}
    return GradientNorms(what, float(loss.detach()), stream, parameters=parameters, clip=clip, states=states)


def _loss(reading: Reading) -> tuple[Tensor, str]:
    """Return a loss of the model on the text, and its description."""
    model, tokens = reading.model, reading.tokens
    if not predicts_tokens(model):
        features = model.features(tokens, **reading.model_kwargs)
        random = torch.randn(features.shape, generator=torch.Generator().manual_seed(0)).to(features)
        return (features * random).sum() / random.norm(), "a random direction of the features; no tokens are predicted"
    if isinstance(model.config, config.Encoder):
        mask, chosen = reading.tokenizer.mask_id, torch.zeros_like(tokens, dtype=torch.bool)
        chosen[:, reading.before :: MASK_STRIDE] = True
        out: Any = model(tokens if mask is None else tokens.masked_fill(chosen, mask), **reading.model_kwargs)
        logits = out.words if hasattr(out, "words") else out
        what = f"−log p of every {MASK_STRIDE}th token, {'not masked' if mask is None else 'masked'}, the mean in nats"
        return F.cross_entropy(logits[chosen].float(), tokens[chosen]), what
    if tokens.shape[1] < 2:
        raise DataError("the text has one token; a loss takes at least two: one is read, and one is predicted")
    if isinstance(model, ELMo):
        ahead, back = (model.readout(h).logits()[0].float() for h in model.directions(model.features(tokens)))
        both = F.cross_entropy(ahead[:-1], tokens[0, 1:]), F.cross_entropy(back[1:], tokens[0, :-1])
        return (both[0] + both[1]) / 2, "−log p of each token in both directions, the mean in nats"
    logits = model(tokens[:, :-1], **reading.model_kwargs)
    return F.cross_entropy(logits[0].float(), tokens[0, 1:]), "−log p of each next token, the mean in nats"


@contextmanager
def _unfrozen(model: nn.Module) -> Iterator[None]:
    """Let all weights require gradients, including frozen ones; restored on exit."""
    before = [(weight, weight.requires_grad) for weight in model.parameters()]
    for weight, _ in before:
        weight.requires_grad_(True)
    try:
        yield
    finally:
        for weight, required in before:
            weight.requires_grad_(required)


def _norm(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else float(tensor.detach().float().norm())


def _total(tensors: Sequence[Tensor | None]) -> float:
    return sum(_norm(tensor) ** 2 for tensor in tensors) ** 0.5


def _stream_chart(norms: dict[str, list[float]]) -> list[Plot]:
    return [_chart("of the residual stream", norms, "layers passed")] if any(norms.values()) else []


def _chart(title: str, norms: dict[str, list[float]], label: str) -> Plot:
    layers = max(map(len, norms.values()), default=0)
    return lines(title, norms, range(layers), x=integer_axis(label, layers), y=Axis("norm of the gradient", log=True))
