"""The linear layers of a Transformer, by name: what counts, layouts, adapters and Muon have in common.

A weight that several matrices are stacked in, such as the one for queries, keys and values, is one linear layer.
"""

from dataclasses import dataclass, replace

from weft.config import Config
from weft.errors import ModelError
from weft.models import config
from weft.nn.config import Experts, Gated, LoRA, NoFeedForward, Plain


def stacks(model: config.TransformerConfig) -> list[tuple[int, bool, bool]]:
    """Return (layers, causal, has cross-attention) of each stack."""
    if isinstance(model, config.EncoderDecoder):
        return [(model.encoder_layers or model.layers, False, False), (model.layers, True, True)]
    return [(model.layers, not isinstance(model, config.Encoder), False)]


@dataclass(frozen=True)
class LinearSpec:
    """Linear layer of a block: its inputs, and the heights of the matrices stacked in its weight. There is one in each
    of several `experts`, `chosen` of which read a token."""

    name: str
    inputs: int
    heights: tuple[int, ...]
    bias: bool
    experts: int = 1
    chosen: int = 1

    @property
    def products(self) -> int:
        """Number of weights that each token is multiplied by."""
        return self.chosen * self.inputs * sum(self.heights)

    @property
    def parameters(self) -> int:
        """Number of weights and biases."""
        return self.experts * (self.inputs + int(self.bias)) * sum(self.heights)

    @property
    def idle(self) -> int:
        """Number of weights and biases of the experts that do not read a token."""
        return self.parameters * (self.experts - self.chosen) // self.experts

    @property
    def is_router(self) -> bool:
        """Whether this is a router, which neither adapters nor Muon apply to."""
        return self.name.endswith(".router")

    @property
    def component(self) -> str:
        """The component of the model that it is counted in."""
        if self.is_router:
            return "router"
        if ".experts." in self.name:
            return "experts"
        return "FFN" if self.name.startswith("feedforward") else "MHA projections"

    @property
    def by_rows(self) -> bool:
        """Whether tensor parallelism splits its inputs: the last layer of a sublayer (Shoeybi et al. 2019)."""
        return self.name.endswith((".out", ".down"))

    def adapter(self, rank: int) -> int:
        """Return the parameters of its low-rank adapter, each of which is multiplied once per token."""
        return rank * (len(self.heights) * self.inputs + sum(self.heights))


def layer_shares(model: config.TransformerConfig, depth: int) -> list[tuple[int, float]]:
    """Return a layer of each kind of feed-forward layer in a stack, and the share of the layers that are of its kind:
    one layer, unless some layers beside mixtures of experts are dense."""
    kinds = [isinstance(model.feedforward_at(layer), Experts) for layer in range(depth)]
    return [(kinds.index(kind), kinds.count(kind) / depth) for kind in sorted(set(kinds))]


def block_linears(model: config.TransformerConfig, cross: bool = False, *, layer: int = 0) -> list[LinearSpec]:
    """Return the linear layers of a block, by their names inside it; `cross` adds cross-attention."""
    D, attention = model.d_model, model.attention
    H, G = attention.heads * model.d_head, attention.groups * model.d_head
    mixed, values = attention.heads * model.d_v, attention.groups * model.d_v
    qkv_bias, out_bias = attention.biased
    linears = [LinearSpec("attention.qkv", D, (H, G, values), bias=qkv_bias)]
    if (latent := attention.latent) is not None:
        queries = latent.query_rank or 0
        linears = [LinearSpec("attention.q_down", D, (queries,), bias=qkv_bias)] if queries else []
        linears.append(LinearSpec("attention.q_up", queries or D, (H,), bias=False))
        linears.append(LinearSpec("attention.kv_down", D, (latent.rank, model.rotated), bias=qkv_bias))
        expanded = H - attention.heads * model.rotated + mixed
        linears.append(LinearSpec("attention.kv_up", latent.rank, (expanded,), bias=False))
    if attention.global_tokens is not None and not cross:
        linears.append(LinearSpec("attention.global_qkv", D, (H, G, values), bias=qkv_bias))
    linears.append(LinearSpec("attention.out", mixed, (D,), bias=out_bias))
    if cross:
        linears.append(LinearSpec("cross.q", D, (H,), bias=qkv_bias))
        linears.append(LinearSpec("cross.kv", D, (G, values), bias=qkv_bias))
        linears.append(LinearSpec("cross.out", mixed, (D,), bias=out_bias))
    return linears + _feedforward_linears(model.feedforward_at(layer), D)


def _feedforward_linears(inner: Plain | Gated | Experts | NoFeedForward, D: int) -> list[LinearSpec]:
    d_ff = inner.d_ff
    if isinstance(inner, NoFeedForward):
        return []
    if not isinstance(inner, Experts):
        gated = isinstance(inner, Gated)
        name, heights = ("feedforward.gate_up", (d_ff, d_ff)) if gated else ("feedforward.up", (d_ff,))
        first = LinearSpec(name, D, heights, bias=inner.bias)
        return [first, LinearSpec("feedforward.down", d_ff, (D,), bias=inner.bias)]
    sizes, name = {"experts": inner.experts, "chosen": inner.chosen}, "feedforward.experts"
    linears = [
        LinearSpec("feedforward.router", D, (inner.experts,), bias=inner.router_bias),
        LinearSpec(f"{name}.gate_up", D, (d_ff, d_ff), bias=inner.bias, **sizes),
        LinearSpec(f"{name}.down", d_ff, (D,), bias=inner.bias, **sizes),
    ]
    if width := inner.shared_width:
        linears.append(LinearSpec("feedforward.shared.gate_up", D, (width, width), bias=False))
        linears.append(LinearSpec("feedforward.shared.down", width, (D,), bias=False))
    return linears + ([LinearSpec("feedforward.shared_gate", D, (1,), bias=False)] if inner.shared == "gated" else [])


def layers_linears(model: config.TransformerConfig) -> list[list[LinearSpec]]:
    """Return the linear layers of each layer, encoder first, by name in the built model; shared layers share names."""
    return [
        [replace(spec, name=f"{'decoder' if causal else 'encoder'}.blocks.{block}.{spec.name}") for spec in linears]
        for depth, causal, cross in stacks(model)
        for block in (layer // model.sharing for layer in range(depth))
        for linears in [block_linears(model, cross, layer=block * model.sharing)]
    ]


def adapted_linears(model: Config, adapter: LoRA) -> list[LinearSpec]:
    """Return the linear layers that an adapter adds to."""
    if not isinstance(model, config.TransformerConfig):
        raise ModelError(f"adapter: it needs a model made of Transformer blocks, not a {type(model).__name__}")
    every = [linear for block in layers_linears(model) for linear in block]
    linears = {linear.name: linear for linear in every if linear.component not in ("router", "experts")}
    return [linears[name] for name in adapter.match_targets(linears)]
