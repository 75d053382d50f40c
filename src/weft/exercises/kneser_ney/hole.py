def kneser_ney(words: list[str], v: str, w: str, D: float) -> float:
    """Return the interpolated Kneser–Ney probability p(w | v)."""
    c = ...  # c(v, w): how often w follows v
    total = ...  # c(v) = Σ_w c(v, w)
    followers = ...  # N₁₊(v, ·): how many distinct words follow v
    continuation = ...  # N₁₊(·, w)/N₁₊(·, ·): of all distinct bigrams, the share that ends in w
    p = ...  # max(c(v, w) − D, 0)/c(v) + D N₁₊(v, ·)/c(v) · continuation; the continuation alone if v begins no bigram
    return p
