"""Count a model's parameters and FLOPs, per component, from its config alone.

The conventions are those of the lectures and of PaLM (Chowdhery et al. 2022, appendix B):

- A product of an m × k matrix with a k × n matrix is 2mkn FLOPs: a multiplication and an addition each.
- Only matrix products count. Norms, activations, softmax, biases and look-ups are well below 1 % and left out.
- Attention counts every query against all T keys, 2 · T · heads · (d_head + d_v) per token and layer, even under a
  causal mask, which needs only half of it; a `window` smaller than T bounds the keys.
- The backward pass costs twice the forward pass, so training is three forward passes. With activation checkpointing the
  layers run forward once more. A frozen matrix needs no weight gradient, so its backward pass costs one forward pass;
  that the lowest layers of a frozen model need no gradient at all is ignored.
- A sequence-to-sequence model is counted for a source as long as its target, and per target token.
- Logits are counted at every position, even if an objective uses only some of them (masked words).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.config import Config
from weft.costs.linears import LinearSpec, adapted_linears, block_linears, layer_shares, layers_linears, stacks
from weft.errors import ModelError
from weft.models import config, head_config
from weft.nn.config import LayerNorm, LoRA, NoFeedForward, Norm

GATES = {"elman": 1, "lstm": 4, "gru": 3}  # gates of a recurrent cell, the candidate state included
STATE_VECTORS = {"elman": 1, "lstm": 2, "gru": 1}  # vectors of d_model that a cell carries from token to token
PER_TARGET_TOKEN = "FLOPs are per target token, with a source as long as the target"


@dataclass(frozen=True)
class Component:
    """Component of a model: its parameters, and the FLOPs of one forward pass over a sequence."""

    name: str
    parameters: int
    flops: int
    in_layers: bool = False
    trained: bool = True
    backward: int = 2  # cost of its backward pass, in forward passes
    looked_up: int = 0  # parameters that are only looked up, never multiplied
    idle: int = 0  # parameters of the experts that do not read a token


@dataclass(frozen=True)
class Count:
    """Cost of a model for sequences of `length` tokens."""

    components: tuple[Component, ...]
    length: int
    note: str = ""

    @property
    def parameters(self) -> int:
        """Number of parameters; tied weights count once."""
        return sum(part.parameters for part in self.components)

    @property
    def trainable(self) -> int:
        """Number of trainable parameters: all, unless there is an adapter."""
        return sum(part.parameters for part in self.components if part.trained)

    @property
    def active(self) -> int:
        """Number of parameters that a token is computed with: all but those of the experts that it does not choose."""
        return self.parameters - sum(part.idle for part in self.components)

    @property
    def multiplied(self) -> int:
        """Number of parameters that products read, including embeddings, which most models share with the LM head."""
        return self.parameters - sum(part.looked_up for part in self.components)

    @property
    def forward(self) -> float:
        """FLOPs per token of the forward pass."""
        return sum(part.flops for part in self.components) / self.length

    def training(self, recompute: bool = False) -> float:
        """Return the FLOPs per token of forward and backward pass; with `recompute` the layers run forward twice."""
        return sum(self._passes(part, recompute) * part.flops for part in self.components) / self.length

    def share(self, part: Component, recompute: bool = False) -> float:
        """Return a component's share of the FLOPs of training."""
        total = self.training(recompute)
        return self._passes(part, recompute) * part.flops / self.length / total if total else 0.0

    def _passes(self, part: Component, recompute: bool) -> int:
        return 1 + part.backward + (1 if recompute and part.in_layers else 0)


def count(model: Config, length: int | None = None, adapter: LoRA | None = None) -> Count:
    """Return a model's cost for sequences of `length` tokens (default: its context); an `adapter` freezes the rest."""
    if adapter is not None:
        return _adapted(model, count(model, length), adapter)
    max_length = getattr(model, "longest", None)
    if length is not None and max_length is not None and length > max_length:
        raise ModelError(f"length {length}: the model's positions end at model.context = {max_length}")
    time: int = length if length else getattr(model, "context", 1)
    match model:
        case config.TransformerConfig():
            return _transformer(model, time)
        case config.Bengio():
            return _bengio(model, time)
        case config.Recurrent():
            return _recurrent(model, time)
        case config.ELMo():
            return _elmo(model, time)
        case config.Bahdanau():
            return _bahdanau(model, time)
        case config.NGram():
            note = f"counts instead of weights: the text decides how many; a token takes up to {model.order} look-ups"
            return Count((Component("counts", 0, 0),), time, note)
        case config.StaticVectors():
            size = model.vocab_size * model.d_model
            note = "one vector per word, looked up: no products"
            return Count((Component("embedding", size, 0, looked_up=size),), time, note)
        case _:
            raise ModelError(f"a {type(model).__name__} cannot be counted: it is not a model")


def decoding_weights(model: Config, vocab_size: int) -> dict[str, int]:
    """Estimate the weights that multiply each token that a model writes, in its "layers" and for its "logits".

    Learning rates and batches are chosen by their sum. Norms, biases and the encoder of a source are left out; every
    layer counts as one with equal input and output width.
    """
    match model:
        case config.TransformerConfig():
            per_layer = sum(
                share * linear.products
                for layer, share in layer_shares(model, model.layers)
                for linear in block_linears(model, layer=layer)
            )
        case config.Recurrent() | config.Bahdanau():
            per_layer = _cells(model.cell, [model.d_model], model.d_model)[1]
        case config.Bengio():
            direct = vocab_size * model.d_input if model.direct else 0
            return {"layers": model.d_input * model.d_model + direct, "logits": vocab_size * model.d_model}
        case config.ELMo():
            return {"layers": 2 * model.layers * _elmo_cell(model)[1], "logits": 2 * vocab_size * model.d_model}
        case _:
            return {}
    return {"layers": round(model.layers * per_layer), "logits": vocab_size * getattr(model, "width", model.d_model)}


def _biased(inputs: int, outputs: int) -> int:
    """Return the parameters of a linear layer with biases."""
    return (inputs + 1) * outputs


def _norm(norm: Norm, width: int) -> int:
    return (norm.gain + norm.bias) * width if isinstance(norm, LayerNorm) else width


def _transformer(model: config.TransformerConfig, T: int) -> Count:
    D, E, d_head, attention = model.d_model, model.width, model.d_head, model.attention
    embeddings, projection = model.vocab_size * E, E * D if model.factorised else 0
    if isinstance(model, config.EncoderDecoder):
        embeddings += (model.source_vocab_size or 0) * E
    elif isinstance(model, config.Decoder | config.Encoder):
        embeddings += model.segments * E
    hashed = up = 0
    if isinstance(model, config.Decoder) and (ngrams := model.ngrams) is not None:
        hashed, up = len(ngrams.orders) * ngrams.rows * (ngrams.width or E), (ngrams.width or 0) * E

    linears: list[LinearSpec] = []
    positions = by_position = norms = pairs = activations = sinks = 0
    for depth, causal, cross in stacks(model):
        linears += [linear for layer in range(depth) for linear in block_linears(model, cross, layer=layer)]
        activations += 2 * (depth // model.sharing) if model.feedforward.activation == "xielu" else 0
        attentions = depth * (2 if cross else 1)
        kinds = model.layer_kinds(depth, causal)
        pairs += sum(T * seen(kind.reach, causal, T) for kind in kinds) + (depth * T * T if cross else 0)
        pairs += depth * T * T if attention.global_tokens and not causal else 0  # global tokens see all
        norms += (depth // model.sharing * sublayer_norms(model, cross) + int(model.last_norm)) * _norm(model.norm, D)
        norms += _norm(model.norm, model.added_width) if model.embedding_norm else 0
        norms -= 0 if model.first_norm else _norm(model.norm, D)
        if attention.qk_norm is not None:
            shared = attention.qk_norm_over == "head"
            widths = [d_head * (1 if shared else heads) for heads in (attention.heads, attention.groups)]
            norms += attentions // model.sharing * sum(_norm(attention.qk_norm, width) for width in widths)
        if attention.latent is not None:
            norms += depth * (attention.latent.rank + (attention.latent.query_rank or 0))
        sinks += depth * attention.heads if attention.sinks else 0
        sizes = model.sizes(depth, causal)
        positions += model.position.parameters(replace(sizes, layers=depth // model.sharing))
        for kind in kinds:
            position = kind.position or model.position
            by_position += position.flops(replace(sizes, layers=1), T, seen(kind.reach, causal, T))

    def products(name: str) -> Component:
        members = [linear for linear in linears if linear.component == name]
        parameters = sum(linear.parameters for linear in members) // model.sharing
        idle = sum(linear.idle for linear in members) // model.sharing
        return Component(name, parameters, 2 * T * sum(linear.products for linear in members), True, idle=idle)

    parts = [
        Component("embeddings", embeddings, 0),
        Component("n-grams", hashed + up, 2 * T * up, looked_up=hashed),
        Component("positions", positions, 0),
        Component("projection", projection and projection + isinstance(model, config.Encoder) * D, 2 * T * projection),
        products("MHA projections"),
        Component("attention", 0, 2 * pairs * attention.heads * (d_head + model.d_v) + by_position, True),
        Component("sinks", sinks, 0),
        products("FFN"),
        products("router"),
        products("experts"),
        Component("activations", activations, 0),
        Component("norms", norms, 0),
        *_head(model, T),
    ]
    note = PER_TARGET_TOKEN if isinstance(model, config.EncoderDecoder) else ""
    return Count(tuple(part for part in parts if part.parameters or part.flops), T, note)


def seen(window: int | None, causal: bool, T: int) -> int:
    """Return the number of keys, out of T, that a query is compared with."""
    return min(T, (window or T) if causal else 2 * (window or T) - 1)


def sublayer_norms(model: config.TransformerConfig, cross: bool) -> int:
    """Return the number of norms around the sublayers of a block, with or without cross-attention."""
    per_sublayer = model.norms if isinstance(model.feedforward, NoFeedForward) else model.norms // 2
    return model.norms + (per_sublayer if cross else 0)


def _head(model: config.TransformerConfig, T: int) -> list[Component]:
    D, E, V, head = model.d_model, model.width, model.vocab_size, model.head  # type: ignore[attr-defined]
    pooler, sentence = (D, D, 1), (D, 2, 1)

    def with_norm(width: int, bias: bool) -> int:
        """Return the parameters of a norm after a linear layer, less the layer's bias if it has none."""
        return _norm(model.norm, width) - (0 if bias else width)

    match head:
        case head_config.LMHead() | head_config.MaskedLMHead() | head_config.PretrainingHead():
            logits = Component("logits", (0 if head.tied else V * E) + (V if head.bias else 0), 2 * T * E * V)
            if isinstance(head, head_config.LMHead):
                back = [Component("head", D * E, 2 * T * D * E)] if model.projects_output else []
                transform = head.transform and _dense([(D, D, T)], with_norm(D, head.transform.bias))
                return [*([transform] if transform else []), *back, logits]
            extra = [pooler, sentence] if isinstance(head, head_config.PretrainingHead) else []
            if not head.dense:
                return [*([_dense(extra)] if extra else []), logits]
            return [_dense([(D, E, T), *extra], with_norm(E, head.dense_bias)), logits]
        case head_config.NextSentenceHead():
            return [_dense([pooler, sentence])]
        case head_config.ClassificationHead():
            layers = [*([pooler] if head.pooler else []), (D, head.labels, 1)]
            unbiased = 0 if head.bias else -head.labels
        case head_config.TaggingHead() | head_config.SpanHead():
            layers, unbiased = [(D, head.labels if isinstance(head, head_config.TaggingHead) else 2, T)], 0
        case head_config.ReplacedHead():
            return [_dense([(D, D, T), (D, 1, T)])]
        case _:
            return []
    if head.transform is None:
        return [_dense(layers, unbiased)]
    return [_dense([(D, D, layers[-1][2]), *layers], unbiased + with_norm(D, head.transform.bias))]


def _dense(layers: Sequence[tuple[int, int, int]], extra: int = 0) -> Component:
    """Return a head of linear layers with biases, each (inputs, outputs, positions), and `extra` parameters."""
    parameters = sum(_biased(inputs, outputs) for inputs, outputs, _ in layers) + extra
    return Component("head", parameters, sum(2 * inputs * outputs * positions for inputs, outputs, positions in layers))


def orthogonal_flops(model: Config, rounds: int, adapter: LoRA | None = None) -> float:
    """Return the FLOPs of Muon's update: `rounds` times x xᵀ, its square and that times x, per matrix of a block."""
    if adapter is not None:
        sides = [(linear.inputs, height) for linear in adapted_linears(model, adapter) for height in linear.heights]
        shapes = [shape for width, height in sides for shape in ((adapter.rank, width), (height, adapter.rank))]
    elif isinstance(model, config.TransformerConfig):
        linears = {linear.name: linear for layer in layers_linears(model) for linear in layer}
        shapes = [
            (height, linear.inputs)
            for linear in linears.values()
            for height in (() if linear.is_router else linear.heights * linear.experts)
        ]
    else:
        return 0.0
    # other optimizers have 0 rounds: elementwise operations are not counted
    return float(sum(rounds * (4 * min(shape) ** 2 * max(shape) + 2 * min(shape) ** 3) for shape in shapes))


def _adapted(model: Config, cost: Count, adapter: LoRA) -> Count:
    """Return the cost of a frozen model with an adapter, and with a trained head if the adapter has one."""
    parameters = sum(linear.adapter(adapter.rank) for linear in adapted_linears(model, adapter))
    sharing: int = getattr(model, "sharing", 1)
    parts = []
    for part in cost.components:
        trained = adapter.head and part.name in ("head", "logits")
        # both factors of the attention scores need a gradient
        parts.append(replace(part, trained=trained, backward=2 if trained or part.name == "attention" else 1))
    added = Component("adapter", parameters, sharing * 2 * cost.length * parameters, in_layers=True)
    return replace(cost, components=(*parts, added))


def _cells(cell: str, inputs: list[int], D: int) -> tuple[int, int]:
    """Return the parameters of a stack of layers with these input widths, and the multiplied weights among them."""
    products = sum(GATES[cell] * D * (width + D) for width in inputs)
    return products + len(inputs) * 2 * GATES[cell] * D, products  # PyTorch has two biases per gate


def _bengio(model: config.Bengio, T: int) -> Count:
    D, V, X = model.d_model, model.vocab_size, model.d_input
    embeddings = V * X // (model.order - 1)
    parts = [Component("embeddings", embeddings, 0), Component("hidden", _biased(X, D), 2 * T * X * D, True)]
    parts += [Component("direct", X * V, 2 * T * X * V)] if model.direct else []
    return Count((*parts, Component("logits", _biased(D, V), 2 * T * D * V)), T)


def _recurrent(model: config.Recurrent, T: int) -> Count:
    D, V = model.d_model, model.vocab_size
    d_embedding, deeper = model.d_embedding or D, model.layers - 1
    *below, last = [d_embedding] + deeper * [D]
    layers = _cells(model.cell, below, D), _cells(model.cell, [last], model.width)
    parameters, products = (sum(sizes) for sizes in zip(*layers, strict=True))
    cell = Component("cell", parameters, 2 * T * products, True)
    logits = Component("logits", (0 if model.tied else V * model.width) + V, 2 * T * model.width * V)
    return Count((Component("embeddings", V * d_embedding, 0), cell, logits), T)


def _elmo(model: config.ELMo, T: int) -> Count:
    D, V = model.d_model, model.vocab_size
    parameters, products = (2 * model.layers * size for size in _elmo_cell(model))
    cells, logits = (
        Component("cells", parameters, 2 * T * products, True),
        Component("logits", V * D + V, 4 * T * D * V),
    )
    return Count((Component("embeddings", V * D, 0), cells, logits), T, "both directions; logits once in each")


def _elmo_cell(model: config.ELMo) -> tuple[int, int]:
    """Return the parameters of a layer in one direction, and the multiplied weights among them."""
    D, C = model.d_model, model.d_cell or model.d_model
    products = GATES["lstm"] * C * 2 * D + (C * D if model.d_cell else 0)
    return products + 2 * GATES["lstm"] * C, products


def _bahdanau(model: config.Bahdanau, T: int) -> Count:
    D, V = model.d_model, model.vocab_size
    E, A, deeper = model.d_embedding or D, model.d_attention or D, model.layers - 1
    one_way, products_one_way = _cells(model.cell, [E] + deeper * [2 * D], D)
    decoder, products = _cells(model.cell, [E + 2 * D] + deeper * [D], D)
    first_state = STATE_VECTORS[model.cell] * model.layers * D
    alignment = D * A + 2 * D * A  # W_q once per target token, W_k once per source token
    return Count(
        (
            Component("embeddings", (V + (model.source_vocab_size or 0)) * E, 0),
            Component("encoder", 2 * one_way, 2 * T * 2 * products_one_way, True),
            Component("bridge", _biased(D, first_state), 2 * D * first_state, True),
            # for each pair of tokens: v · tanh(…), then its term of the weighted mean of width 2D
            Component("attention", alignment + A, 2 * T * alignment + T * T * (2 * A + 4 * D), True),
            Component("decoder", decoder, 2 * T * products, True),
            Component("readout", _biased(3 * D + E, 2 * D), 2 * T * (3 * D + E) * 2 * D, True),
            Component("logits", _biased(D, V), 2 * T * D * V),
        ),
        T,
        PER_TARGET_TOKEN,
    )
