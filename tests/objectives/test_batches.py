"""Batches of examples, objective by objective, and the lengths they are planned with."""

from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.data import held

from weft.data.batch import Frame, framed
from weft.data.examples import Labels
from weft.data.messages import encode_chat
from weft.data.sampler import Buckets
from weft.data.table import Row
from weft.decode.translate import Direction
from weft.errors import ConfigError, DataError, TokenizerError
from weft.objectives import table as objectives
from weft.objectives.frame import ANY_LANGUAGES, LanguagePair, direction
from weft.objectives.rows import RowObjective
from weft.objectives.tag import tagged_example
from weft.recipe.config import Recipe
from weft.recipe.resolve import resolve
from weft.runs.folder import RunFolder
from weft.text.config import BPE, Byte, Char, Specials, Unigram, Word, WordPiece
from weft.text.tokenizer import Tokenizer, build_tokenizer
from weft.training.run_data import Tokenizers

TEXT = "the cat sat on the mat while unbelievable things happened in New York"
WORDS = build_tokenizer(Word(specials=Specials(unk="<unk>", bos="<bos>", eos="<eos>", extra=("<fill>",))), [TEXT])
PLAIN = Tokenizer.from_json(WORDS.to_json(), WORDS.roles | {"pad": "<fill>"})  # padding's id is not 0 here
BERT = build_tokenizer(WordPiece(specials=Specials(unk="[UNK]", cls="[CLS]", pad="[PAD]", sep="[SEP]")), [TEXT])
UNPADDED = build_tokenizer(Byte(specials=Specials(bos="<bos>", eos="<eos>")), [])
many = settings(max_examples=25, deadline=None)
IDS = st.lists(st.integers(10, 30), max_size=12)


@cache
def recipe_for(name: str, length: int, *changes: str) -> Recipe:
    preset = {"chat": "gpt-tiny", "pairs": "vaswani-tiny"}.get(name, "bert-tiny")
    return resolve(preset, [f"objective={name}", f"batch.length={length}", *changes])


def objective(name: str, tokenizer: Tokenizer, length: int = 512, *changes: str) -> RowObjective[Any]:
    """Return an objective that has read no data."""
    built = objectives.build(recipe_for(name, length, *changes), RunFolder("nowhere"), Tokenizers(tokenizer, tokenizer))
    return cast(RowObjective[Any], built)


def test_pairs() -> None:
    examples = held.examples([{"source": [7, 8, 9], "target": [5]}, {"source": [6], "target": [8, 9]}])
    bos, eos, pad = PLAIN.need("bos"), PLAIN.need("eos"), PLAIN.need("pad")
    assert pad != 0
    batch = objective("pairs", PLAIN).batch(examples, np.array([1, 0]))
    assert batch.source is not None and batch.source.tokens.tolist() == [[6, eos, pad, pad], [7, 8, 9, eos]]
    assert batch.source.mask.tolist() == [[True, True, False, False], [True] * 4]
    assert batch.tokens.tolist() == [[bos, 8, 9], [bos, 5, pad]]
    assert batch.targets.tolist() == [[8, 9, eos], [5, eos, pad]]
    assert batch.loss_mask is not None and batch.loss_mask.tolist() == [[True] * 3, [True, True, False]]
    assert batch.count == 5
    cut = objective("pairs", PLAIN, 2).batch(examples, np.array([0, 1]))
    assert cut.source is not None and cut.source.tokens.tolist() == [[7, eos], [6, eos]]
    assert cut.tokens.tolist() == [[bos, 5], [bos, 8]]
    assert cut.targets.tolist() == [[5, eos], [8, eos]]


@many
@given(st.lists(st.tuples(IDS, IDS), min_size=1, max_size=8), st.integers(2, 16))
def test_lengths_are_those_of_the_batch(rows: list[tuple[list[int], list[int]]], length: int) -> None:
    pairs = held.examples({"source": a, "target": b} for a, b in rows)
    both = held.examples({"first": a, "second": b, "label": 0} for a, b in rows)
    alone = held.examples({"first": a, "label": 0} for a, _ in rows)
    numbers = np.arange(len(rows))
    learned = objective("pairs", PLAIN, length)
    batch = learned.batch(pairs, numbers)
    assert batch.source is not None
    assert learned.lengths(pairs).max(axis=0).tolist() == [batch.source.tokens.shape[1], batch.tokens.shape[1]]
    for tokenizer in (PLAIN, BERT):
        for examples, changes in ((both, ["objective.second=second"]), (alone, [])):
            learned = objective("classify", tokenizer, length + 3, *changes)
            mask = learned.batch(examples, numbers).mask
            assert mask is not None and learned.lengths(examples).tolist() == mask.sum(1).tolist()
        learned = objective("contrastive", tokenizer, length + 3)
        pair = learned.batch(both, numbers)
        assert pair.source is not None and pair.mask is not None
        widths = torch.stack([pair.mask.sum(1), pair.source.mask.sum(1)], dim=1)
        assert learned.lengths(both).tolist() == widths.tolist()


def test_an_unknown_tag_names_its_row_once() -> None:
    tagging = objective("tag", WORDS)
    tagging.label_ids = Labels("tags", ("NOUN", "VERB"))
    row = Row({"words": ["cat"], "tags": ["NOUNS"]}, "rows.jsonl:3")
    with pytest.raises(DataError) as refused:
        list(tagging.encode([row]))
    assert str(refused.value).count("rows.jsonl:3") == 1


def test_a_budget_of_tokens_bounds_the_tensors() -> None:
    generator = np.random.default_rng(0)
    rows = [{"source": [5] * int(n), "target": [6] * int(m)} for n, m in generator.integers(1, 30, (200, 2))]
    examples = held.examples(rows)
    learned = objective("pairs", PLAIN)
    buckets = Buckets(learned.lengths(examples), tokens=256, seed=3)
    for step in range(buckets.steps_per_epoch):
        batch = learned.batch(examples, buckets.rows(step))
        assert batch.source is not None and batch.tokens.numel() + batch.source.tokens.numel() <= 256


# ---- sentences


def test_sentences_in_their_frame() -> None:
    cls, sep, pad = BERT.need("cls"), BERT.need("sep"), BERT.need("pad")
    eos = PLAIN.need("eos")
    one = framed([[7], [8, 9]], None, Frame.usual(BERT))
    assert one.tokens.tolist() == [[cls, 7, sep, pad], [cls, 8, 9, sep]]
    assert one.mask.tolist() == [[True, True, True, False], [True] * 4]
    assert one.segments is None
    two = framed([[7], [8, 9]], [[5, 6], [4]], Frame.usual(BERT))
    assert two.tokens.tolist() == [[cls, 7, sep, 5, 6, sep], [cls, 8, 9, sep, 4, sep]]
    assert two.segments is not None and two.segments.tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]]
    assert framed([[7]], [[5, 6]], Frame.usual(PLAIN)).tokens.tolist() == [[7, eos, 5, 6, eos]]


@many
@given(IDS, IDS, st.integers(5, 30))
def test_the_longer_sentence_is_cut_first_and_the_frame_never(first: list[int], second: list[int], length: int) -> None:
    tokens = framed([first], [second], Frame.usual(BERT), length=length).tokens[0].tolist()
    cls, sep = BERT.need("cls"), BERT.need("sep")
    assert len(tokens) == min(length, len(first) + len(second) + 3)
    assert (tokens[0], tokens[-1], tokens.count(sep)) == (cls, sep, 2)
    middle = tokens.index(sep)
    a, b = tokens[1:middle], tokens[middle + 1 : -1]
    assert (a, b) == (first[: len(a)], second[: len(b)])
    if len(a) < len(first):
        assert len(a) >= len(b)
    if len(b) < len(second):
        assert len(b) >= len(a) - 1


def test_labels_and_numbers() -> None:
    labelled = held.examples([{"first": [4], "label": 2}, {"first": [5], "label": 0}])
    batch = objective("classify", BERT).batch(labelled, np.array([1, 0, 0]))
    assert batch.targets.tolist() == [0, 2, 2]
    assert batch.targets.dtype == torch.int64
    assert batch.count == 3
    scored = held.examples([{"first": [4], "second": [5], "score": 0.5}, {"first": [5], "second": [5], "score": 1}])
    batch = objective("regress", BERT, 512, "objective.second=b").batch(scored, np.array([0, 1]))
    assert batch.targets.tolist() == [0.5, 1]
    assert batch.targets.dtype == torch.float32
    assert batch.segments is not None


def test_contrastive_pairs() -> None:
    examples = held.examples([{"first": [4], "second": [5, 6]}, {"first": [7], "second": [8]}])
    batch = objective("contrastive", PLAIN).batch(examples, np.array([0, 1]))
    eos, pad = PLAIN.need("eos"), PLAIN.need("pad")
    assert batch.tokens.tolist() == [[4, eos], [7, eos]]
    assert batch.source is not None and batch.source.tokens.tolist() == [[5, 6, eos], [8, eos, pad]]
    assert batch.targets.tolist() == [0, 1]


def test_missing_tokens_and_space_are_refused() -> None:
    eos = UNPADDED.need("eos")  # replaces padding
    assert framed([[1], [2, 3]], None, Frame.usual(UNPADDED)).tokens.tolist() == [[1, eos, eos], [2, 3, eos]]
    with pytest.raises(DataError, match=r"batch\.length = 3 leaves no space for text beside 3 special tokens"):
        framed([[1]], [[2]], Frame.usual(BERT), length=3)
    with pytest.raises(TokenizerError, match="no bos token"):
        objective("pairs", BERT).batch(held.examples([{"source": [1], "target": [2]}]), np.array([0]))


# ---- languages

MORE = ("en_XX", "de_DE", "__fr__")
NAMED = build_tokenizer(Word(specials=Specials(unk="<unk>", bos="<bos>", eos="<eos>", pad="<pad>", extra=MORE)), [TEXT])


def between(pair: LanguagePair = ANY_LANGUAGES, **settings: str) -> Direction:
    changes = [f"objective.languages.{key}={value}" for key, value in {"source": "before", **settings}.items()]
    return direction(objective("pairs", NAMED, 512, *changes), pair)


def test_language_tokens_are_where_the_model_expects_them() -> None:
    en, de, fr, bos, eos = (NAMED.id(token) for token in ("en_XX", "de_DE", "__fr__", "<bos>", "<eos>"))
    pair = LanguagePair("en_XX", "de_DE")
    for changes, before, after, starts, first in (
        ({"source": "before", "target": "first"}, (en,), (eos,), bos, (de,)),
        ({"source": "after", "target": "start"}, (), (eos, en), de, ()),
        ({"source": "before", "target": "source"}, (de, en), (eos,), bos, ()),
    ):
        way = between(pair, **changes)
        assert (way.frame.before, way.frame.after, way.starts, way.first) == (before, after, starts, first)
    assert between(LanguagePair(None, "fr"), token="__{}__", source="none").first == (fr,)
    assert between(reads="de_DE", writes="en_XX") == between(LanguagePair("de_DE", "en_XX"))


def test_targets_begin_with_their_language() -> None:
    examples = held.examples([{"source": [7, 8, 9], "target": [5]}, {"source": [6], "target": [8, 9, 9]}])
    en, de, bos, eos, pad = (NAMED.id(token) for token in ("en_XX", "de_DE", "<bos>", "<eos>", "<pad>"))
    pairs = objective("pairs", NAMED, 5, "objective.languages.reads=en_XX", "objective.languages.writes=de_DE")
    batch = pairs.batch(examples, np.array([0, 1]))
    assert batch.source is not None and batch.source.tokens.tolist() == [[en, 7, 8, 9, eos], [en, 6, eos, pad, pad]]
    assert batch.tokens.tolist() == [[bos, de, 5, pad, pad], [bos, de, 8, 9, 9]]
    assert batch.targets.tolist() == [[de, 5, eos, pad, pad], [de, 8, 9, 9, eos]]
    assert pairs.lengths(examples).tolist() == [[5, 3], [3, 5]]


def test_a_language_that_is_missing_is_one_line() -> None:
    missing = r"has to know which language it writes; name it with --to \(2 languages: de_DE, en_XX\)"
    none = {"token": "__{}__", "source": "none"}
    for pair, changes, line in (
        (LanguagePair("en_XX"), {}, missing),
        (LanguagePair("en", "de_DE"), {}, "--from en: not a language of this model; "),
        (LanguagePair("en_XX", "the"), {}, "--to the: not a language of this model; "),  # a word, not a special token
        (LanguagePair("en_XX", "fr"), none, "--from en_XX: this model takes no source language"),
    ):
        with pytest.raises(ConfigError, match=line):
            between(pair, **changes)


# ---- tags


@pytest.mark.parametrize("kind", [Word(), Char(), Byte(), BPE(), WordPiece(), Unigram()])
def test_the_first_token_of_a_word_carries_its_tag(kind: Any) -> None:
    tokenizer = build_tokenizer(kind, [TEXT])
    words = ["the", "unbelievable", "York", "mat"]
    example = tagged_example(tokenizer, words, [3, 1, 2, 0])
    assert example["first"] == tokenizer.encode(" ".join(words))
    assert [tag for tag in example["tags"] if tag >= 0] == [3, 1, 2, 0]
    for position, word in zip([n for n, tag in enumerate(example["tags"]) if tag >= 0], words, strict=True):
        begins = tokenizer.decode(example["first"][position:]).strip()
        assert begins.lower().startswith(word[:1].lower())
    batch = objective("tag", tokenizer).batch(held.examples([example]), np.array([0]))
    assert batch.loss_mask is not None and batch.targets[batch.loss_mask].tolist() == [3, 1, 2, 0]
    assert batch.count == 4


def test_tags_follow_the_frame_and_the_cut() -> None:
    examples = held.examples([{"first": [7, 8, 9], "tags": [2, -1, 1]}, {"first": [7], "tags": [0]}])
    batch = objective("tag", BERT).batch(examples, np.array([0, 1]))
    assert batch.targets.tolist() == [[0, 2, 0, 1, 0], [0, 0, 0, 0, 0]]
    assert batch.loss_mask is not None
    no, yes = False, True
    assert batch.loss_mask.tolist() == [[no, yes, no, yes, no], [no, yes, no, no, no]]
    cut = objective("tag", BERT, 4).batch(examples, np.array([0, 1]))
    assert cut.loss_mask is not None and cut.loss_mask.tolist() == [[no, yes, no, no], [no, yes, no, no]]


def test_words_and_tags_must_match() -> None:
    with pytest.raises(DataError, match="2 words have 1 tags"):
        tagged_example(BERT, ["a", "b"], [0])
    with pytest.raises(DataError, match=r"the tokenizer has no token for the word '\\x01'"):
        tagged_example(BERT, ["a", "\x01"], [0, 1])


# ---- conversations


@many
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=9), st.integers(4, 20))
def test_packed_conversations_are_separate(sizes: list[tuple[int, int]], length: int) -> None:
    assume(min(prompt for prompt, _ in sizes) <= length)  # otherwise there is nothing to learn, which is refused
    rows = []
    for number, (prompt, reply) in enumerate(sizes):
        ids = [100 * (number + 1) + position for position in range(prompt + reply)]
        rows.append({"tokens": ids, "replies": [0] * prompt + [1] * reply})
    examples = held.examples(rows)
    learned = objective("chat", PLAIN, length)
    batch = learned.batch(examples, np.arange(len(rows)))
    assert batch.tokens.shape[1] == length
    assert batch.loss_mask is not None and batch.documents is not None and batch.positions is not None
    real = batch.documents >= 0
    assert int(real.sum()) == int(learned.lengths(examples).sum())
    assert torch.equal(batch.targets[real], batch.tokens[real] + 1)
    assert torch.equal(batch.positions[real], batch.tokens[real] % 100)
    assert (batch.tokens[~real] == PLAIN.need("pad")).all()
    for document in batch.documents[real].unique():
        assert len((batch.tokens[batch.documents == document] // 100).unique()) == 1
    replies = sorted(id for row in rows for id, counts in zip(row["tokens"], row["replies"], strict=True) if counts)
    assert sorted(batch.targets[batch.loss_mask].tolist()) == [id for id in replies if id % 100 <= length]


def test_a_conversation_from_messages() -> None:
    tokenizer = build_tokenizer(Byte(), [])
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    tokens, replies = encode_chat(tokenizer, messages)
    batch = objective("chat", tokenizer, 64).batch(
        held.examples([{"tokens": tokens, "replies": replies}]), np.array([0])
    )
    assert batch.loss_mask is not None
    assert tokenizer.decode(batch.targets[batch.loss_mask].tolist(), specials=True) == "Hello<eos>"
