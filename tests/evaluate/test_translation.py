"""BLEU and chrF equal sacreBLEU's; ROUGE-L equals the paper's."""

import random

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from weft.evaluate import translation as t

TEXTS = ["The cat sat on the mat.", "A dog runs through the green field today.", "Nobody knows."]
REFERENCES = ["The cat sat on a mat.", "A dog is running through the green field.", "Nobody knows it."]


def test_bleu_and_chrf_equal_sacrebleus() -> None:
    found = t.translation_metrics(TEXTS, REFERENCES)
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(TEXTS, [REFERENCES]).score)
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(TEXTS, [REFERENCES]).score)
    assert found["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert found["exact"] == 0.0


def test_intervals_are_a_bootstrap_over_rows() -> None:
    texts, references = TEXTS * 20, [*REFERENCES[:2], TEXTS[2]] * 20
    found = t.translation_metrics(texts, references)
    for key in ("bleu", "chrf", "rouge_l", "exact"):
        low, high = found["intervals"][key]
        assert low < found[key] < high
    score = sacrebleu.metrics.BLEU().corpus_score(texts, [references], n_bootstrap=1000)
    low, high = found["intervals"]["bleu"]
    assert (low, high) == pytest.approx((score._mean - score._ci, score._mean + score._ci), abs=1.5)
    assert t.translation_metrics(TEXTS[:1], REFERENCES[:1])["intervals"] == {}


def test_bleu_is_left_out_for_short_references() -> None:
    short = ["1999", "two cats", "eins zwei drei"]
    for texts, exact in ((short, 1.0), (["", "two", "drei"], 0.0)):
        found = t.translation_metrics(texts, short)
        assert not {"bleu", "bleu_signature"} & found.keys() and "bleu" not in found["intervals"]
        assert found["exact"] == exact
    assert t.translation_metrics([*short, "a b c d"], [*short, "a b c d"])["bleu"] == pytest.approx(100.0)


def test_equal_texts_have_perfect_scores() -> None:
    found = t.translation_metrics(REFERENCES, REFERENCES)
    assert (found["bleu"], found["chrf"]) == pytest.approx((100.0, 100.0))
    assert (found["rouge_l"], found["exact"]) == (1.0, 1.0)


@pytest.mark.slow
def test_rouge_l_equals_the_rouge_score_package() -> None:
    package = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    words, rng = ["Anna", "opened", "a", "school", "in", "Rome", "x2", "not"], random.Random(0)
    for _ in range(200):
        text, reference = (" ".join(rng.choices(words, k=rng.randint(0, 9))) + "." for _ in range(2))
        assert t.rouge_l(text, reference) == pytest.approx(package.score(reference, text)["rougeL"].fmeasure)


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        ("police kill the gunman", "police killed the gunman", 3 / 4),  # Lin 2004, §3.1
        ("the gunman kill police", "police killed the gunman", 2 / 4),
        ("The gunman, police killed.", "police killed the gunman", 2 / 4),
        ("a b", "a b c d", 2 * 1.0 * 0.5 / 1.5),
        ("", "a", 0.0),
        ("...", "a", 0.0),
    ],
)
def test_rouge_l(text: str, reference: str, expected: float) -> None:
    assert t.rouge_l(text, reference) == pytest.approx(expected)


letters = st.lists(st.sampled_from("abcd"), max_size=70)


@given(letters, letters)
def test_the_longest_common_subsequence_equals_dynamic_programming(first: list[str], second: list[str]) -> None:
    row = [0] * (len(second) + 1)
    for a in first:
        new = [0]
        for column, b in enumerate(second):
            new.append(row[column] + 1 if a == b else max(new[column], row[column + 1]))
        row = new
    assert t.longest_common_subsequence(first, second) == row[-1]
