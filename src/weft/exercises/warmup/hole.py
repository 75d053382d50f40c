def warmup(step: int, d_model: int, warmup: int) -> float:
    """Return the learning rate of a step."""
    rate = ...  # d_model^−0.5 · min(step^−0.5, step · warmup^−1.5)
    return rate
