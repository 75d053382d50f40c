"""Texts, and small tokenizers in the layouts of published models, trained on these texts."""

import io
import json
from functools import cache
from typing import Any

import pytest
import tokenizers
from tests.later import Later
from tokenizers import pre_tokenizers, processors, trainers

from weft.api.run import Run
from weft.api.settings import beam, sampling
from weft.decode.config import Beam, Sampling

transformers = Later("transformers")
sentencepiece = pytest.importorskip("sentencepiece")

MAX_NEW_TOKENS = 14
LINES = [
    "the cat sat on the mat",
    "a dog and a cat are not a mat",
    "the mat is red, the dog is not!",
    "die Katze saß auf der Matte",
    "ein Hund und eine Katze",
    "(1) 27 red dogs: 9 cats? yes.",
]
TEXTS = [
    *LINES,
    "the red cat",
    "  two spaces before",
    "two  spaces   between",
    "spaces after  ",
    "a tab\tand a cat",
    "Capitals ARE Here",
    "an emoji 🐸 and 漢字",
    "🐸",
    "x",
    "</s> and <unk> may be text",
    "so may <pad>",
    "so is <s>",
    "it's the dog's mat",
    "the the the the the the the the the the the the",
    "der Hund\u00a0saß",
    "  \u2002 wide  space",
    "e\u0301 é ﬁ",
]


@cache
def sentencepiece_model(size: int = 90, **options: Any) -> bytes:
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 3),
        model_writer=file,
        vocab_size=size,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return file.getvalue()


def scored_pieces(model: bytes | None = None) -> list[tuple[str, float]]:
    """Pieces of a SentencePiece model, without the three special ones, with their scores."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model or sentencepiece_model())
    return [(processor.id_to_piece(id), processor.get_score(id)) for id in range(3, processor.get_piece_size())]


def pieces_and_merges(model: bytes, specials: list[str], longest: int = 100) -> dict[str, Any]:
    """Vocabulary of a SentencePiece model, and all merges of two pieces that make one of at most `longest` letters."""
    pieces = [piece for piece, _ in scored_pieces(model)]
    vocab = {token: id for id, token in enumerate([*specials, *pieces])}
    splits = [(piece[:at], piece[at:]) for piece in pieces if len(piece) <= longest for at in range(1, len(piece))]
    return {"vocab": vocab, "merges": [pair for pair in splits if set(pair) <= vocab.keys()]}


@cache
def byte_bpe(*specials: str, size: int = 310) -> dict[str, Any]:
    """Vocabulary and merges of a byte-level BPE; special tokens have the first ids."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(merge) for merge in model["merges"]]}


def bart_bpe() -> dict[str, Any]:
    return byte_bpe("<s>", "<pad>", "</s>", "<unk>", "<mask>", size=330)


def bpe_with_bos() -> Any:
    """A tokenizer that puts bos before every text, as LLaMA's does."""
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    backend = transformers.GPT2Tokenizer(**bart_bpe(), **roles)._tokenizer
    backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 0)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **roles)


def search(run: Run, beams: int) -> Sampling | Beam:
    """Settings of a greedy search, or of a beam search, of which everything else is the run's default."""
    if beams == 1:
        return sampling(**{**run.defaults, "temperature": 0.0, "max_tokens": MAX_NEW_TOKENS})
    return beam(**{**run.beam_defaults, "beams": beams, "max_tokens": MAX_NEW_TOKENS})
