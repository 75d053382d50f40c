def bpe_merges(words: dict[str, int], count: int) -> list[tuple[str, str]]:
    """Return the first `count` pairs that are merged, in order."""
    pairs = ...  # how often each pair of neighbouring pieces occurs, counted over all words with their frequencies
    best = ...  # the most frequent pair; of equally frequent ones the alphabetically first
    merges = ...  # the pairs in the order in which they were merged
    return merges
