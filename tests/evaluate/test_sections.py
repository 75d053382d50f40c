"""A text has the same sections with every tokenizer, and their losses add up to that of the text."""

import json
import math
from typing import Any

import numpy as np
import pytest
from tests.data import held
from tests.evaluate.read import prepared

from weft.errors import DataError
from weft.evaluate.perplexity import TokenScores
from weft.evaluate.sections import cut_sections
from weft.text.config import BPE, Byte, Char, Word
from weft.text.tokenizer import build_tokenizer

TEXT = "".join(f"the frog number {n} sat by the river,  and die Kröte {n % 7} sang.\n\n" for n in range(400))
ROWS = [f"Row {n}: " + "the newt ran. " * (n % 11) + "Ende" for n in range(120)] + ["Kröten! " * 400]
READERS: dict[str, tuple[str, Any, list[str]]] = {
    "bytes": ("gpt-tiny", Byte(), []),
    "masked": ("gpt-tiny", BPE(vocab_size=270), ["data.document_mask=true"]),
    "carried": ("lstm", Char(), []),
    "few words": ("lstm", Word(vocab_size=20), []),
    "counted": ("ngram-3", BPE(vocab_size=275), []),
    "counted words": ("ngram-3", Word(), []),
}


@pytest.fixture(
    scope="module",
    params=[
        ("book", ("bytes", "carried", "counted", "few words")),
        ("rows", ("masked", "carried", "counted", "counted words")),
        pytest.param(("book", tuple(READERS)), marks=pytest.mark.slow),
        pytest.param(("rows", tuple(READERS)), marks=pytest.mark.slow),
    ],
    ids=lambda param: f"{param[0]}-{len(param[1])}",
)
def read(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One text with several models and tokenizers, each with at least one of the texts."""
    folder = tmp_path_factory.mktemp("read")
    text, names = request.param
    source = folder / ("book.txt" if text == "book" else "rows.jsonl")
    rows = "\n".join(json.dumps({"text": row}) for row in ROWS)
    source.write_text(TEXT if text == "book" else rows, encoding="utf-8")
    data = [f"data.sources=[{str(source)!r}]", "data.validation.kind=tail", "data.validation.fraction=0.5"]
    readers = ((name, *READERS[name]) for name in names)
    return {name: prepared(folder / name, preset, kind, [*data, *changes]) for name, preset, kind, changes in readers}


def test_losses_add_up(read: dict[str, Any]) -> None:
    for objective, model in read.values():
        found, score = objective.sections(model), objective.score(model, objective.tokens("validation"))
        assert found.nats.sum() == pytest.approx(score.spelled_nats, rel=1e-9)
        assert (found.bytes.sum(), found.tokens.sum()) == (score.bytes, score.tokens)
        assert found.bits_per_byte == pytest.approx(score.bits_per_byte, rel=1e-9)
        assert (found.nats > 0).all()


@pytest.mark.parametrize("limit", [None, 1, 5000])
def test_a_text_has_the_same_sections_with_every_tokenizer(read: dict[str, Any], limit: int | None) -> None:
    found = [objective.sections(model, most_bytes=limit) for objective, model in read.values()]
    for each in found:
        np.testing.assert_array_equal(each.bytes, found[0].bytes)
        if limit is not None:  # up to the border at or after it
            assert each.bytes.sum() >= limit > each.bytes[:-1].sum()


def test_the_first_sections_have_the_loss_of_the_first_tokens(read: dict[str, Any]) -> None:
    """An n-gram model has no windows, so the loss of a token doesn't depend on the limit."""
    objective, model = read["counted"]
    part = objective.sections(model, most_bytes=5000)
    (text,) = objective.tokens("validation")
    costs = next(iter(objective.token_scores(model, text))).nats
    assert part.token_nats.sum() == pytest.approx(costs[: part.tokens.sum()].sum(), rel=1e-6)


def test_sections_collect_the_scores_of_their_tokens() -> None:
    """Three documents with one byte per token; the first two are cut."""
    tokenizer = build_tokenizer(Byte(), [])
    found = cut_sections(held.tokens(10 + np.arange(3000) % 200, [0, 700, 2700], [700, 2000, 300]), tokenizer)
    assert found.borders.tolist() == [0, 350, 700, 1200, 1700, 2200, 2700, 3000]
    assert found.bytes.tolist() == [350, 350, 500, 500, 500, 500, 300]
    assert found.begins.tolist() == [1, 0, 1, 0, 0, 0, 1] and not found.unspelled.any()
    costs = np.random.default_rng(0).random(3000)
    parts = [TokenScores(p, costs[p], p) for p in np.array_split(np.random.default_rng(1).permutation(3000), 4)]
    expected = [costs[a:b].sum() for a, b in zip(found.borders, found.borders[1:], strict=False)]
    np.testing.assert_allclose(found.scores(parts).nats, expected)
    unpredicted = found.scores(parts, isolated_documents=True).nats - expected
    np.testing.assert_allclose(unpredicted, 8 * math.log(2) * np.array([1, 0, 1, 0, 0, 0, 1]), atol=1e-9)


def test_unknown_words_are_charged_to_their_section() -> None:
    tokenizer = build_tokenizer(Word(), ["the frog sat. " * 9])
    known, odd = "the frog sat. " * 100, "the salamander sat. " * 100
    ids = [tokenizer.encode(known), tokenizer.encode(odd)]
    found = cut_sections(held.tokens(np.concatenate(ids), [0, len(ids[0])], [len(known), len(odd)]), tokenizer)
    half = int(np.searchsorted(found.borders, len(ids[0])))
    assert found.unknown[:half].sum() == 0 and found.unknown[half:].sum() == 100
    assert found.unspelled[:half].sum() <= 2
    np.testing.assert_allclose(found.unspelled[half:].sum(), len(" salamander") * 100, atol=2)
    np.testing.assert_allclose(found.unspelled[half:] / found.unknown[half:], len(" salamander"), atol=0.1)


def test_short_documents_are_merged() -> None:
    text = held.tokens(np.full(1000, 50), list(range(0, 1000, 10)), [10] * 100)
    found = cut_sections(text, build_tokenizer(Byte(), []), max_sections=10)
    assert found.bytes.tolist() == [100] * 10 and found.borders.tolist() == list(range(0, 1001, 100))


def test_whitespace_without_a_token_is_charged_but_not_an_empty_text() -> None:
    tokenizer = build_tokenizer(Word(), ["the frog"])
    ids = tokenizer.encode("the frog")
    text = held.tokens(np.array([*ids, *ids]), [0, 2, 2], [8, 30, 8])  # the second has no token
    found = cut_sections(text, tokenizer)
    assert found.bytes.sum() == 46 and found.unspelled.sum() >= 30
    with pytest.raises(DataError, match="is empty"):
        cut_sections(held.tokens(np.zeros(0), [], []), build_tokenizer(Byte(), []))


def test_an_infinite_loss_has_no_interval() -> None:
    found = cut_sections(held.tokens(np.full(2000, 50), [0, 1000], [1000, 1000]), build_tokenizer(Byte(), []))
    nats, positions = np.ones(2000), np.arange(2000)
    assert found.scores([TokenScores(positions, nats, positions)]).intervals()["loss"] == (1.0, 1.0)
    nats[3] = np.inf
    assert found.scores([TokenScores(positions, nats, positions)]).intervals() == {}
