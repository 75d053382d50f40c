"""Speculative decoding's acceptance rule."""

from typing import Any

from torch import Tensor


def speculative(p: Tensor, q: Tensor, guesses: list[int], u: Tensor, r: float) -> list[int]:
    """Return the accepted guesses, and one token more."""
    kept: list[int] = []
    rejected = None
    for i, x in enumerate(guesses):
        accepted = bool(u[i] * q[i, x] < p[i, x])
        if accepted:
            kept.append(x)
        else:
            rejected = i
            break
    i = len(guesses) if rejected is None else rejected
    rest = p[i]
    if rejected is not None:
        rest = (p[i] - q[i]).clamp(min=0)
        rest = rest / rest.sum()
    drawn = int((rest.cumsum(dim=0) <= r).sum().clamp(max=len(rest) - 1))
    tokens = [*kept, drawn]
    return tokens


def cases(draw: Any) -> Any:
    def arguments(n: int, V: int, closeness: float) -> dict[str, Any]:
        p = draw.probabilities(n + 1, V)
        q = closeness * p[:n] + (1 - closeness) * draw.probabilities(n, V)
        guesses = [draw.random.choices(range(V), row.tolist())[0] for row in q]
        return {"p": p, "q": q, "guesses": guesses, "u": draw.uniform(n), "r": draw.random.random()}

    yield "random", arguments(4, 5, 0.3)
    yield "similar models", arguments(5, 4, 0.9)
    yield "different models", arguments(3, 6, 0.0)
    yield "one guess", arguments(1, 3, 0.5)
    kept = arguments(3, 4, 0.5)
    yield "all are kept", kept | {"u": 0 * kept["u"]}
    yield (
        "the first is rejected",
        kept | {"u": 0 * kept["u"] + 0.999, "guesses": [int(each.argmin()) for each in kept["p"][:3] - kept["q"]]},
    )
    yield "many guesses", arguments(8, 4, 0.6)
