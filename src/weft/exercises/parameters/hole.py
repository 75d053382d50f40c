def parameters(vocab_size: int, context: int, layers: int, d_model: int) -> int:
    """Return the number of parameters."""
    embeddings = ...  # V d + T d: a vector for each word and for each position
    attention = ...  # 4 d² + 4 d: queries, keys, values and output, with biases
    feedforward = ...  # 8 d² + 5 d: d → 4d → d, with biases
    norms = ...  # 4 d: two LayerNorms per layer, with gain and bias each
    total = ...  # embeddings + layers (attention + feedforward + norms) + 2 d of the last norm; the output shares the word embeddings
    return total
