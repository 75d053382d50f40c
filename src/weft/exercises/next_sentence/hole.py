def next_sentence(
    documents: list[list[list[int]]], d: int, i: int, coin: float, other: int, j: int, cls: int, sep: int
) -> tuple[list[int], list[int], int]:
    """Return tokens, segments and the label."""
    label = ...  # 1 if coin < 0.5, else 0: whether b is the successor of a
    a = ...  # sentence i of document d
    b = ...  # sentence i + 1 of the same document if the label is 1, else sentence j of the other document
    tokens = ...  # [CLS] a [SEP] b [SEP], as a list of ids
    segments = ...  # 0 up to and including the first [SEP], then 1
    return tokens, segments, label
