def flops(layers: int, d_model: int, d_ff: int, T: int, vocab_size: int) -> tuple[int, list[float]]:
    """Return the operations of one token's forward pass, and the shares of its four parts."""
    projections = ...  # layers · 8 d²: Q, K, V and output per token; a product with an m × n matrix is 2mn operations
    scores = ...  # layers · 4 T d: QKᵀ and the sum of the values, over all T keys
    feedforward = ...  # layers · 4 d d_ff
    logits = ...  # 2 d V
    forward = ...  # the sum, per token
    shares = ...  # the four parts divided by the sum, in this order
    return forward, shares
