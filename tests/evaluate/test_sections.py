"""A text has the same sections whatever reads it, and their costs add up to the whole."""

import json
import math
from typing import Any

import numpy as np
import pytest
from tests.data import held
from tests.evaluate.read import prepared

from weft.errors import DataError
from weft.evaluate import sections
from weft.evaluate.perplexity import TokenScores
from weft.evaluate.sections import cut
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
    """One text, read by several kinds of models and tokenizers, each with one of the texts at least."""
    made = tmp_path_factory.mktemp("read")
    text, names = request.param
    if text == "book":
        source = made / "book.txt"
        source.write_text(TEXT, encoding="utf-8")
    else:
        source = made / "rows.jsonl"
        source.write_text("\n".join(json.dumps({"text": row}) for row in ROWS), encoding="utf-8")
    given = [f"data.sources=[{str(source)!r}]", "data.validation.kind=tail", "data.validation.fraction=0.5"]
    readers = {name: READERS[name] for name in names}
    return {
        name: prepared(made / name, preset, kind, [*given, *changes])
        for name, (preset, kind, changes) in readers.items()
    }


def test_costs_add_up_whatever_reads(read: dict[str, Any]) -> None:
    for objective, model in read.values():
        found, whole = objective.sections(model), objective.score(model, objective.tokens("validation"))
        assert found.nats.sum() == pytest.approx(whole.spelled_nats, rel=1e-9)
        assert (found.bytes.sum(), found.tokens.sum()) == (whole.bytes, whole.tokens)
        assert found.bits_per_byte == pytest.approx(whole.bits_per_byte, rel=1e-9)
        assert (found.nats > 0).all()


@pytest.mark.parametrize("most", [None, 1, 5000])
def test_a_text_has_the_same_sections_whatever_the_tokenizer(read: dict[str, Any], most: int | None) -> None:
    found = [objective.sections(model, most_bytes=most) for objective, model in read.values()]
    for each in found:
        np.testing.assert_array_equal(each.bytes, found[0].bytes)
        if most is not None:  # up to the border at or after it
            assert each.bytes.sum() >= most > each.bytes[:-1].sum()


def test_a_beginning_is_that_of_the_whole(read: dict[str, Any]) -> None:
    """A model that counts sees the same whatever is read after it."""
    objective, model = read["counted"]
    part = objective.sections(model, most_bytes=5000)
    (text,) = objective.tokens("validation")
    costs = next(iter(objective.token_scores(model, text))).nats
    assert part.token_nats.sum() == pytest.approx(costs[: part.tokens.sum()].sum(), rel=1e-6)


def test_each_section_has_its_own_tokens() -> None:
    """Three documents of one byte a token, of which the second is cut."""
    tokenizer = build_tokenizer(Byte(), [])
    text = held.tokens(10 + np.arange(3000) % 200, [0, 700, 2700], [700, 2000, 300])
    found = cut(text, tokenizer)
    assert found.firsts.tolist() == [0, 350, 700, 1200, 1700, 2200, 2700, 3000]
    assert found.bytes.tolist() == [350, 350, 500, 500, 500, 500, 300]
    assert found.begins.tolist() == [1, 0, 1, 0, 0, 0, 1] and not found.unspelled.any()
    costs = np.random.default_rng(0).random(3000)
    parts = [TokenScores(p, costs[p], p) for p in np.array_split(np.random.default_rng(1).permutation(3000), 4)]
    expected = [costs[a:b].sum() for a, b in zip(found.firsts, found.firsts[1:], strict=False)]
    np.testing.assert_allclose(found.scores(parts).nats, expected)
    unpaid = found.scores(parts, apart=True).nats - expected
    np.testing.assert_allclose(unpaid, 8 * math.log(2) * np.array([1, 0, 1, 0, 0, 0, 1]), atol=1e-9)


def test_unknown_words_are_charged_where_they_stand() -> None:
    tokenizer = build_tokenizer(Word(), ["the frog sat. " * 9])
    known, odd = "the frog sat. " * 100, "the salamander sat. " * 100
    ids = [tokenizer.encode(known), tokenizer.encode(odd)]
    text = held.tokens(np.concatenate(ids), [0, len(ids[0])], [len(known), len(odd)])
    found = cut(text, tokenizer)
    half = int(np.searchsorted(found.firsts, len(ids[0])))
    assert found.unknown[:half].sum() == 0 and found.unknown[half:].sum() == 100
    assert found.unspelled[:half].sum() <= 2
    np.testing.assert_allclose(found.unspelled[half:].sum(), len(" salamander") * 100, atol=2)
    np.testing.assert_allclose(found.unspelled[half:] / found.unknown[half:], len(" salamander"), atol=0.1)


def test_short_documents_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "MAX_SECTIONS", 10)
    text = held.tokens(np.full(1000, 50), list(range(0, 1000, 10)), [10] * 100)
    found = cut(text, build_tokenizer(Byte(), []))
    assert found.bytes.tolist() == [100] * 10 and found.firsts.tolist() == list(range(0, 1001, 100))


def test_white_space_that_no_token_spells_counts_too() -> None:
    tokenizer = build_tokenizer(Word(), ["the frog"])
    ids = tokenizer.encode("the frog")
    text = held.tokens(np.array([*ids, *ids]), [0, 2, 2], [8, 30, 8])  # the second has no token
    found = cut(text, tokenizer)
    assert found.bytes.sum() == 46 and found.unspelled.sum() >= 30


def test_a_text_of_no_bytes_has_no_sections() -> None:
    with pytest.raises(DataError, match="is empty"):
        cut(held.tokens(np.zeros(0), [], []), build_tokenizer(Byte(), []))


def test_the_impossible_has_no_interval() -> None:
    found = cut(held.tokens(np.full(2000, 50), [0, 1000], [1000, 1000]), build_tokenizer(Byte(), []))
    costs = np.ones(2000)
    places = np.arange(2000)
    assert found.scores([TokenScores(places, costs, places)]).intervals()["loss"] == (1.0, 1.0)
    costs[3] = np.inf
    assert found.scores([TokenScores(places, costs, places)]).intervals() == {}
