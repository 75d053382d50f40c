"""Count GPT-2's parameters."""

from typing import Any


def parameters(vocab_size: int, context: int, layers: int, d_model: int) -> int:
    """Return the number of parameters."""
    embeddings = vocab_size * d_model + context * d_model
    attention = 4 * d_model**2 + 4 * d_model
    feedforward = 8 * d_model**2 + 5 * d_model
    norms = 4 * d_model
    total = embeddings + layers * (attention + feedforward + norms) + 2 * d_model
    return total


def cases(draw: Any) -> Any:
    for layers, d_model in ((12, 768), (24, 1024), (36, 1280), (48, 1600)):
        yield f"GPT-2, {d_model} wide", {"vocab_size": 50257, "context": 1024, "layers": layers, "d_model": d_model}
    yield "no layers", {"vocab_size": 10, "context": 4, "layers": 0, "d_model": 6}
    sizes = [draw.random.randrange(1, 100) for _ in range(4)]
    yield "random", dict(zip(("vocab_size", "context", "layers", "d_model"), sizes, strict=True))
