"""Text embeddings: equal for a text alone and in a batch, independent of padding."""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
import tokenizers
import torch

from weft.data.batch import Frame, framed
from weft.data.table import read_texts
from weft.errors import DataError, ModelError
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.config import Bahdanau, Encoder, NGram, Recurrent
from weft.models.head_config import EmbeddingHead, Pooling
from weft.models.presets import bert, gpt, vaswani
from weft.objectives.contrastive import EmbeddingOptions, embed
from weft.progress import Log
from weft.text.config import CLOSED, Byte, Specials, WordPiece
from weft.text.tokenizer import Tokenizer, build_tokenizer

TEXTS = ["the frog sat", "a", "the toad leapt over the frog and sat", "frog toad", "sat the"]
D = 16


def vectors(
    model: LanguageModel, tokenizer: Tokenizer, texts: list[str], log: Log = print, **options: Any
) -> npt.NDArray[np.float32]:
    return embed(model, tokenizer, texts, options=EmbeddingOptions(**options), log=log)


@pytest.fixture(scope="module")
def wordpiece() -> Tokenizer:
    """A tokenizer whose padding token does not have id 0."""
    trained = build_tokenizer(WordPiece(vocab_size=50), TEXTS * 3)
    return Tokenizer.from_json(trained.to_json(), {**trained.roles, "pad": "[MASK]"})


@pytest.fixture(scope="module")
def bytewise() -> Tokenizer:
    return build_tokenizer(Byte(specials=CLOSED), [])


def encoder(vocab_size: int, **changes: object) -> Encoder:
    return bert(2, D, 2, vocab_size=vocab_size, context=32).replace(**changes)


def models(wordpiece: Tokenizer, bytewise: Tokenizer) -> list[tuple[LanguageModel, Tokenizer]]:
    torch.manual_seed(0)
    built = [
        (build(encoder(wordpiece.vocab_size)), wordpiece),
        (build(gpt(2, D, 2, context=64, vocab_size=bytewise.vocab_size)), bytewise),
        (build(Recurrent(vocab_size=bytewise.vocab_size, d_model=D, layers=2, dropout=0.5)), bytewise),
    ]
    with torch.no_grad():
        for model, _ in built:
            for weight in model.parameters():
                weight.mul_(3.0)  # fresh weights would embed all texts almost equally
    return built


@pytest.mark.parametrize("pooling", get_args(Pooling))
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_text_in_a_batch_equals_the_text_alone(
    wordpiece: Tokenizer, bytewise: Tokenizer, kind: int, pooling: Pooling
) -> None:
    model, tokenizer = models(wordpiece, bytewise)[kind]
    batched = vectors(model, tokenizer, TEXTS, pooling=pooling, batch=3)
    alone = np.concatenate([vectors(model, tokenizer, [text], pooling=pooling) for text in TEXTS])
    assert batched.dtype == np.float32 and batched.shape == (len(TEXTS), D)
    assert batched == pytest.approx(alone, abs=2e-5)
    assert np.linalg.norm(batched, axis=1) == pytest.approx(np.ones(len(TEXTS)), abs=1e-5)
    if kind == 0 or pooling != "first":  # the first token of a causal model attends to no other
        assert np.abs(batched[0] - batched[3]).max() > 1e-3
    assert model.training  # unchanged


def test_padding_is_never_attended_to(wordpiece: Tokenizer, bytewise: Tokenizer) -> None:
    assert wordpiece.pad_id not in (None, 0)
    model, tokenizer = models(wordpiece, bytewise)[0]
    before = vectors(model, tokenizer, TEXTS)
    with torch.no_grad():
        model.embedding.weight[wordpiece.pad_id] = 1e4  # type: ignore[union-attr,operator]
    assert vectors(model, tokenizer, TEXTS) == pytest.approx(before, abs=1e-5)


def test_pooling_is_over_the_text_in_its_frame(wordpiece: Tokenizer, bytewise: Tokenizer) -> None:
    model, tokenizer = models(wordpiece, bytewise)[0]
    ids = [tokenizer.need("cls"), *tokenizer.encode(TEXTS[0]), tokenizer.need("sep")]
    with torch.no_grad():
        features = model.eval().features(torch.tensor([ids]))[0].numpy()
    expected = {"mean": features.mean(axis=0), "first": features[0], "last": features[-1]}
    for pooling, vector in expected.items():
        found = vectors(model, tokenizer, TEXTS, pooling=pooling, normalise=False)
        assert found[0] == pytest.approx(vector, abs=1e-5)


def test_a_decoder_that_was_trained_to_embed_reads_as_it_was_trained(bytewise: Tokenizer) -> None:
    """Although the tokenizer's file frames a text differently."""
    backend = tokenizers.Tokenizer.from_str(bytewise.to_json())
    special = [("<bos>", bytewise.need("bos"))]
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<bos> $A", special_tokens=special)
    begun = Tokenizer.from_json(backend.to_str(), bytewise.roles)
    assert begun.leading == (begun.bos_id,)
    torch.manual_seed(0)
    config = gpt(1, D, 2, context=64, vocab_size=bytewise.vocab_size)
    for head, ids in (
        (EmbeddingHead(), framed([begun.encode(TEXTS[0])], None, Frame.usual(begun)).tokens),
        (config.head, torch.tensor([[begun.need("bos"), *begun.encode(TEXTS[0])]])),
    ):
        model = build(config.replace(head=head.model_dump()))
        with torch.no_grad():
            expected = model.eval().features(ids)[0].mean(dim=0).numpy()
        assert vectors(model, begun, TEXTS[:1], normalise=False)[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("normalise", [True, False])
def test_vectors_that_are_not_finite_are_refused(wordpiece: Tokenizer, bytewise: Tokenizer, normalise: bool) -> None:
    for model, tokenizer in models(wordpiece, bytewise):
        with torch.no_grad():
            model.embedding.weight[tokenizer.encode("v")[0]] = torch.nan  # type: ignore[union-attr,operator]
        with pytest.raises(ModelError, match=r"^text 2: its vector is not finite \(NaN\)") as raised:
            vectors(model, tokenizer, ["toad", "v", "frog sat", "v v"], normalise=normalise)
        assert "\n" not in str(raised.value)
        assert np.isfinite(vectors(model, tokenizer, ["toad"], normalise=normalise)).all()


def test_a_model_made_to_embed_pools_as_it_was_trained_to(wordpiece: Tokenizer) -> None:
    head = EmbeddingHead(pooling="first").model_dump()
    model = build(encoder(wordpiece.vocab_size, head=head))
    first, mean = (vectors(model, wordpiece, TEXTS, pooling=pooling) for pooling in ("first", "mean"))
    assert vectors(model, wordpiece, TEXTS) == pytest.approx(first)
    assert np.abs(first - mean).max() > 1e-3
    ids = torch.tensor([[wordpiece.need("cls"), *wordpiece.encode(TEXTS[0]), wordpiece.need("sep")]])
    with torch.no_grad():
        assert vectors(model, wordpiece, TEXTS[:1]) == pytest.approx(model.eval()(ids).numpy(), abs=1e-6)


def test_long_texts_are_cut_with_a_message(wordpiece: Tokenizer) -> None:
    model = build(encoder(wordpiece.vocab_size))
    lines: list[str] = []
    long = " ".join(["frog"] * 100)
    found = vectors(model, wordpiece, ["sat", long], log=lines.append)
    assert lines == ["1 of 2 texts are longer than the 32 tokens this model reads; their ends are left out"]
    assert found[1] == pytest.approx(vectors(model, wordpiece, [" ".join(["frog"] * 30)])[0], abs=1e-5)


def test_models_and_texts_without_vectors_are_refused(wordpiece: Tokenizer, bytewise: Tokenizer) -> None:
    size = bytewise.vocab_size
    reader = vaswani(1, 8, 2, d_ff=16, dropout=0.0, vocab_size=size)
    for config in (NGram(vocab_size=size), Bahdanau(vocab_size=size, d_model=8), reader):
        with pytest.raises(ModelError, match="gives no vectors for a text"):
            vectors(build(config), bytewise, ["a"])
    bare = build_tokenizer(Byte(specials=Specials()), [])
    model = build(gpt(1, D, 2, context=64, vocab_size=bare.vocab_size))
    with pytest.raises(DataError, match="text 2 is empty"):
        vectors(model, bare, ["a", ""])
    assert vectors(model, bare, ["a", "abc"]).shape == (2, D)  # without a padding token, too
    assert vectors(model, bare, []).shape == (0, D)


def test_texts_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo words\n")
    (tmp_path / "a.jsonl").write_text('{"text": "one", "n": 1}\n{"text": "two words", "n": 2}\n')
    (tmp_path / "a.csv").write_text("n,body\n1,one\n2,two words\n")
    for name, column in (("a.txt", "text"), ("a.jsonl", "text"), ("a.csv", "body")):
        assert read_texts(str(tmp_path / name), column) == ["one", "two words"]
    (tmp_path / "gap.txt").write_text("one\n\ntwo\n")
    with pytest.raises(DataError, match=r"gap\.txt:2: 'text' is empty"):
        read_texts(str(tmp_path / "gap.txt"))
