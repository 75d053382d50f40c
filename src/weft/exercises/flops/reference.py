"""FLOPs of a Transformer."""

from typing import Any


def flops(layers: int, d_model: int, d_ff: int, T: int, vocab_size: int) -> tuple[int, list[float]]:
    """Return the operations of one token's forward pass, and the shares of its four parts."""
    projections = layers * 8 * d_model**2
    scores = layers * 4 * T * d_model
    feedforward = layers * 4 * d_model * d_ff
    logits = 2 * d_model * vocab_size
    forward = projections + scores + feedforward + logits
    shares = [part / forward for part in (projections, scores, feedforward, logits)]
    return forward, shares


def cases(draw: Any) -> Any:
    yield "GPT-2", {"layers": 12, "d_model": 768, "d_ff": 3072, "T": 1024, "vocab_size": 50257}
    yield "OPT 175B", {"layers": 96, "d_model": 12288, "d_ff": 49152, "T": 2048, "vocab_size": 50272}
    yield "one layer", {"layers": 1, "d_model": 4, "d_ff": 16, "T": 2, "vocab_size": 10}
    sizes = [draw.random.randrange(2, 200) for _ in range(5)]
    yield "random", dict(zip(("layers", "d_model", "d_ff", "T", "vocab_size"), sizes, strict=True))
