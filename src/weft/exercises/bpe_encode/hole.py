def bpe_encode(word: str, merges: list[tuple[str, str]]) -> list[str]:
    """Return the pieces of a word."""
    known = ...  # the pairs of neighbouring pieces that were learned, with their ranks
    best = ...  # the pair of lowest rank, the one learned first
    pieces = ...  # all occurrences of the best pair joined from left to right; repeated until no pair is known
    return pieces
