"""How long the passes of a Transformer take on a device: a roofline of matrix products, attention and memory traffic.

Seconds of a product of (m, k) and (k, n): 2mkn operations at the share of the peak that large products reach, and
`SPILL` of the time that reading both and writing the result takes; what is left of it hides behind the operations.

Fused attention compares each query with the keys that it sees (half under a causal mask, and the blocks on the
diagonal). A pair costs 4 · d_head operations forward and 10 back, and `PAIR` exponentials' time for the softmax, both
passes together. Plain attention does all products and moves the T × T scores several times.

Everything else is traffic: numbers read and written, fused as a compiler fuses them, at `TRAFFIC` of the bandwidth.
Without a compiler it is `EAGER` times as much.

What was fitted, and to what, stands in `published.md`.
"""

from dataclasses import dataclass

from weft.costs.count import block_linears, stacks
from weft.costs.devices import Device
from weft.costs.memory import narrow
from weft.models import config
from weft.nn.config import Gated

SPILL = 0.3
TRAFFIC = 0.8
PAIR = 8.6
DROPOUT_SLOWDOWN = 2.0  # of attention: a mask is drawn, and every sum has one order
DIAGONAL = 64  # half a block of keys: what is computed beyond a causal mask
EAGER = 4.0
FP8_SPEEDUP = 2.0  # of products, by the data sheets
SCALING = 5  # bytes moved for each number that is brought to eight bits: read twice, written once
LAUNCH = 3e-6  # seconds of a GPU between two kernels
KERNELS = 12  # of a layer's pass that are no products
OTHER = 1.05  # what a profile shows besides all of these
SCORES = (6.5, 9.5)  # times that plain attention moves its scores, forward and back


@dataclass(frozen=True)
class Software:
    """How the passes are run: elementwise operations fused by a compiler; attention fused."""

    compiled: bool = True
    fused_attention: bool = True
    hidden_tensor: bool = False  # tensor parallelism's collectives run beside the products they belong to


@dataclass(frozen=True)
class Part:
    """What one device reads at a time: `rows` sequences of `length` tokens; matrices are split over `tensor` devices,
    tokens over `context`, and, with `sequence`, what runs between the matrices over `tensor` too."""

    rows: int
    length: int
    tensor: int = 1
    sequence: bool = False
    context: int = 1

    @property
    def tokens(self) -> int:
        return self.rows * -(-self.length // self.context)


@dataclass(frozen=True)
class Seconds:
    """Of a forward pass and a backward pass, by what takes them."""

    products: tuple[float, float] = (0.0, 0.0)
    attention: tuple[float, float] = (0.0, 0.0)
    traffic: tuple[float, float] = (0.0, 0.0)

    @property
    def forward(self) -> float:
        return self.products[0] + self.attention[0] + self.traffic[0]

    @property
    def backward(self) -> float:
        return self.products[1] + self.attention[1] + self.traffic[1]

    def again(self, share: float) -> float:
        """Of running `share` of the products again; fused attention only where everything is."""
        if not share:
            return 0.0
        return share * self.products[0] + self.traffic[0] + (self.attention[0] if share == 1 else 0.0)


@dataclass(frozen=True)
class Roofline:
    """A device, the precision of its products, and how its passes are run."""

    device: Device
    precision: str
    software: Software = Software()

    @property
    def number(self) -> int:
        """Bytes of a number between products."""
        return narrow(self.precision)

    @property
    def rate(self) -> float:
        """Operations a second of large products."""
        return self.device.peak(self.precision) * self.device.share

    def product(self, m: int, k: int, n: int, fp8: bool = False) -> float:
        """Seconds of (m, k) · (k, n)."""
        moved, rate = self.number * (m * k + k * n + m * n), self.rate * (FP8_SPEEDUP if fp8 else 1)
        seconds = LAUNCH + 2 * m * k * n / rate + SPILL * moved / self.device.bandwidth
        return seconds + (self.move(SCALING * (m * k + k * n)) if fp8 else 0.0)

    def linear(self, tokens: int, inputs: int, outputs: int, fp8: bool = False) -> tuple[float, float]:
        """Seconds of a linear layer forward, and of both gradients."""
        forward = self.product(tokens, inputs, outputs, fp8)
        return forward, self.product(tokens, outputs, inputs, fp8) + self.product(inputs, tokens, outputs, fp8)

    def move(self, bytes_: float) -> float:
        """Seconds of reading and writing bytes."""
        return bytes_ / (TRAFFIC * self.device.bandwidth)

    def layers(self, model: config.TransformerConfig, part: Part) -> list[Seconds]:
        return [self._layer(model, part, causal, cross) for _, causal, cross in stacks(model)]

    def _layer(self, model: config.TransformerConfig, part: Part, causal: bool, cross: bool) -> Seconds:
        tokens, t = part.tokens, part.tensor
        forward = backward = 0.0
        for linear in block_linears(model, cross):
            inputs, outputs = linear.inputs, sum(linear.heights)
            inputs, outputs = (inputs // t, outputs) if linear.by_rows else (inputs, outputs // t)
            there, back = self.linear(tokens, inputs, outputs, self.precision == "fp8")
            forward, backward = forward + there, backward + back
        attention = self._attention(model, part, causal)
        if cross:
            over = self._attention(model, part, False)
            attention = (attention[0] + over[0], attention[1] + over[1])
        return Seconds((forward, backward), attention, self._traffic(model, part, cross))

    def _attention(self, model: config.TransformerConfig, part: Part, causal: bool) -> tuple[float, float]:
        T, d_head, heads = part.length, model.d_head, model.attention.heads // part.tensor
        queries = part.tokens * heads
        if not self.software.fused_attention:
            pairs: float = queries * T
            step = 2 * pairs * d_head / self.rate + LAUNCH
            spill = SPILL * self.number * 2 * queries * d_head / self.device.bandwidth
            there, back = (self.number * times * pairs for times in SCORES)
            return 2 * (step + spill) + self.move(there), 4 * (step + spill) + self.move(back)
        seen = T / 2 + DIAGONAL if causal else T
        kinds = model.kinds()
        pairs = queries * sum(min(seen, T, kind.window or T) for kind in kinds) / len(kinds)
        softmax = PAIR * pairs / self.device.exponentials
        times = DROPOUT_SLOWDOWN if model.attention.dropout else 1.0
        softmax, rate = times * softmax, self.rate / times
        there, back = (products * d_head * pairs / rate for products in (4, 10))
        return LAUNCH + there + softmax * 4 / 14, LAUNCH + back + softmax * 10 / 14

    def _traffic(self, model: config.TransformerConfig, part: Part, cross: bool) -> tuple[float, float]:
        """Norms with the skip connection before them, rotations, activation functions, biases' gradients."""
        D, d_ff, t = model.d_model, model.feedforward.d_ff, part.tensor
        H, G = model.attention.heads * model.d_head, model.attention.groups * model.d_head
        sublayers, between = 3 if cross else 2, part.tokens / (t if part.sequence else 1)
        gated = isinstance(model.feedforward, Gated)
        rotated = 2 * (H + G) if model.position.rotates else 0
        biased = sum(sum(linear.heights) for linear in block_linears(model, cross) if linear.bias)
        masks = D * sublayers if model.dropout else 0
        forward = between * (4 * D * sublayers + masks) + part.tokens / t * (rotated + (3 if gated else 2) * d_ff)
        inside = rotated + 2 * (H + 2 * G) + (5 if gated else 3) * d_ff + biased
        backward = between * (5 * D * sublayers + masks) + part.tokens / t * inside
        times = 1.0 if self.software.compiled else EAGER
        starts = KERNELS * times * LAUNCH
        return starts + self.move(times * self.number * forward), starts + self.move(times * self.number * backward)

    def logits(self, d_model: int, vocab_size: int, tokens: int) -> tuple[float, float]:
        """Of the logits of `tokens` tokens and their loss, which reads them twice and writes the gradient."""
        V = vocab_size
        there, back = self.linear(tokens, d_model, V) if V else (0.0, 0.0)
        traffic = self.move(3 * self.number * tokens * V)
        return there + traffic / 3, back + traffic * 2 / 3
