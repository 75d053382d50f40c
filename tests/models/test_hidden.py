"""Frames of texts: by the tokenizer's file, or as in weft's training."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest
import tokenizers
import torch

from weft.data.batch import Frame, framed
from weft.models.build import build
from weft.models.config import Recurrent
from weft.models.head_config import ClassificationHead
from weft.models.hidden import FramedText, frame, frame_for, read, trained_frame
from weft.models.presets import bert, gpt
from weft.text.config import Byte, Specials, WordPiece
from weft.text.tokenizer import Tokenizer, build_tokenizer

TEXTS = ["the frog sat", "a", "the toad leapt over the frog"]


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return build_tokenizer(Byte(), [])


def with_frame(tokenizer: Tokenizer, single: str) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    special = [("<bos>", tokenizer.need("bos")), ("<eos>", tokenizer.need("eos"))]
    backend.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=special)
    return Tokenizer.from_json(backend.to_str(), tokenizer.roles)


def test_frames_of_a_tokenizer_file(plain: Tokenizer) -> None:
    bos, eos = plain.need("bos"), plain.need("eos")
    ids = [10, 11, 12, 13]
    assert frame(with_frame(plain, "<bos> $A"), ids, None) == FramedText([bos, *ids], 1, 4)
    assert frame(with_frame(plain, "<bos> $A <eos>"), ids, None) == FramedText([bos, *ids, eos], 1, 4)
    assert frame(with_frame(plain, "$A <eos>"), ids, None) == FramedText([*ids, eos], 0, 4)
    assert frame(with_frame(plain, "<bos> $A"), ids, 3) == FramedText([bos, 10, 11], 1, 2)
    assert frame(with_frame(plain, "<bos> $A"), [], None) == FramedText([bos], 1, 0)


@pytest.mark.parametrize("max_tokens", [None, 6])
def test_wefts_tokenizers_frame_as_in_training(plain: Tokenizer, max_tokens: int | None) -> None:
    wordpiece = build_tokenizer(WordPiece(vocab_size=50), TEXTS * 3)  # its file has the frame of training
    for tokenizer in (plain, wordpiece):
        for ids in map(tokenizer.encode, TEXTS):
            trained_on = framed([ids], None, Frame.usual(tokenizer), length=max_tokens).tokens[0].tolist()
            assert frame(tokenizer, ids, max_tokens).ids == trained_on
            assert trained_frame(tokenizer, ids, max_tokens).ids == trained_on
    assert frame(build_tokenizer(Byte(specials=Specials()), []), [5, 6], None) == FramedText([5, 6], 0, 2)


def test_models_that_only_weft_trains_use_its_frame() -> None:
    decoder = gpt(1, 16, 2, context=32, vocab_size=300)
    labelled = decoder.replace(head=ClassificationHead(labels=2, pooling="last").model_dump())
    assert frame_for(build(decoder)) is frame
    assert frame_for(build(bert(1, 16, 2, vocab_size=300, context=32))) is frame
    assert frame_for(build(labelled)) is trained_frame
    assert frame_for(build(Recurrent(vocab_size=300, d_model=16))) is trained_frame


@pytest.mark.parametrize("single", ["<bos> $A", "<bos> $A <eos>"])
def test_features_are_those_of_transformers(plain: Tokenizer, single: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from weft.interop.hf import hf

    tokenizer = with_frame(plain, single)
    torch.manual_seed(0)
    settings = {"tie_word_embeddings": True, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 4, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(vocab_size=tokenizer.vocab_size, **settings)
    theirs = transformers.LlamaModel(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    theirs.save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    reading = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    found = hf.read(tmp_path)
    assert found.tokenizer is not None
    ours = build(found.model)
    ours.load_state_dict({name: make() for name, make in found.weights.items()}, strict=False)
    texts = [frame_for(ours)(found.tokenizer, found.tokenizer.encode(text), 64) for text in TEXTS]
    for batch in read(ours, found.tokenizer, texts):
        for row, features, mask in zip(*batch, strict=True):
            ids = reading(TEXTS[row], return_tensors="pt")["input_ids"]
            assert texts[row].ids == ids[0].tolist()
            with torch.no_grad():
                expected = theirs(ids).last_hidden_state[0]
            assert (features[mask] - expected).abs().max() < 1e-4
