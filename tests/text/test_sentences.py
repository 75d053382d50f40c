"""Ends of sentences, and stops that don't end one."""

from time import perf_counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.text.sentences import split_sentences


@pytest.mark.parametrize(
    "sentences",
    [
        ["It rained.", "We stayed in!", "Did you?", "No."],
        ["Mr. Fox met Dr. Owl at St. Ives.", "They talked."],
        ["Pi is 3.14 or so.", "Version 2.0.1 of weft.org is out."],
        ["She works at Apple Inc.", "The firm is big."],
        ["She works at Apple Inc. in May.", "He met J. R. R. Tolkien in the U.S. Army."],
        ["It was 5 p.m.", "She left."],
        ["Some fruit, e.g. Granny Smiths, i.e. apples.", "A Ph.D. student ate them."],
        ["No. 5 is alive.", "No.", "I won't."],
        ["See Fig. 3 and p. 7.", "That was in 1990.", "Then it stopped."],
        ["So do I.", "Then we went."],
        ["He said “Stop.”", "Then he left."],
        ['"Really?" he asked.', '"I think so," she said.'],
        ["(He left.)", "She stayed."],
        ["Wait... what?", "Well…", "Fine."],
        ["The cell divides.[3]", "It grows.[4][5]", "Done."],
        ["He sat in the sun.", "Birds sang."],
        ["¿Qué?", "¡No!", "Sí."],
        ["J'ai vu M. Dupont.", "Il est là."],
        ["यह है।", "वह था।"],
        ["i went home.", "then i slept.", "mr. fox did not."],  # without capitals
        ["This is shown by Smith et al.", "The rest is known."],
    ],
    ids=lambda sentences: sentences[0][:20],
)
def test_sentences(sentences: list[str]) -> None:
    for space in " \n":
        assert [sentence.strip() for sentence in split_sentences(space.join(sentences))] == sentences


@pytest.mark.parametrize(
    "text",
    [
        "今日は晴れ。|明日は？|「行こう。」と言った。|彼は「はい。」|終わり！",
        "値は３．１４だ。|次。",
        "Heading\n\n|A line\nand another. |Next.\n \n  |1. One item\n2. Another item.\n",
        *("See Mr.\n\n|Fox", "\n\nA.\n\n|B.", " \n"),
    ],
)
def test_scripts_without_spaces_and_newlines(text: str) -> None:
    """A newline may be inside a sentence; a blank line ends one; the number of a list item is no sentence."""
    assert split_sentences(text.replace("|", "")) == text.split("|")
    assert split_sentences("") == []


WORDS = 'Mr|I|no|5|U.S|he|The|.|...|?|…|。|」|"|[3]| |\n'
PIECES = st.sampled_from(WORDS.split("|"))


@settings(max_examples=15)
@given(st.one_of(st.text(), st.lists(PIECES).map("".join)))
def test_no_text_is_lost(text: str) -> None:
    sentences = split_sentences(text)
    assert "".join(sentences) == text
    assert all(sentence.strip() for sentence in sentences) or not text.strip()


@pytest.mark.parametrize("unit", [".", '."', "1. ", "。」", "\n", "\n  ", ".[1", "a"], ids=repr)
def test_time_is_linear(unit: str) -> None:
    """Quadratic time would be minutes."""
    began = perf_counter()
    split_sentences(unit * 30_000 + "x")
    assert perf_counter() - began < 5.0
