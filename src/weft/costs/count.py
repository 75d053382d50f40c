"""What a model costs, from its config alone: parameters and floating-point operations, part by part.

The conventions are those of the lectures and of PaLM (Chowdhery et al. 2022, appendix B):

- A product of an m × k matrix with a k × n matrix is 2mkn operations: a multiplication and an addition each.
- Only products count. Norms, activations, softmax, biases and look-ups are well below 1 % and left out.
- Attention counts every query against all T keys, 4 · T · heads · d_head a token and layer, also under a causal mask,
  which needs only half of it; a `window` smaller than T bounds the keys.
- The backward pass costs twice the forward pass, so training is three forward passes; where the layers' activations
  are recomputed instead of kept, the layers run a fourth time. A frozen matrix needs no gradient of its own, so its
  backward pass costs one; that the lowest layers of a frozen model need no gradient at all is left out.
- A sequence-to-sequence model is counted for a source as long as its target, and per target token.
- Logits are counted at every position, also where an objective looks at few of them (masked words).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.config import Config
from weft.errors import ModelError
from weft.models import config
from weft.nn.config import Gated, LayerNorm, LoRA, Norm

GATES = {"elman": 1, "lstm": 4, "gru": 3}
STATE_VECTORS = {"elman": 1, "lstm": 2, "gru": 1}


@dataclass(frozen=True)
class Component:
    """A part of a model: its parameters, and the operations of one forward pass over a whole sequence."""

    name: str
    parameters: int
    flops: int
    in_layers: bool = False
    trained: bool = True
    backward: int = 2  # forward passes that its backward pass costs
    looked_up: int = 0  # parameters of which a token reads a few, and no product reads any


@dataclass(frozen=True)
class Count:
    """A model's cost for sequences of `length` tokens."""

    components: tuple[Component, ...]
    length: int
    note: str = ""

    @property
    def parameters(self) -> int:
        """All parameters; a tied table counts once."""
        return sum(part.parameters for part in self.components)

    @property
    def trainable(self) -> int:
        """Those that training changes: all of them, unless there is an adapter."""
        return sum(part.parameters for part in self.components if part.trained)

    @property
    def multiplied(self) -> int:
        """Those that products read, embeddings among them, which are most models' last matrix too."""
        return self.parameters - sum(part.looked_up for part in self.components)

    @property
    def forward(self) -> float:
        """Operations a token, forward."""
        return sum(part.flops for part in self.components) / self.length

    def training(self, recompute: bool = False) -> float:
        """Operations a token, forward and backward; with `recompute` the layers run forward twice."""
        return sum(self._runs(part, recompute) * part.flops for part in self.components) / self.length

    def share(self, part: Component, recompute: bool = False) -> float:
        total = self.training(recompute)
        return self._runs(part, recompute) * part.flops / self.length / total if total else 0.0

    def _runs(self, part: Component, recompute: bool) -> int:
        return 1 + part.backward + (1 if recompute and part.in_layers else 0)


def count(model: Config, length: int | None = None, adapter: LoRA | None = None) -> Count:
    """The cost of a model for sequences of `length` tokens (default: its context). An `adapter` freezes all else."""
    if adapter is not None:
        return _adapted(model, count(model, length), adapter)
    longest = getattr(model, "longest", None)
    if length is not None and longest is not None and length > longest:
        raise ModelError(f"length {length}: the model's positions end at model.context = {longest}")
    context: int = getattr(model, "context", 1)
    time = length or context
    match model:
        case config.TransformerConfig():
            return _transformer(model, time)
        case config.Recurrent():
            return _recurrent(model, time)
        case config.Bahdanau():
            return _bahdanau(model, time)
        case config.NGram():
            note = f"counts, not weights: the text decides how many; a token costs up to {model.order} look-ups"
            return Count((Component("counts", 0, 0),), time, note)
        case _:
            raise ModelError(f"a {type(model).__name__} cannot be counted: it is not a model")


def writing_weights(model: Config, vocab_size: int) -> dict[str, int]:
    """Roughly how many weights multiply each token that a model writes: those of its "layers", and of its "logits".

    A run's size in one number, by which rates and batches are chosen. Norms and biases are left out, and so is what
    reads a source; every layer counts as one that reads as many numbers as it gives.
    """
    match model:
        case config.TransformerConfig():
            one = sum(linear.products for linear in block_linears(model))
        case config.Recurrent() | config.Bahdanau():
            one = _cells(model.cell, [model.d_model], model.d_model)[1]
        case _:
            return {}
    width: int = getattr(model, "width", model.d_model)
    return {"layers": model.layers * one, "logits": vocab_size * width}


def _matrix(inputs: int, outputs: int, bias: bool = False) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _norm(norm: Norm, width: int) -> int:
    return (norm.gain + norm.bias) * width if isinstance(norm, LayerNorm) else width


def stacks(model: config.TransformerConfig) -> list[tuple[int, bool, bool]]:
    """(layers, causal, reads a source) of each stack."""
    if isinstance(model, config.EncoderDecoder):
        return [(model.encoder_layers or model.layers, False, False), (model.layers, True, True)]
    return [(model.layers, not isinstance(model, config.Encoder), False)]


@dataclass(frozen=True)
class Linear:
    """A linear layer inside a block: what it reads, and the heights of the matrices that lie in it."""

    name: str
    inputs: int
    heights: tuple[int, ...]
    bias: bool

    @property
    def products(self) -> int:
        """The weights that each token is multiplied by."""
        return self.inputs * sum(self.heights)

    @property
    def parameters(self) -> int:
        """These, and the bias."""
        return self.products + (sum(self.heights) if self.bias else 0)

    @property
    def by_rows(self) -> bool:
        """Whether tensor parallelism splits it by what it reads: the last of a sublayer (Shoeybi et al. 2019)."""
        return self.name.endswith((".out", ".down"))

    def adapter(self, rank: int) -> int:
        """The parameters of low-rank matrices beside it: as many are multiplied for each token."""
        return rank * (len(self.heights) * self.inputs + sum(self.heights))


def block_linears(model: config.TransformerConfig, cross: bool = False) -> list[Linear]:
    """The linear layers of a block, by their names inside it."""
    D, d_ff, attention = model.d_model, model.feedforward.d_ff, model.attention
    H, G = attention.heads * model.d_head, attention.groups * model.d_head
    (into, out_of), both = attention.biased, model.feedforward.bias
    linears = [Linear("attention.qkv", D, (H, G, G), into), Linear("attention.out", H, (D,), out_of)]
    if cross:
        linears += [Linear("cross.q", D, (H,), into), Linear("cross.kv", D, (G, G), into)]
        linears += [Linear("cross.out", H, (D,), out_of)]
    if isinstance(model.feedforward, Gated):
        linears.append(Linear("feedforward.gate_up", D, (d_ff, d_ff), both))
    else:
        linears.append(Linear("feedforward.up", D, (d_ff,), both))
    return [*linears, Linear("feedforward.down", d_ff, (D,), both)]


def _transformer(model: config.TransformerConfig, T: int) -> Count:
    D, E, d_head, attention = model.d_model, model.width, model.d_head, model.attention
    embeddings, projection, biased = model.vocab_size * E, 0, isinstance(model, config.Encoder)
    if isinstance(model, config.EncoderDecoder):
        embeddings += (model.source_vocab_size or 0) * E
    elif isinstance(model, config.Encoder):
        embeddings += model.segments * E
    if model.factorised:
        projection = E * D
    ngrams = model.ngrams if isinstance(model, config.Decoder) else None
    hashed = up = 0
    if ngrams is not None:
        hashed, up = len(ngrams.orders) * ngrams.rows * (ngrams.width or E), (ngrams.width or 0) * E

    linears: list[Linear] = []
    positions = by_position = norms = pairs = 0
    for depth, causal, cross in stacks(model):
        linears += depth * block_linears(model, cross)
        attentions = depth * (2 if cross else 1)
        kinds = model.layer_kinds(depth)
        pairs += sum(T * seen(kind.window, causal, T) for kind in kinds) + (depth * T * T if cross else 0)
        norms += (depth // model.sharing * sublayer_norms(model, cross) + int(model.last_norm)) * _norm(model.norm, D)
        norms += _norm(model.norm, model.added_width) if model.embedding_norm else 0
        norms -= 0 if model.first_norm else _norm(model.norm, D)
        if attention.qk_norm is not None:
            shared = attention.qk_norm_over == "head"
            widths = [d_head * (1 if shared else heads) for heads in (attention.heads, attention.groups)]
            norms += attentions // model.sharing * sum(_norm(attention.qk_norm, width) for width in widths)
        sizes = model.sizes(depth, causal)
        positions += model.position.parameters(replace(sizes, layers=depth // model.sharing))
        for kind in kinds:
            own = kind.position or model.position
            by_position += own.flops(replace(sizes, layers=1), T, seen(kind.window, causal, T))

    parts = [
        Component("embeddings", embeddings, 0),
        Component("n-grams", hashed + up, 2 * T * up, looked_up=hashed),
        Component("positions", positions, 0),
        Component("projection", projection and projection + biased * D, 2 * T * projection),
        _products(model, "MHA projections", [each for each in linears if not each.name.startswith("feedforward")], T),
        Component("attention", 0, 4 * pairs * attention.heads * d_head + by_position, True),
        _products(model, "FFN", [each for each in linears if each.name.startswith("feedforward")], T),
        Component("norms", norms, 0),
        *_head(model, T),
    ]
    note = "a target token, its source as long as its target" if isinstance(model, config.EncoderDecoder) else ""
    return Count(tuple(part for part in parts if part.parameters or part.flops), T, note)


def _products(model: config.TransformerConfig, name: str, linears: list[Linear], T: int) -> Component:
    parameters, products = sum(each.parameters for each in linears), sum(each.products for each in linears)
    return Component(name, parameters // model.sharing, 2 * T * products, True)


def seen(window: int | None, causal: bool, T: int) -> int:
    """Keys of T that a query is compared with."""
    window = window or T
    return min(T, window if causal else 2 * window - 1)


def sublayer_norms(model: config.TransformerConfig, cross: bool) -> int:
    """The norms around the sublayers of a block, which may read a source."""
    return model.norms + (model.norms // 2 if cross else 0)


def _head(model: config.TransformerConfig, T: int) -> list[Component]:
    D, E, V, head = model.d_model, model.width, model.vocab_size, model.head  # type: ignore[attr-defined]
    pooler, sentence = (D, D, 1), (D, 2, 1)

    def normed(width: int, bias: bool) -> int:
        """What a linear layer has more with a norm after it, and less without its bias."""
        return _norm(model.norm, width) - (0 if bias else width)

    match head:
        case config.LMHead() | config.MaskedLMHead() | config.PretrainingHead():
            words = Component("logits", (0 if head.tied else V * E) + (V if head.bias else 0), 2 * T * E * V)
            if isinstance(head, config.LMHead):
                return [Component("head", D * E, 2 * T * D * E), words] if model.factorised else [words]
            more = [pooler, sentence] if isinstance(head, config.PretrainingHead) else []
            return [_dense([(D, E, T), *more], normed(E, head.dense_bias)), words]
        case config.NextSentenceHead():
            return [_dense([pooler, sentence])]
        case config.ClassificationHead():
            layers = [*([pooler] if head.pooler else []), (D, head.labels, 1)]
            unbiased = 0 if head.bias else -head.labels
        case config.TaggingHead() | config.SpanHead():
            layers, unbiased = [(D, head.labels if isinstance(head, config.TaggingHead) else 2, T)], 0
        case config.ReplacedHead():
            return [_dense([(D, D, T), (D, 1, T)])]
        case _:
            return []
    if head.transform is None:
        return [_dense(layers, unbiased)]
    return [_dense([(D, D, layers[-1][2]), *layers], unbiased + normed(D, head.transform.bias))]


def _dense(layers: Sequence[tuple[int, int, int]], more: int = 0) -> Component:
    """A head made of linear layers with biases, what each reads, what it gives, and at how many places; and `more`
    parameters."""
    parameters = sum(_matrix(inputs, outputs, True) for inputs, outputs, _ in layers) + more
    return Component("head", parameters, sum(2 * inputs * outputs * places for inputs, outputs, places in layers))


def layers_linears(model: config.TransformerConfig) -> list[list[Linear]]:
    """The linear layers of each layer, from the source to the logits, by their names in the built model. Layers that
    share their weights have the same names."""
    return [
        [replace(each, name=f"{'decoder' if causal else 'encoder'}.blocks.{block}.{each.name}") for each in linears]
        for depth, causal, cross in stacks(model)
        for linears in [block_linears(model, cross)]
        for block in (layer // model.sharing for layer in range(depth))
    ]


def orthogonal_flops(model: Config, rounds: int, adapter: LoRA | None = None) -> float:
    """Operations of one update by Muon: for each matrix inside a block, `rounds` times x xᵀ, its square, and that times
    x. Other optimizers have 0 rounds: what is done to single weights is counted nowhere."""
    if adapter is not None:
        shapes = [
            shape
            for each in adapted_linears(model, adapter)
            for height in each.heights
            for shape in ((adapter.rank, each.inputs), (height, adapter.rank))
        ]
    elif isinstance(model, config.TransformerConfig):
        linears = {each.name: each for layer in layers_linears(model) for each in layer}
        shapes = [(height, each.inputs) for each in linears.values() for height in each.heights]
    else:
        return 0.0
    return float(sum(rounds * (4 * min(shape) ** 2 * max(shape) + 2 * min(shape) ** 3) for shape in shapes))


def adapted_linears(model: Config, adapter: LoRA) -> list[Linear]:
    if not isinstance(model, config.TransformerConfig):
        raise ModelError(f"adapter: it needs a model made of Transformer blocks, not a {type(model).__name__}")
    linears = {linear.name: linear for block in layers_linears(model) for linear in block}
    return [linears[name] for name in adapter.match_targets(linears)]


def _adapted(model: Config, cost: Count, adapter: LoRA) -> Count:
    """The same model, all of it frozen but for the adapter, and the head if the adapter trains it."""
    parameters = sum(linear.adapter(adapter.rank) for linear in adapted_linears(model, adapter))
    runs: int = getattr(model, "sharing", 1)
    parts = []
    for part in cost.components:
        trained = adapter.head and part.name in ("head", "logits")
        # the scores of attention are a product of two things that both have a gradient
        parts.append(replace(part, trained=trained, backward=2 if trained or part.name == "attention" else 1))
    added = Component("adapter", parameters, runs * 2 * cost.length * parameters, in_layers=True)
    return replace(cost, components=(*parts, added))


def _cells(cell: str, inputs: list[int], D: int) -> tuple[int, int]:
    """Parameters of a stack whose layers read `inputs` numbers each, and the weights among them that are multiplied.
    PyTorch keeps two biases a gate."""
    products = sum(GATES[cell] * D * (numbers + D) for numbers in inputs)
    return products + len(inputs) * 2 * GATES[cell] * D, products


def _recurrent(model: config.Recurrent, T: int) -> Count:
    D, V = model.d_model, model.vocab_size
    d_embedding, deeper = model.d_embedding or D, model.layers - 1
    parameters, products = _cells(model.cell, [d_embedding] + deeper * [D], D)
    cell = Component("cell", parameters, 2 * T * products, True)
    logits = Component("logits", (0 if model.tied else V * D) + V, 2 * T * D * V)
    return Count((Component("embeddings", V * d_embedding, 0), cell, logits), T)


def _bahdanau(model: config.Bahdanau, T: int) -> Count:
    D, V = model.d_model, model.vocab_size
    E, A, deeper = model.d_embedding or D, model.d_attention or D, model.layers - 1
    one_way, products_one_way = _cells(model.cell, [E] + deeper * [2 * D], D)
    decoder, products = _cells(model.cell, [E + 2 * D] + deeper * [D], D)
    first_state = STATE_VECTORS[model.cell] * model.layers * D
    alignment = D * A + 2 * D * A  # W_q once a target token, W_k once a source token
    return Count(
        (
            Component("embeddings", (V + (model.source_vocab_size or 0)) * E, 0),
            Component("encoder", 2 * one_way, 2 * T * 2 * products_one_way, True),
            Component("bridge", _matrix(D, first_state, True), 2 * D * first_state, True),
            # each pair of tokens: v · tanh(…), then its part of the weighted mean of 2D numbers
            Component("attention", alignment + A, 2 * T * alignment + T * T * (2 * A + 4 * D), True),
            Component("decoder", decoder, 2 * T * products, True),
            Component("readout", _matrix(3 * D + E, 2 * D, True), 2 * T * (3 * D + E) * 2 * D, True),
            Component("logits", _matrix(D, V, True), 2 * T * D * V),
        ),
        T,
        "a target token, its source as long as its target",
    )
