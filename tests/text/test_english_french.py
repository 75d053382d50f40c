"""The English–French grammar: agreement, word order, elision, and the alignment of words."""

import re
from functools import cache
from itertools import islice, pairwise

import pytest

from weft.text import builtin
from weft.text.grammars.english_french import Composer, Phrase, _adjective_forms, _sandhi
from weft.text.grammars.rng import Rng


@cache
def rows() -> list[dict[str, str]]:
    return list(islice(builtin.task_rows("english-french", "train"), 4_000))


@cache
def translations() -> dict[str, str]:
    return {row["source"].removesuffix(" ."): row["target"].removesuffix(" .") for row in rows()}


def linked(row: dict[str, str]) -> set[tuple[str, str]]:
    """Return the pairs of words that are linked for sure."""
    source, target = row["source"].split(), row["target"].split()
    links = (link.split("-") for link in row["alignment"].split() if "-" in link)
    return {(source[int(i)], target[int(j)]) for i, j in links}


@pytest.mark.parametrize(
    ("word", "translation"),
    [("I am a student", "je suis étudiant"), ("she is a student", "elle est étudiante")],
)
def test_the_lectures_sentences_are_in_the_grammar(word: str, translation: str) -> None:
    assert translations()[word] == translation


def test_two_adjectives_follow_their_noun_in_reversed_order() -> None:
    areas = [row for row in rows() if re.search(r"the [A-Z]\w+ \w+ area was", row["source"])]
    for row in areas:
        source, target = row["source"].split(), row["target"].split()
        area, zone = source.index("area"), target.index("zone")
        assert {(source[area - 2], target[zone + 2]), (source[area - 1], target[zone + 1])} <= linked(row)
    assert areas
    assert any(" signé en août 19" in row["target"] and "signed in August 19" in row["source"] for row in rows())


@pytest.mark.parametrize(
    ("english", "french", "pairs"),
    [
        (" does not ", " pas ", {("not", "pas")}),
        (" did not ", " pas ", {("not", "pas")}),
        (" never ", " jamais ", {("never", "jamais")}),
        ("potato", "pomme de terre", {("potato", "pomme"), ("potato", "terre")}),
        ("waits for", "attend", {("waits", "attend"), ("for", "attend")}),
        ("there is", "il y a", {("there", "il"), ("there", "y"), ("is", "a")}),
        ("near the", "près du", {("near", "du"), ("the", "du")}),
    ],
)
def test_several_words_for_one_are_linked(english: str, french: str, pairs: set[tuple[str, str]]) -> None:
    matches = [row for row in rows() if english in row["source"] and french in row["target"]]
    assert matches and any(pairs <= linked(row) for row in matches)


def test_no_article_or_pronoun_stays_before_a_vowel() -> None:
    unelided = {"le", "la", "je", "ne", "de", "que", "me", "ce", "ma", "sa", "beau", "nouveau"}
    for row in rows():
        words = row["target"].split()
        pairs = pairwise(words)
        assert not [pair for pair in pairs if pair[0] in unelided and pair[1][0] in "aeéêiîoœuh"], row["target"]
        assert " de le " not in row["target"] and " de les " not in row["target"]


def test_links_are_within_the_sentences_and_cover_every_french_word() -> None:
    for row in rows()[:2000]:
        links = [link.replace("p", "-").split("-") for link in row["alignment"].split()]
        assert max(int(i) for i, _ in links) < len(row["source"].split())
        assert {int(j) for _, j in links} == set(range(len(row["target"].split()))), row


def test_object_pronouns_precede_the_verb_and_participles_agree() -> None:
    saw = [
        target for source, target in translations().items() if re.match(r"he \w+ her\b", source) and " l' a " in target
    ]
    assert saw and all(re.match(r"il l' a \w+e\b", target) for target in saw)
    negated = [target for source, target in translations().items() if re.fullmatch(r"they do not \w+ (me|him)", source)]
    assert negated and all(re.fullmatch(r"ils ne (me|m'|le|l') \w+ent pas", target) for target in negated)


def test_forms() -> None:
    assert _adjective_forms("vert") == ["vert", "verte", "verts", "vertes"]
    assert _adjective_forms("rouge") == ["rouge", "rouge", "rouges", "rouges"]
    assert _adjective_forms("pris") == ["pris", "prise", "pris", "prises"]


def test_a_contraction_keeps_the_links_of_both_words() -> None:
    composer = Composer(Rng("contraction"))
    of, the, king = composer.entry("of", "de"), composer.entry("the", "le"), composer.entry("king", "roi")
    phrase: Phrase = composer.join("{a} {b} {c} = {a} {b} {c}", {"a": of, "b": the, "c": king})
    du, roi = _sandhi(phrase.french)
    assert (du.text, roi.text) == ("du", "roi")
    assert du.sure == phrase.english[0].sure | phrase.english[1].sure
