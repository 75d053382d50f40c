"""Predict the memory of training and generation from the config alone.

Training holds, in bytes per parameter: weights (4), gradients (4), optimizer moments (4 each; Adam has two, SGD with
momentum one, Muon one inside layers and two elsewhere) and, in bf16, 16-bit copies for the products (2). Weights frozen
by an adapter have no gradients and moments.

For the backward pass it also stores activations, in bytes per token:

- A product stores its input, an activation function its input (relu, sigmoid, tanh: its output), a gate both factors.
- A norm stores its input, of the width of the residual stream: 16 bits in bf16, if the model is compiled (otherwise
  autocast on a GPU stores an fp32 copy). Residual connections store nothing; dropout one byte per element.
- Fused attention stores queries, keys, values, its output and one fp32 value per head. There is no T × T term, except
  for relative vectors (Shaw et al. 2018), which need the probabilities. Biases on the scores (T5, ALiBi) are one T × T
  table per head for all layers, and left out here.
- A frozen product stores nothing. An adapter stores its layer's input (and one byte per element for dropout) and its
  few activations. Layers below the lowest adapter store nothing.
- Activation checkpointing stores the input of each layer, and all activations of the one layer that is recomputed.
- Logits exist in chunks, with their gradient. On a GPU a chunk takes at most 1/64 of its memory (`logits_bytes`).
- A compiled model stores less for a gate: f(x W_g) is recomputed from x W_g.

Allocator overhead and the device's libraries add 5 to 15 % on a GPU.
"""

from dataclasses import dataclass

from weft.config import Config
from weft.costs.count import GATES, STATE_VECTORS, count, seen, sublayer_norms
from weft.costs.linears import adapted_linears, layer_shares, layers_linears, stacks
from weft.errors import ModelError
from weft.models import config
from weft.nn.config import Experts, Gated, LoRA, NoFeedForward, Plain

WIDE = 4  # bytes of an fp32 value
SCALE_BYTES = 2  # bytes of the scale of an int8 key or value
INDEX_BYTES = 8  # bytes of a row index
MAX_LOGITS = 1 << 22  # logits per chunk of the loss
GPU_BYTES_PER_LOGIT = 128  # memory of the GPU per logit of a chunk
OUTPUT_ACTIVATIONS = ("relu", "sigmoid", "tanh")  # whose gradient is computed from their output
MOMENTS = {"adamw": 2, "adam": 2, "sgd": 1, "muon": 2}  # moments per parameter; Muon has one inside layers


@dataclass(frozen=True)
class Memory:
    """Memory of a training step on one device, in bytes."""

    weights: int
    copies: int
    gradients: int
    optimizer: int
    activations: int
    recomputed: int  # instead of `activations`, with activation checkpointing
    logits: int

    @property
    def fixed(self) -> int:
        """Bytes that don't depend on the batch."""
        return self.weights + self.copies + self.gradients + self.optimizer

    def total(self, recompute: bool = False) -> int:
        return self.fixed + (self.recomputed if recompute else self.activations) + self.logits


def narrow(precision: str) -> int:
    """Return the bytes of an operand of a product."""
    return 2 if precision in ("bf16", "fp16", "fp8") else WIDE


def moments(optimizer: str, parameters: float, in_layers: float) -> float:
    """Return the number of moment values for `parameters`, of which `in_layers` are inside layers."""
    return MOMENTS[optimizer] * parameters - (in_layers if optimizer == "muon" else 0)


@dataclass(frozen=True)
class Workload:
    """Micro-batch of one device: `sequences` of `length` tokens."""

    sequences: int
    length: int
    precision: str
    optimizer: str = "adamw"
    shards: int = 1  # devices that weights, gradients and moments are sharded over


def training_memory(model: Config, work: Workload, adapter: LoRA | None = None) -> Memory:
    """Return the memory of a step on one device. An `adapter` freezes everything else."""
    n, tokens = narrow(work.precision), work.sequences * work.length
    cost = count(model, work.length, adapter)
    in_layers = sum(part.parameters for part in cost.components if part.in_layers and part.trained)
    inside, outside, inputs = activation_bytes(model, work.length, n)
    if adapter is not None:
        assert isinstance(model, config.TransformerConfig)
        inside = _adapted(model, inside, adapter, n=n)
    vocab_size: int = getattr(model, "vocab_size", 0) if cost.parameters else 0

    def sharded(values: float) -> int:
        return -(-WIDE * int(values) // work.shards)

    return Memory(
        weights=sharded(cost.parameters),
        copies=-(-2 * cost.multiplied // work.shards) if n < WIDE else 0,
        gradients=sharded(cost.trainable),
        optimizer=sharded(moments(work.optimizer, cost.trainable, in_layers)),
        activations=round(tokens * (sum(inside) + outside)),
        recomputed=round(tokens * (len(inside) * inputs + max(inside, default=0.0) + outside)),
        logits=2 * WIDE * min(tokens * vocab_size, max(MAX_LOGITS, vocab_size)),
    )


def cache_bytes(model: Config, precision: str) -> int:
    """Return the bytes of the KV cache per token (of the source as many again), or of a recurrent stack's state."""
    match model:
        case config.Decoder() | config.EncoderDecoder():
            parts, heads, width = model.cache_shape
            int8 = precision == "int8" and isinstance(model, config.Decoder)  # each key and value has a scale
            return parts * model.layers * heads * (width + SCALE_BYTES if int8 else width * narrow(precision))
        case config.Recurrent() | config.Bahdanau():
            return STATE_VECTORS[model.cell] * model.layers * model.d_model * narrow(precision)
        case _:
            return 0


def activation_bytes(model: Config, T: int, n: int) -> tuple[list[float], float, float]:
    """Return the activations in bytes per token: of each layer, outside the layers, and of a layer's input alone."""
    match model:
        case config.TransformerConfig():
            per_stack = zip(stacks(model), layer_bytes(model, T, n), strict=True)
            layers = [layer.all for (depth, _, _), layer in per_stack for _ in range(depth)]
            return layers, around_bytes(model, n), n * model.d_model
        case config.Bengio():
            return [float(n * (model.d_input + 2 * model.d_model))], n * model.d_model, n * model.d_input
        case config.Recurrent():
            D, E = model.d_model, model.d_embedding or model.d_model
            widths = [E] + (model.layers - 1) * [D]
            return [float(n * (inputs + _cell(model.cell, D))) for inputs in widths], n * D, n * D
        case config.ELMo():
            D = model.d_model
            states = D + _cell("lstm", model.d_cell or D) + (D if model.d_cell else 0)
            return model.layers * [float(2 * n * states)], 4 * n * D, 2 * n * D
        case config.Bahdanau():
            D, E, A = model.d_model, model.d_embedding or model.d_model, model.d_attention or model.d_model
            cell, deeper = _cell(model.cell, D), model.layers - 1
            encoder = [inputs + 2 * cell for inputs in [E] + deeper * [2 * D]]
            decoder = [inputs + cell for inputs in [E + 2 * D] + deeper * [D]]
            alignment = T * A + T + 2 * D + A  # tanh(W_q s + W_k h_j) for every pair
            outside = n * (alignment + 3 * D + E + 2 * D + D)  # and the readout
            return [float(n * width) for width in encoder + decoder], outside, n * 2 * D
        case config.NGram() | config.StaticVectors():
            return [], 0.0, 0.0
        case _:
            raise ModelError(f"a {type(model).__name__} cannot be counted: it is not a model")


def _cell(cell: str, D: int) -> int:
    """Return the values that a recurrent cell stores per token: its gates and its state."""
    return (GATES[cell] + STATE_VECTORS[cell]) * D


@dataclass(frozen=True)
class LayerBytes:
    """Activations of a layer in bytes per token, by how a layout can split them."""

    along: float  # residual stream and inputs of norms
    inputs: float  # inputs of the first matrix of a sublayer
    inside: float  # between the first and the last matrix, where heads and features can be split

    @property
    def all(self) -> float:
        return self.along + self.inputs + self.inside


def layer_bytes(model: config.TransformerConfig, T: int, n: int, *, compiled: bool = False) -> list[LayerBytes]:
    """Return the activations of a layer of each stack, at `T` tokens per sequence and `n` bytes per value."""
    D = model.d_model
    dropout_mask = D if model.dropout else 0
    layers = []
    for depth, causal, cross in stacks(model):
        inside = float(_attention(model, n, cross=False))
        for layer, share in layer_shares(model, depth):
            inside += share * _feedforward(model.feedforward_at(layer), model.d_model, n, compiled=compiled)
        inside += n * model.position.activations(model.sizes(depth, causal), T)
        inside += _attention(model, n, cross=True) if cross else 0
        if model.attention.softcap is not None:
            # no fused kernel caps scores: tanh and probabilities, in fp32 and as operands of the products
            keys = max((seen(kind.reach, causal, T) for kind in model.kinds(causal)), default=0)
            inside += 3 * max(n, WIDE) * model.attention.heads * keys
        # norms of parallel sublayers share their input
        norm_inputs = sublayer_norms(model, cross) if model.sublayers == "sequential" else 1
        along = n * D * norm_inputs + dropout_mask * (3 if cross else 2)
        matrix_inputs = (4 if cross else 2) if model.sublayers != "parallel" else 1
        layers.append(LayerBytes(along, n * D * matrix_inputs, inside))
    return layers


def around_bytes(model: config.TransformerConfig, n: int) -> float:
    """Return the activations outside the layers in bytes per token: norms, projections and the input of the logits."""
    D = model.d_model
    around = (n * D if model.last_norm else 0) + (WIDE * model.added_width if model.embedding_norm else 0)
    around += n * model.width if model.factorised else 0  # input of the projection
    if isinstance(model, config.Decoder) and model.ngrams is not None:
        around += n * (model.ngrams.width or 0) + INDEX_BYTES * (2 * len(model.ngrams.orders) + 1)  # row indices
    return len(stacks(model)) * around + n * D


def logits_bytes(vocab_size: int, d_model: int, tokens: int, *, gpu_memory: int) -> int:
    """Return the memory of the 16-bit loss (`nn/loss.py`) on a GPU with this much memory."""
    rows = 1 << max(0, (gpu_memory // GPU_BYTES_PER_LOGIT // vocab_size).bit_length() - 1)
    chunks = 2 if tokens > rows else 1  # of logits that exist at a time
    # the weight is there too, and its fp32 gradient, twice if chunks are summed
    return 2 * chunks * min(tokens, rows) * vocab_size + (2 + WIDE * chunks) * vocab_size * d_model


def _adapted(model: config.TransformerConfig, layers: list[float], adapter: LoRA, *, n: int) -> list[float]:
    """Return the activations of the layers if they are frozen and some of their products have an adapter."""
    settings = model.feedforward
    adapted = {linear.name for linear in adapted_linears(model, adapter)}
    # inputs that are stored anyway: the output of attention, and of activations such as relu
    stored_anyway = ["attention.out", "cross.out"]
    if not isinstance(settings, Gated) and settings.activation in OUTPUT_ACTIVATIONS:
        stored_anyway.append("feedforward.down")
    sizes: list[float] = []
    needs_gradient = False  # only from the lowest adapter on
    for size, block in zip(layers, layers_linears(model), strict=True):
        needs_gradient = needs_gradient or any(linear.name in adapted for linear in block)
        for linear in block:
            shared = any(linear.name.endswith(name) for name in stored_anyway)
            if linear.name in adapted:
                size += n * len(linear.heights) * adapter.rank
                size += (1 + (n if shared else 0)) * linear.inputs if adapter.dropout else 0
            elif not shared:
                size -= n * linear.inputs
        sizes.append(size if needs_gradient else 0.0)
    return sizes


def _attention(model: config.TransformerConfig, n: int, cross: bool) -> int:
    H, G, d_head, latent = model.attention.heads, model.attention.groups, model.d_head, model.attention.latent
    if latent is not None:  # inputs and outputs of the norms, keys and values, queries and keys before rotation
        compressed = 2 * (latent.rank + (latent.query_rank or 0)) + model.rotated
        return n * (compressed + H * (4 * d_head + 2 * model.d_v)) + WIDE * H
    size = n * (H + G) * (d_head + model.d_v) + WIDE * H
    if (model.position.rotates and not cross) or model.attention.qk_norm is not None:
        size += n * (H + G) * d_head  # queries and keys before they are rotated or normalised
    if model.attention.qk_norm is not None and n != WIDE:
        size += WIDE * (H + G) * d_head
    return size


def _feedforward(settings: Plain | Gated | Experts | NoFeedForward, D: int, n: int, *, compiled: bool) -> int:
    if isinstance(settings, Experts):
        # each chosen expert has a copy of the token, and the router its logits and probabilities
        rows = settings.chosen * n * ((3 if compiled else 4) * settings.d_ff + 2 * D) + 2 * WIDE * settings.experts
        return rows + (3 if compiled else 4) * n * settings.shared_width + n * D * int(settings.shared != "none")
    mask = settings.d_ff if settings.dropout else 0
    if isinstance(settings, Gated):
        return (3 if compiled else 4) * n * settings.d_ff + mask
    return (1 if settings.activation in OUTPUT_ACTIVATIONS else 2) * n * settings.d_ff + mask
