"""The memory that training and generation need, from the config alone.

Training keeps, in bytes a parameter: the weights (4), their gradients (4), the optimizer's moments (4 each; Adam has
two, SGD with momentum one, Muon one inside layers and two elsewhere) and, in bf16, the 16-bit copies that products
read (2). What an adapter freezes has weights and copies alone.

For the backward pass it also keeps activations, in bytes a token. The model of what is kept:

- A product keeps its input, an activation function its input (relu, sigmoid and tanh: its output), a gate both factors.
- A norm keeps its input, as wide as what runs along the skip connections: 16 bits in bf16, if the model is compiled
  (else autocast on a GPU keeps a copy in fp32). Skip connections keep nothing; dropout a byte a number.
- Fast attention keeps queries, keys, values, its output and one fp32 number a head. There is no T × T term, except
  for relative vectors (Shaw et al. 2018), which need the probabilities. Biases on the scores (T5, ALiBi) are one
  T × T table a head for all layers, and left out here.
- A frozen product keeps nothing. An adapter keeps its layer's input (and a byte a number for dropout), and its own
  few numbers. Layers below the lowest adapter keep nothing.
- Recomputing keeps the input of each layer, and everything of the one layer that is run again.
- Logits exist a chunk at a time, with their gradient. On a GPU chunks grow to 1/64 of its memory (`logits_bytes`).
- A compiled model keeps less of a gate: f(x W_g) is found again from x W_g.

What the allocator loses, and the device's own libraries, come on top: 5 to 15 % on a GPU.
"""

from dataclasses import dataclass

from weft.config import Config
from weft.costs.count import GATES, STATE_VECTORS, adapted_linears, count, layers_linears, seen, stacks, sublayer_norms
from weft.errors import ModelError
from weft.models import config
from weft.nn.config import Gated, LoRA

WIDE = 4  # bytes of an fp32 number
SCALE = 2  # bytes of the scale of a key or value in 8 bits
INDEX = 8  # bytes of a row's number
LOGITS_AT_A_TIME = 1 << 22  # as the loss cuts them
GPU_SHARE = 128  # bytes of a GPU's memory for each logit that is formed at a time
MOMENTS = {"adamw": 2, "adam": 2, "sgd": 1, "muon": 2}  # muon: outside of layers; inside them one


@dataclass(frozen=True)
class Memory:
    """Bytes of one training step on one device, `tokens` at a time."""

    weights: int
    copies: int
    gradients: int
    optimizer: int
    activations: int
    recomputed: int  # instead of `activations`, where layers are run again
    logits: int

    @property
    def fixed(self) -> int:
        """What does not grow with the batch."""
        return self.weights + self.copies + self.gradients + self.optimizer

    def total(self, recompute: bool = False) -> int:
        return self.fixed + (self.recomputed if recompute else self.activations) + self.logits


def narrow(precision: str) -> int:
    """Bytes of a number that goes into a product."""
    return 2 if precision in ("bf16", "fp16", "fp8") else WIDE


def moments(optimizer: str, parameters: float, in_layers: float) -> float:
    """How many moments an optimizer keeps for `parameters`, of which `in_layers` are inside layers."""
    return MOMENTS[optimizer] * parameters - (in_layers if optimizer == "muon" else 0)


@dataclass(frozen=True)
class Workload:
    """What one device trains at a time: `sequences` of `length` tokens."""

    sequences: int
    length: int
    precision: str
    optimizer: str = "adamw"
    shards: int = 1  # devices that what a parameter costs is split over


def training_memory(model: Config, work: Workload, adapter: LoRA | None = None) -> Memory:
    """The memory of a step on one device. With an `adapter` all else is frozen."""
    n, tokens = narrow(work.precision), work.sequences * work.length
    cost = count(model, work.length, adapter)
    in_layers = sum(part.parameters for part in cost.components if part.in_layers and part.trained)
    inside, outside, inputs = kept_bytes(model, work.length, n)
    if adapter is not None:
        assert isinstance(model, config.TransformerConfig)
        inside = _adapted(model, inside, adapter, n)
    vocab_size: int = getattr(model, "vocab_size", 0) if cost.parameters else 0

    def split(numbers: float) -> int:
        return -(-WIDE * int(numbers) // work.shards)

    return Memory(
        weights=split(cost.parameters),
        copies=-(-2 * cost.multiplied // work.shards) if n < WIDE else 0,
        gradients=split(cost.trainable),
        optimizer=split(moments(work.optimizer, cost.trainable, in_layers)),
        activations=round(tokens * (sum(inside) + outside)),
        recomputed=round(tokens * (len(inside) * inputs + max(inside, default=0.0) + outside)),
        logits=2 * WIDE * min(tokens * vocab_size, max(LOGITS_AT_A_TIME, vocab_size)),
    )


def cache_bytes(model: Config, precision: str) -> int:
    """Bytes that generation keeps of each token: keys and values, or a recurrent stack's state after it. A
    sequence-to-sequence Transformer holds as much again for each token of the source. In int8, each key and each value
    of a decoder has a scale."""
    match model:
        case config.Decoder() if precision == "int8":
            return 2 * model.layers * model.attention.groups * (model.d_head + SCALE)
        case config.Decoder() | config.EncoderDecoder():
            return 2 * model.layers * model.attention.groups * model.d_head * narrow(precision)
        case config.Recurrent() | config.Bahdanau():
            return STATE_VECTORS[model.cell] * model.layers * model.d_model * narrow(precision)
        case _:
            return 0


def kept_bytes(model: Config, T: int, n: int) -> tuple[list[float], float, float]:
    """Bytes a token that the backward pass needs: of each layer, of what stands around them, of a layer's input."""
    match model:
        case config.TransformerConfig():
            each = zip(stacks(model), layer_bytes(model, T, n), strict=True)
            layers = [kept.all for (depth, _, _), kept in each for _ in range(depth)]
            return layers, around_bytes(model, n), n * model.d_model
        case config.Recurrent():
            D, E = model.d_model, model.d_embedding or model.d_model
            read = [E] + (model.layers - 1) * [D]
            return [float(n * (inputs + _cell(model.cell, D))) for inputs in read], n * D, n * D
        case config.Bahdanau():
            D, E, A = model.d_model, model.d_embedding or model.d_model, model.d_attention or model.d_model
            cell, deeper = _cell(model.cell, D), model.layers - 1
            encoder = [inputs + 2 * cell for inputs in [E] + deeper * [2 * D]]
            decoder = [inputs + cell for inputs in [E + 2 * D] + deeper * [D]]
            alignment = T * A + T + 2 * D + A  # tanh(W_q s + W_k h_j) for every pair
            readout = 3 * D + E + 2 * D + D
            return [float(n * kept) for kept in encoder + decoder], n * (alignment + readout), n * 2 * D
        case config.NGram():
            return [], 0.0, 0.0
        case _:
            raise ModelError(f"a {type(model).__name__} cannot be counted: it is not a model")


def _cell(cell: str, D: int) -> int:
    """Numbers a recurrent cell keeps of a token: its gates and its state."""
    return (GATES[cell] + STATE_VECTORS[cell]) * D


@dataclass(frozen=True)
class LayerBytes:
    """Bytes a token that a layer keeps, by what a layout can split.

    `along`: what runs along the skip connections and into norms; `inputs`: what the first matrix of a sublayer reads;
    `inside`: between the first matrix and the last, where heads and features can be divided.
    """

    along: float
    inputs: float
    inside: float

    @property
    def all(self) -> float:
        return self.along + self.inputs + self.inside


def layer_bytes(model: config.TransformerConfig, T: int, n: int, compiled: bool = False) -> list[LayerBytes]:
    """What one layer of each stack keeps of a token, at `T` tokens a sequence and `n` bytes a number."""
    D = model.d_model
    dropped = D if model.dropout else 0
    found = []
    for depth, causal, cross in stacks(model):
        inside = float(_attention(model, n, cross=False) + _feedforward(model, n, compiled))
        inside += n * model.position.activations(model.sizes(depth, causal), T)
        inside += _attention(model, n, cross=True) if cross else 0
        if model.attention.softcap is not None:
            # no fused kernel caps scores: tanh, probabilities, and each in the products' type
            keys = max((seen(kind.window, causal, T) for kind in model.kinds()), default=0)
            inside += 3 * max(n, WIDE) * model.attention.heads * keys
        # two norms side by side read, and keep, the same numbers
        normed = sublayer_norms(model, cross) if model.sublayers == "sequential" else 1
        along = n * D * normed + dropped * (3 if cross else 2)
        read = (4 if cross else 2) if model.sublayers != "parallel" else 1
        found.append(LayerBytes(along, n * D * read, inside))
    return found


def around_bytes(model: config.TransformerConfig, n: int) -> float:
    """Bytes a token that are kept outside of the layers: norms around them, and what the logits are made of."""
    D = model.d_model
    around = (n * D if model.last_norm else 0) + (WIDE * model.added_width if model.embedding_norm else 0)
    around += n * model.width if model.factorised else 0  # what the projection reads
    if isinstance(model, config.Decoder) and model.ngrams is not None:
        around += n * (model.ngrams.width or 0) + INDEX * (2 * len(model.ngrams.orders) + 1)  # rows, and whose they are
    return len(stacks(model)) * around + n * D


def logits_bytes(vocab_size: int, d_model: int, tokens: int, gpu: int) -> int:
    """What the loss holds in 16 bits on a GPU with `gpu` bytes of memory: `nn/loss.py` says how.

    Two chunks of logits where there are several (one is made while the other is there), the table, and its gradient in
    fp32, twice where chunks are added up.
    """
    rows = 1 << max(0, (gpu // GPU_SHARE // vocab_size).bit_length() - 1)
    chunks = 2 if tokens > rows else 1
    return 2 * chunks * min(tokens, rows) * vocab_size + (2 + WIDE * chunks) * vocab_size * d_model


def _adapted(model: config.TransformerConfig, layers: list[float], adapter: LoRA, n: int) -> list[float]:
    """The same layers frozen, with an adapter beside some of their products."""
    settings = model.feedforward
    keeps = {linear.name for linear in adapted_linears(model, adapter)}
    # what else keeps them: attention its output, relu and its like theirs
    for_others = ["attention.out", "cross.out"]
    if not isinstance(settings, Gated) and settings.activation in ("relu", "sigmoid", "tanh"):
        for_others.append("feedforward.down")
    adapted: list[float] = []
    learning = False  # below the lowest adapter no gradient is needed
    for kept, block in zip(layers, layers_linears(model), strict=True):
        learning = learning or any(linear.name in keeps for linear in block)
        for linear in block:
            shared = any(linear.name.endswith(name) for name in for_others)
            if linear.name in keeps:
                kept += n * len(linear.heights) * adapter.rank
                kept += (1 + (n if shared else 0)) * linear.inputs if adapter.dropout else 0
            elif not shared:
                kept -= n * linear.inputs
        adapted.append(kept if learning else 0.0)
    return adapted


def _attention(model: config.TransformerConfig, n: int, cross: bool) -> int:
    H, G, d_head = model.attention.heads, model.attention.groups, model.d_head
    kept = n * (H + 2 * G) * d_head + n * H * d_head + WIDE * H
    if (model.position.rotates and not cross) or model.attention.qk_norm is not None:
        kept += n * (H + G) * d_head  # rotated or normed, queries and keys are new numbers
    if model.attention.qk_norm is not None and n != WIDE:
        kept += WIDE * (H + G) * d_head
    return kept


def _feedforward(model: config.TransformerConfig, n: int, compiled: bool) -> int:
    settings = model.feedforward
    masks = settings.d_ff if settings.dropout else 0
    if isinstance(settings, Gated):
        return (3 if compiled else 4) * n * settings.d_ff + masks
    from_output = settings.activation in ("relu", "sigmoid", "tanh")
    return (1 if from_output else 2) * n * settings.d_ff + masks
