"""Nearest words by the embedding table, and nearest words inside sentences."""

from typing import Any

import numpy as np
import pytest
import torch

from weft.errors import DataError, ModelError
from weft.explain.neighbours import in_context, nearest_words, word_ids, word_vector
from weft.explain.word_map import sense_map
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.config import NGram, Recurrent
from weft.models.presets import bert, gpt
from weft.text.config import BPE, Byte, Word
from weft.text.tokenizer import Tokenizer, build_tokenizer

TEXT = ["the frog and the toad sat by the bank of the river", "the bank lends money and the frog leapt"]


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return build_tokenizer(Word(), TEXT)


@pytest.fixture
def model(words: Tokenizer) -> LanguageModel:
    """A model with a known table: a toad is nearly a frog, a river is at a right angle, money is the opposite."""
    torch.manual_seed(0)
    built: Any = build(bert(1, 4, 2, vocab_size=words.vocab_size, context=32))
    angles = {"frog": 0.0, "toad": 0.1, "leapt": 0.6, "river": 1.5708, "money": 3.1416}
    with torch.no_grad():
        table = built.embedding.weight
        table.zero_()
        for word, angle in angles.items():
            table[words.id(word), :2] = 3 * torch.tensor([np.cos(angle), np.sin(angle)])
        table[words.need("pad"), 0] = 1.0  # the direction of the frog
    return built


def test_the_nearest_words_to_frog(model: LanguageModel, words: Tokenizer) -> None:
    found = nearest_words(model, words, "frog", top=2)
    assert [near.text for near in found] == ["toad", "leapt"]
    assert [near.cosine for near in found] == pytest.approx([np.cos(0.1), np.cos(0.6)], abs=1e-5)
    everything = nearest_words(model, words, "frog", top=1000)
    assert everything[-1].text == "money"
    shown = {near.text for near in everything}
    assert "frog" not in shown and not shown & set(words.special_tokens)
    assert len(everything) == words.vocab_size - len(words.special_tokens) - 1


def test_a_word_that_is_unknown(model: LanguageModel, words: Tokenizer) -> None:
    assert word_vector(model, words, "frogs") is None
    with pytest.raises(DataError, match=r"'frogs' is not in the vocabulary; did you mean 'frog'"):
        nearest_words(model, words, "frogs")
    with pytest.raises(ModelError, match="has no embeddings"):
        nearest_words(build(NGram(vocab_size=words.vocab_size)), words, "frog")


def test_a_words_tokens_are_those_after_a_space_and_have_one_mean() -> None:
    tokenizer = build_tokenizer(Byte(), [])
    model: Any = build(Recurrent(vocab_size=tokenizer.vocab_size, d_model=6, d_embedding=4))
    vector = word_vector(model, tokenizer, "ab")
    assert vector == pytest.approx(model.embedding.weight[tokenizer.encode("ab")].mean(0).detach().numpy())
    assert len(nearest_words(model, tokenizer, "ab", top=3)) == 3
    tokenizer = build_tokenizer(BPE(), ["a frog, a frog and a frog"] * 20)
    ids = word_ids(tokenizer, "frog")
    assert ids is not None and len(ids) == 1
    assert tokenizer.token_bytes(ids[0]) == b" frog"


# ---- in sentences


def bert_of(words: Tokenizer) -> Any:
    torch.manual_seed(1)
    return build(bert(2, 16, 2, vocab_size=words.vocab_size, context=32))


def test_every_word_has_the_vector_of_its_position(words: Tokenizer) -> None:
    model = bert_of(words)
    context = in_context(model, words, [TEXT[1], TEXT[0]])
    assert [word.text for word in context.words] == [*TEXT[1].split(), *TEXT[0].split()]
    assert all(context.sentences[w.sentence][w.start : w.end] == w.text for w in context.words)
    alone = in_context(model, words, [TEXT[0]])
    assert context.vectors[len(TEXT[1].split()) :] == pytest.approx(alone.vectors, abs=1e-5)
    assert np.linalg.norm(context.vectors, axis=1) == pytest.approx(np.ones(len(context.words)), abs=1e-5)
    with torch.no_grad():
        features = model.eval().features(torch.tensor([words.encode(TEXT[0], eos=True)]))[0]
    vector = features[TEXT[0].split().index("toad")]
    assert alone.vectors[[word.text for word in alone.words].index("toad")] == pytest.approx(
        (vector / vector.norm()).numpy(), abs=1e-5
    )


def test_one_word_two_vectors_and_the_nearest_of_each(words: Tokenizer) -> None:
    model = bert_of(words)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0)
    context = in_context(model, words, [*TEXT, TEXT[0]])
    vectors = context.vectors[[word.text == "bank" for word in context.words]]
    between = vectors @ vectors.T
    assert between.shape == (3, 3) and between[0, 1] < 0.99
    assert between[0, 2] == pytest.approx(1.0, abs=1e-5)  # the same sentence
    answers = context.nearest("Bank", top=3)  # regardless of case
    assert [word.sentence for word, _ in answers] == [0, 1, 2]
    word, near = answers[0]
    assert (word.text, near[0][0].sentence, near[0][0].text) == ("bank", 2, "bank")
    cosines = [cosine for _, cosine in near]
    assert cosines == sorted(cosines, reverse=True) and len(near) == 3


def test_tokens_are_joined_to_words_up_to_the_context() -> None:
    tokenizer = build_tokenizer(BPE(), ["the frog leapt, the frog's pond"] * 20)
    model = build(gpt(1, 8, 2, context=20, vocab_size=tokenizer.vocab_size))
    context = in_context(model, tokenizer, ["the frog's  pond, naïve"])
    assert [word.text for word in context.words] == ["the", "frog's", "pond", "naïve"]
    long = in_context(model, tokenizer, ["the frog " * 20])
    assert [word.text for word in long.words[:2]] == ["the", "frog"]
    assert len(long.words) == 19  # one token each, and one for the end


def test_sentences_without_the_word(model: LanguageModel, words: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"'toads' is in none of the 2 sentences; did you mean 'toad'"):
        in_context(model, words, TEXT).nearest("toads")
    with pytest.raises(DataError, match="contain no words"):
        in_context(model, words, ["!"])
    with pytest.raises(ModelError, match="gives no vectors for a text"):
        in_context(build(NGram(vocab_size=words.vocab_size)), words, TEXT)


def test_senses_are_drawn_along_axes_that_separate_other_sentences() -> None:
    """The largest variance is noise: its principal components would show one cloud."""
    rng = np.random.default_rng(0)
    senses = ["money", "river"] * 30
    vectors = rng.normal(size=(60, 12)) * np.array([8.0, 8.0] + [0.3] * 10)
    vectors[:, 7] += np.where(np.array(senses) == "money", 2.0, -2.0)
    (drawn,) = sense_map(["bank"] * 60, senses, vectors.astype(np.float32)).clouds
    assert drawn.groups == ("money",) * 15 + ("river",) * 15 and "other sentences" in drawn.axes
    money, river = drawn.points[:15, 0], drawn.points[15:, 0]
    assert min(money.max(), river.max()) < max(money.min(), river.min())
    (few,) = sense_map(["bank"] * 6, ["money", "river"] * 3, vectors[:6].astype(np.float32)).clouds
    assert len(few.points) == 6 and "principal components" in few.axes
    (three,) = sense_map(["run"] * 60, ["a", "b", "c"] * 20, vectors.astype(np.float32)).clouds
    assert three.points.shape == (30, 2)
