"""Predict the time of a Transformer's passes on a device: a roofline of products, attention and memory traffic.

A product of (m, k) and (k, n) takes 2mkn FLOPs at the rate that large products reach, plus `SPILL` of the time to read
both operands and write the result; the rest of that time is hidden by the FLOPs.

Fused attention compares each query with the keys that it sees (half of them under a causal mask, plus the blocks on the
diagonal). A pair of query and key takes 4 · d_head FLOPs forward and 10 · d_head backward, and the time of `PAIR`
exponentials for the softmax, over both passes. Unfused attention computes all products and moves the T × T scores
several times.

Everything else is memory traffic, fused as a compiler does it, at `TRAFFIC` of the bandwidth. Without a compiler it is
`EAGER` times as much.

`published.md` lists which constants were fitted, and to what.
"""

from dataclasses import dataclass

from weft.costs.devices import Device
from weft.costs.linears import block_linears, layer_shares, stacks
from weft.costs.memory import narrow
from weft.models import config
from weft.nn.config import Experts, Gated

SPILL = 0.3  # fraction of a product's memory time that its FLOPs don't hide
TRAFFIC = 0.8  # fraction of the bandwidth that elementwise kernels reach
PAIR = 8.6  # time of the softmax per pair of query and key, in exponentials
DROPOUT_SLOWDOWN = 2.0  # factor on attention with dropout: a mask is drawn, and sums have a fixed order
DIAGONAL = 64  # keys per query computed beyond a causal mask: half a block
EAGER = 4.0  # factor on memory traffic without a compiler
FP8_SPEEDUP = 2.0  # factor on the rate of FP8 products, by the data sheets
SCALING_BYTES = 5  # bytes moved per value that is converted to FP8: two reads, one write
LAUNCH = 3e-6  # seconds between two GPU kernels
KERNELS = 12  # kernels of a layer's pass besides products
OTHER = 1.05  # factor for everything else in a profile
SCORES = (6.5, 9.5)  # times that unfused attention moves its scores, forward and backward


@dataclass(frozen=True)
class Software:
    """Software that runs the passes."""

    compiled: bool = True  # elementwise operations are fused
    fused_attention: bool = True
    hidden_tensor: bool = False  # tensor-parallel collectives overlap with their products


@dataclass(frozen=True)
class MicroBatch:
    """Micro-batch of one device: `rows` sequences of `length` tokens."""

    rows: int
    length: int
    tensor: int = 1  # devices that matrices are split over
    sequence: bool = False  # activations between the matrices are split over `tensor` too
    context: int = 1  # devices that tokens are split over

    @property
    def tokens(self) -> int:
        return self.rows * -(-self.length // self.context)


@dataclass(frozen=True)
class Seconds:
    """Seconds of a layer, each as (forward, backward)."""

    products: tuple[float, float] = (0.0, 0.0)
    attention: tuple[float, float] = (0.0, 0.0)
    traffic: tuple[float, float] = (0.0, 0.0)

    @property
    def forward(self) -> float:
        return self.products[0] + self.attention[0] + self.traffic[0]

    @property
    def backward(self) -> float:
        return self.products[1] + self.attention[1] + self.traffic[1]

    def recompute(self, share: float) -> float:
        """Return the seconds of recomputing `share` of the products; attention only if everything is recomputed."""
        if not share:
            return 0.0
        return share * self.products[0] + self.traffic[0] + (self.attention[0] if share == 1 else 0.0)


@dataclass(frozen=True)
class Roofline:
    """Roofline of a device with a precision and software."""

    device: Device
    precision: str
    software: Software = Software()

    @property
    def width(self) -> int:
        """Bytes of a value between products."""
        return narrow(self.precision)

    @property
    def rate(self) -> float:
        """FLOP/s of large products."""
        return self.device.peak(self.precision) * self.device.share

    def product(self, m: int, k: int, n: int, *, fp8: bool = False) -> float:
        """Return the seconds of a product of (m, k) and (k, n)."""
        moved, rate = self.width * (m * k + k * n + m * n), self.rate * (FP8_SPEEDUP if fp8 else 1)
        seconds = LAUNCH + 2 * m * k * n / rate + SPILL * moved / self.device.bandwidth
        return seconds + (self.move(SCALING_BYTES * (m * k + k * n)) if fp8 else 0.0)

    def linear(self, tokens: int, inputs: int, outputs: int, *, fp8: bool = False) -> tuple[float, float]:
        """Return the seconds of a linear layer, forward and backward."""
        forward = self.product(tokens, inputs, outputs, fp8=fp8)
        return forward, self.product(tokens, outputs, inputs, fp8=fp8) + self.product(inputs, tokens, outputs, fp8=fp8)

    def move(self, bytes_: float) -> float:
        """Return the seconds to read and write this many bytes."""
        return bytes_ / (TRAFFIC * self.device.bandwidth)

    def layers(self, model: config.TransformerConfig, batch: MicroBatch) -> list[Seconds]:
        return [self._layer(model, batch, causal=causal, cross=cross) for _, causal, cross in stacks(model)]

    def _layer(self, model: config.TransformerConfig, batch: MicroBatch, *, causal: bool, cross: bool) -> Seconds:
        tokens, t = batch.tokens, batch.tensor
        forward = backward = 0.0
        for layer, share in layer_shares(model, model.layers):
            for linear in block_linears(model, cross, layer=layer):
                inputs, outputs = linear.inputs, sum(linear.heights)
                inputs, outputs = (inputs // t, outputs) if linear.by_rows else (inputs, outputs // t)
                fp8 = self.precision == "fp8" and linear.experts == 1
                seconds = self.linear(tokens * linear.chosen, inputs, outputs, fp8=fp8)
                others = self.move(self.width * (linear.experts - 1) * inputs * outputs)  # read by grouped products
                forward, backward = (
                    forward + share * (seconds[0] + others),
                    backward + share * (seconds[1] + 2 * others),
                )
        attention = self._attention(model, batch, causal)
        if cross:
            cross_attention = self._attention(model, batch, False)
            attention = (attention[0] + cross_attention[0], attention[1] + cross_attention[1])
        return Seconds((forward, backward), attention, self._traffic(model, batch, cross))

    def _attention(self, model: config.TransformerConfig, batch: MicroBatch, causal: bool) -> tuple[float, float]:
        T, heads = batch.length, model.attention.heads // batch.tensor
        d_head = (model.d_head + model.d_v) / 2  # scores read keys, and the mean reads values
        queries = batch.tokens * heads
        if not self.software.fused_attention:
            pairs: float = queries * T
            step = 2 * pairs * d_head / self.rate + LAUNCH
            spill = SPILL * self.width * 2 * queries * d_head / self.device.bandwidth
            forward, backward = (self.width * times * pairs for times in SCORES)
            return 2 * (step + spill) + self.move(forward), 4 * (step + spill) + self.move(backward)
        seen = T / 2 + DIAGONAL if causal else T
        kinds = model.kinds()
        pairs = queries * sum(min(seen, T, kind.reach or T) for kind in kinds) / len(kinds)
        softmax = PAIR * pairs / (self.device.fp32 / 2 * 16 / self.device.lanes)
        slowdown = DROPOUT_SLOWDOWN if model.attention.dropout else 1.0
        softmax, rate = slowdown * softmax, self.rate / slowdown
        forward, backward = (products * d_head * pairs / rate for products in (4, 10))
        return LAUNCH + forward + softmax * 4 / 14, LAUNCH + backward + softmax * 10 / 14

    def _traffic(self, model: config.TransformerConfig, batch: MicroBatch, cross: bool) -> tuple[float, float]:
        """Return the seconds of norms with residual connections, rotations, activations and gradients of biases."""
        D, t, inner = model.d_model, batch.tensor, model.feedforward
        # a mixture copies its tokens to the experts and back, which is about as much as another 2 · d_model
        routed = isinstance(inner, Experts)
        d_ff = inner.chosen * (inner.d_ff + 2 * D) + inner.shared_width if isinstance(inner, Experts) else inner.d_ff
        H, G = model.attention.heads * model.d_head, model.attention.groups * model.d_head
        sublayers, between = 3 if cross else 2, batch.tokens / (t if batch.sequence else 1)
        gated = routed or isinstance(inner, Gated)
        rotated = 2 * (H + G) if model.position.rotates else 0
        biased = sum(sum(linear.heights) for linear in block_linears(model, cross) if linear.bias)
        masks = D * sublayers if model.dropout else 0
        forward = between * (4 * D * sublayers + masks) + batch.tokens / t * (rotated + (3 if gated else 2) * d_ff)
        inside = rotated + 2 * (H + 2 * G) + (5 if gated else 3) * d_ff + biased
        backward = between * (5 * D * sublayers + masks) + batch.tokens / t * inside
        factor = 1.0 if self.software.compiled else EAGER
        launches = KERNELS * factor * LAUNCH
        return launches + self.move(factor * self.width * forward), launches + self.move(factor * self.width * backward)

    def logits(self, d_model: int, vocab_size: int, tokens: int) -> tuple[float, float]:
        """Return the seconds of the logits and their loss, which reads them twice and writes the gradient."""
        forward, backward = self.linear(tokens, d_model, vocab_size) if vocab_size else (0.0, 0.0)
        traffic = self.move(3 * self.width * tokens * vocab_size)
        return forward + traffic / 3, backward + traffic * 2 / 3
