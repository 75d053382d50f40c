"""Next-sentence pairs."""

from typing import Any


def next_sentence(
    documents: list[list[list[int]]], d: int, i: int, coin: float, other: int, j: int, cls: int, sep: int
) -> tuple[list[int], list[int], int]:
    """Return tokens, segments and the label."""
    label = int(coin < 0.5)
    a = documents[d][i]
    b = documents[d][i + 1] if label else documents[other][j]
    tokens = [cls, *a, sep, *b, sep]
    segments = [0] * (len(a) + 2) + [1] * (len(b) + 1)
    return tokens, segments, label


def cases(draw: Any) -> Any:
    def arguments(coin: float) -> dict[str, Any]:
        documents = [
            [[10 * n + s * 3 + k for k in range(draw.random.randrange(1, 4))] for s in range(4)] for n in range(1, 4)
        ]
        d = draw.random.randrange(3)
        other = (d + draw.random.randrange(1, 3)) % 3
        i, j = draw.random.randrange(3), draw.random.randrange(4)
        return {"documents": documents, "d": d, "i": i, "coin": coin, "other": other, "j": j, "cls": 2, "sep": 3}

    yield "the successor", arguments(0.2)
    yield "another document", arguments(0.8)
    yield "the border: 0.5 is not below 0.5", arguments(0.5)
    short = arguments(0.1)
    yield (
        "single words",
        short | {"documents": [[[7], [8]], [[9], [5]], [[6], [4]]], "d": 0, "i": 0, "other": 2, "j": 1},
    )
