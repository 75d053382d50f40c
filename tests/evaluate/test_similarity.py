"""Word similarity: file formats of rated pairs, correlations, and words without a vector."""

from pathlib import Path

import numpy as np
import pytest
from tests.later import Later

from weft.errors import DataError
from weft.evaluate.agreement import cosine, read_pairs, similarity

stats = Later("scipy.stats")

POINTS = {"cup": [1.0, 0.1], "mug": [0.9, 0.2], "sea": [0.0, 1.0], "lake": [0.3, 0.8]}
VECTORS = {word: np.array(point, dtype=np.float32) for word, point in POINTS.items()}
EXPECTED = [("cup", "mug", 9.0), ("sea", "lake", 7.5), ("cup", "sea", 1.0)]


@pytest.mark.parametrize(
    "content",
    [
        "# a comment\n# Word 1\tWord 2\tHuman (mean)\ncup\tmug\t9\nsea\tlake\t7.50\r\ncup\tsea\t1\n",
        "Word 1,Word 2,Human (mean)\ncup,mug,9\n\nsea,lake,7.5\ncup,sea,1.0",
        "cup mug 9.0\nsea   lake 7.5\ncup sea 1\n",
        "word1\tword2\tPOS\tSimLex999\tconc(w1)\ncup\tmug\tN\t9\t4.9\nsea\tlake\tN\t7.5\t4.8\ncup\tsea\tN\t1\t5\n",
        "cup;mug;9\nsea;lake;7.5e0\ncup;sea;+1.\n",
    ],
)
def test_formats(tmp_path: Path, content: str) -> None:
    (tmp_path / "pairs.txt").write_text(content, newline="")
    assert read_pairs(str(tmp_path / "pairs.txt")) == EXPECTED


def test_equal_ratings_have_no_correlation() -> None:
    with pytest.raises(DataError, match="all 2 pairs are rated 5"):
        similarity([("cup", "mug", 5.0), ("sea", "lake", 5.0)], VECTORS.get)


def test_the_correlation_is_of_cosines_and_scores() -> None:
    found = similarity(EXPECTED, VECTORS.get)
    cosines = [cosine(VECTORS[a], VECTORS[b]) for a, b, _ in EXPECTED]
    assert found.spearman == pytest.approx(1.0)
    assert found.pearson == pytest.approx(stats.pearsonr(cosines, [9.0, 7.5, 1.0]).statistic)
    assert (found.pairs, found.left_out, found.missing) == (3, 0, ())
    assert cosine(VECTORS["cup"], np.zeros(2, dtype=np.float32)) == 0.0


def test_words_without_a_vector_are_counted_and_named() -> None:
    pairs = [*EXPECTED, ("cup", "quaff", 5.0), ("quaff", "swig", 8.0)]
    found = similarity(pairs, VECTORS.get)
    assert (found.pairs, found.left_out, found.missing) == (3, 2, ("quaff", "swig"))
    with pytest.raises(DataError, match="1 of 2 pairs have both words in the vocabulary"):
        similarity([EXPECTED[0], pairs[-1]], VECTORS.get)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("cup\tmug\t9\ncup\tsea\n", "line 2: expected two words and a number"),
        ("cup mug nine\nsea lake many\n", "line 2: expected two words and a number"),
        ("# only comments\n", "holds no pairs"),
        ("word word score\n", "a header, but no pairs"),
        ("cup,,9\n", "line 1: expected two words"),
    ],
)
def test_files_without_pairs_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "pairs.txt").write_text(content)
    with pytest.raises(DataError, match=message):
        read_pairs(str(tmp_path / "pairs.txt"))
    with pytest.raises(DataError, match="no such file"):
        read_pairs(str(tmp_path / "none.tsv"))
