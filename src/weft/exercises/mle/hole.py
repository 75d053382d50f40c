def mle(texts: list[list[str]], N: int) -> dict[tuple[str, ...], dict[str, float]]:
    """Return p(w | h) of all n-grams of length N, by context h and word w."""
    counts = ...  # c(h, w): how often the word w follows the context h of N − 1 words within a text
    p = ...  # p(w | h) = c(h, w) / Σ_w' c(h, w'), as {h: {w: p}}; h is a tuple of words
    return p
