"""F2 (lecture 3): eight sentences become a batch: truncate, build the vocabulary, pad, look up.

To see it: python -m pytest tests/lectures/test_f02_batch.py -s
"""

from weft.data.batch import pad
from weft.text.config import Specials, Word
from weft.text.tokenizer import build_tokenizer

SENTENCES = """\
In the hole in the ground there lived a hobbit
It is our choices that show what we truly are
It was the best of times it was the worst of times
Even miracles take a little time
The more that you read the more things you will know
We'll always have each other no matter what happens
The sun did not shine it was too wet to play
The important thing is to never stop questioning"""

BLOCK = 10
MATRIX = [
    [2, 41, 17, 19, 41, 13, 42, 23, 6, 16],
    [3, 20, 32, 10, 40, 36, 53, 51, 49, 8],
    [3, 50, 41, 9, 30, 46, 21, 50, 41, 55],
    [1, 25, 39, 6, 22, 45, 0, 0, 0, 0],
    [4, 26, 40, 56, 34, 41, 26, 44, 56, 54],
    [5, 7, 15, 12, 31, 28, 24, 53, 14, 0],
    [4, 38, 11, 29, 35, 21, 50, 48, 52, 47],
    [4, 18, 43, 20, 47, 27, 37, 33, 0, 0],
]


def test_the_slide_matrix() -> None:
    cut = [" ".join(line.split()[:BLOCK]) for line in SENTENCES.splitlines()]
    tokenizer = build_tokenizer(Word(order="codepoint", specials=Specials(pad="<PAD>")), cut)
    assert tokenizer.vocab_size == 57
    known = {"<PAD>": 0, "Even": 1, "In": 2, "It": 3, "The": 4, "We'll": 5, "a": 6, "will": 54, "worst": 55, "you": 56}
    assert {word: tokenizer.id(word) for word in known} == known
    ids, mask = pad(tokenizer.encode_batch(cut), tokenizer.pad_id)
    print(ids)
    assert ids.tolist() == MATRIX
    assert mask.sum(1).tolist() == [10, 10, 10, 6, 10, 9, 10, 8]
