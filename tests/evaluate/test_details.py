"""The breakdown of a loss adds up to it, and the passages are the worst ones."""

import math
import re
from typing import Any

import numpy as np
import pytest
from tests.data import held
from tests.evaluate.read import prepared

from weft.evaluate.details import Details, TextCosts, by_frequency, by_position, most_surprising, token_counts
from weft.evaluate.overlap import WORDS, Overlap, SharedPassage, overlap_tables
from weft.evaluate.page import EvaluationPage
from weft.evaluate.perplexity import TokenScores
from weft.figures.tables import Table, text_tables
from weft.text.config import BPE, Byte
from weft.text.tokenizer import build_tokenizer

BYTES = build_tokenizer(Byte(), [])


def costs(nats: list[float], text: str, starts: tuple[int, ...] = (0,), context: list[int] | None = None) -> TextCosts:
    """A text with one byte per token and scores in random order."""
    ids = BYTES.encode(text)
    sizes = np.diff([*starts, len(ids)]).tolist()
    losses, contexts = np.array(nats), np.array(context or range(1, len(ids) + 1))
    order = np.array_split(np.random.default_rng(0).permutation(len(ids)), 3)
    parts = (TokenScores(part, losses[part], contexts[part]) for part in order)
    return TextCosts.of(held.tokens(np.array(ids), list(starts), sizes), parts)


def test_buckets_of_context_and_frequency() -> None:
    found = by_position([costs(list(range(1, 12)), "abcdefghijk")])
    assert [each.name for each in found] == ["1", "2–3", "4–7", "8–11"]
    assert [each.tokens for each in found] == [1, 2, 4, 4]
    assert [each.loss for each in found] == [1.0, 2.5, 5.5, 9.5]
    assert by_position([costs([1.0], "a", context=[0])])[0].name == "none"
    training = held.tokens(np.array(BYTES.encode("a" * 9 + "b" * 10 + "c" * 1000)))
    found = by_frequency([costs([1, 2, 3, 4, 5], "aabcd")], token_counts([training, training], BYTES.vocab_size))
    assert [tuple(each) for each in found] == [("never", 1, 5.0), ("10–99", 3, 6.0), ("1,000–9,999", 1, 4.0)]


def test_the_worst_passages_by_exhaustive_search() -> None:
    text = "".join(np.random.default_rng(1).choice(list("abcdefgh"), 200))
    nats = np.random.default_rng(2).gamma(1.0, size=200)
    starts = (0, 90, 95)
    found = most_surprising([costs(nats.tolist(), text, starts)], BYTES, count=5, length=10)
    inside = [n for n in range(191) if not any(n < start < n + 10 for start in starts)]
    expected: list[int] = []
    for n in sorted(inside, key=lambda n: -nats[n : n + 10].mean()):
        if all(abs(n - other) >= 10 for other in expected):
            expected.append(n)
    for passage, n in zip(found, expected, strict=False):
        assert passage.loss == pytest.approx(nats[n : n + 10].mean())
        assert passage.words == text[n : n + 10]
        document = sum(start <= n for start in starts)
        assert (passage.text, passage.document, passage.byte) == (1, document, n - starts[document - 1])
    assert len(found) == 5


def test_texts_shorter_than_a_passage() -> None:
    found = most_surprising([costs([1.0, 3.0], "ab"), costs([5.0, 6.0, 7.0], "cde", (0, 1, 2))], BYTES)
    assert [(each.text, each.words, each.loss) for each in found] == [(2, "cde", 6.0), (1, "ab", 2.0)]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("read")
    (folder / "book.txt").write_text("".join(f"frog {n} <b>sat</b> by the river\n" for n in range(300)))
    data = [f"data.sources=[{str(folder / 'book.txt')!r}]", "data.validation.kind=tail", "data.validation.fraction=0.3"]
    return prepared(folder / "run", "gpt-tiny", BPE(vocab_size=280), data)


def test_tokens_and_sections_have_the_same_loss(read: tuple[Any, Any]) -> None:
    objective, model = read
    for stride in (None, 8):
        (text,), by_section = objective.costs(model, stride=stride)
        sections = objective.sections(model, stride=stride)
        np.testing.assert_allclose(by_section.nats, sections.nats, rtol=1e-9)
        buckets = by_position([text])
        assert sum(each.nats for each in buckets) == pytest.approx(sections.token_nats.sum(), rel=1e-9)
        assert sum(each.tokens for each in buckets) == sections.tokens.sum()
        if stride is not None:  # in all but the first window, the context is 24 tokens or more
            assert (text.scores.context[32:] > 24).all() and text.scores.context.max() == 32


def test_metrics_and_intervals_agree(read: tuple[Any, Any]) -> None:
    objective, model = read
    metrics = objective.measure(model).metrics
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert metrics["characters"] == metrics["bytes"]  # the text is ASCII
    assert metrics["bits_per_character"] == pytest.approx(metrics["bits_per_byte"])
    assert metrics["sections"] > 3
    for name, (low, high) in metrics["intervals"].items():
        assert low < metrics[name] < high
    assert metrics == objective.measure(model).metrics  # drawn with the same seed


def page(read: tuple[Any, Any]) -> EvaluationPage:
    objective, model = read
    texts, _ = objective.costs(model)
    counts = token_counts(objective.tokens("train"), objective.tokenizer.vocab_size)
    details = Details({}, by_position(texts), by_frequency(texts, counts), most_surprising(texts, objective.tokenizer))
    longest = [SharedPassage(1, 1, 7, bytes=40, words="<i>copied</i>")]
    shared = Overlap(WORDS, 10, 5, bytes=100, covered=40, documents=1, touched=1, longest=longest)
    return EvaluationPage("Evaluation", Table(("", "value"), [("loss", "1.5")], "", ["a <remark>"]), details, shared)


def test_a_page_is_complete_and_escaped(read: tuple[Any, Any]) -> None:
    shown = page(read)
    text = shown.html()
    assert text.count('role="img"') == 2 and 'aria-label="Loss by tokens seen before"' in text
    assert "&lt;b&gt;sat&lt;/b&gt;" in text and "<b>sat" not in text and "&lt;i&gt;copied" in text
    for bucket in (*shown.details.positions, *shown.details.frequencies):
        assert f"{bucket.tokens:,}" in text and f"{bucket.loss:.3f}" in text
    assert "a &lt;remark&gt;" in text


def test_tables_fit_a_terminal(read: tuple[Any, Any]) -> None:
    shown = page(read)
    assert shown.overlap is not None
    text = text_tables([*shown.details.tables(), *overlap_tables(shown.overlap)])
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"^ *\d+\.\d\d +1 +[\d,]+  \S", text, re.MULTILINE)
