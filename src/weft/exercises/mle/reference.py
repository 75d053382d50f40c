"""Maximum likelihood by counting."""

from typing import Any

SNIPPETS = """the cows eat grass / our cows eat hay daily / factory-farm cows eat corn / on an organic farm , cows eat
hay and / do your cows eat grass or corn ? / what do cows eat if they have / cows eat corn when there is no / which cows
eat which foods depends / if cows eat grass / when cows eat corn their stomachs / should we let cows eat corn ?"""


def mle(texts: list[list[str]], N: int) -> dict[tuple[str, ...], dict[str, float]]:
    """Return p(w | h) of all n-grams of length N, by context h and word w."""
    counts: dict[tuple[str, ...], dict[str, int]] = {}
    for text in texts:
        for t in range(len(text) - N + 1):
            h, w = tuple(text[t : t + N - 1]), text[t + N - 1]
            counts.setdefault(h, {})
            counts[h][w] = counts[h].get(w, 0) + 1
    p = {h: {w: c / sum(die.values()) for w, c in die.items()} for h, die in counts.items()}
    return p


def cases(draw: Any) -> Any:
    yield "the slide's cows", {"texts": [snippet.split() for snippet in SNIPPETS.split(" / ")], "N": 3}
    words = [[draw.random.choice("abc") for _ in range(draw.random.randrange(0, 9))] for _ in range(5)]
    yield "random", {"texts": [*words, ["a", "b", "a"]], "N": 2}
    yield "single words", {"texts": [["a", "b"], ["a", "a", "c"]], "N": 1}
    yield "a text shorter than N", {"texts": [["a"], ["a", "b", "c", "a", "b", "d"]], "N": 3}


def growth(draw: Any, size: int) -> dict[str, Any]:
    return {"texts": [[draw.random.choice("abcd") for _ in range(size)]], "N": 2}
