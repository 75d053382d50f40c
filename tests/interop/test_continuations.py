"""Prompts in, continuations out: a decoder goes on as its makers' tokenizer, model and search do, also after an export.

As in `test_text_to_text`, special tokens are found where weft is asked to. A difference is wanted: of bytes that are no
UTF-8, theirs makes nothing legible if they stand beside others (LLaMA's line end is a byte); so the models here write
no bytes beyond ASCII where a byte is a token that stands for one.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
import torch
from tests.interop.hf_models import CASES as MODELS
from tests.interop.test_text_to_text import LINES, NEW, TEXTS, opened, spm
from tests.later import Later
from tokenizers import pre_tokenizers, trainers

from weft.api.export_model import export_model
from weft.api.import_model import import_model
from weft.api.load import load
from weft.api.run import Run
from weft.api.settings import beam, sampling
from weft.interop.hf.tokenizer import read_tokenizer
from weft.models.presets import preset

transformers = Later("transformers")
sentencepiece = pytest.importorskip("sentencepiece")


# ---- the makers' tokenizers, small


@cache
def bytes_and_merges(*specials: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A BPE of bytes, whose special tokens come first."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(LINES, trainer)
    model = json.loads(made.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def gpt2(folder: Path) -> None:
    """GPT-2's two files: nothing stands around a text."""
    vocab, merges = bytes_and_merges("<|endoftext|>")
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, merges)]) + "\n")
    roles = {f"{role}_token": "<|endoftext|>" for role in ("bos", "eos", "unk")}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **roles}))


def opt(folder: Path) -> None:
    """OPT's: the same with `</s>` before every text, which also ends one."""
    vocab, merges = bytes_and_merges("<s>", "<pad>", "</s>", "<unk>")
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, merges)]) + "\n")
    roles = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, **roles}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps(roles))


def llama_pieces(folder: Path) -> None:
    """LLaMA's SentencePiece model: BPE with a space before every text, and bytes for what it has no piece of."""
    data = spm(
        370, model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False
    )
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True}
    (folder / "tokenizer.model").write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def llama(folder: Path) -> None:
    """The same as tokenizer.json."""
    llama_pieces(folder)
    read = transformers.AutoTokenizer.from_pretrained(folder)
    (folder / "tokenizer.model").unlink()
    read.save_pretrained(folder)


def gemma(folder: Path) -> None:
    """Gemma's: the same pieces without a space before."""
    data = spm(
        370, model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False
    )
    read = sentencepiece.SentencePieceProcessor(model_proto=data)
    pieces = [read.id_to_piece(id) for id in range(3, read.get_piece_size())]
    vocab = {token: id for id, token in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *pieces])}
    cut = [(piece[:at], piece[at:]) for piece in pieces if len(piece) < 6 for at in range(1, len(piece))]
    merges = [pair for pair in cut if set(pair) <= vocab.keys()]
    transformers.GemmaTokenizer(vocab=vocab, merges=merges, add_bos_token=True).save_pretrained(folder)


def qwen2(folder: Path) -> None:
    """Qwen2's own class, which transformers reads every Qwen2 with, whatever its folder says."""
    vocab, merges = bytes_and_merges("<|endoftext|>")
    transformers.Qwen2Tokenizer(vocab=vocab, merges=merges).save_pretrained(folder)


def shared(folder: Path) -> None:
    opened().save_pretrained(folder)


class Case(NamedTuple):
    """A model of `test_hf`, what writes its tokenizer's files, and what a text begins with."""

    model: str
    tokenizer: Callable[[Path], None]
    begins: str | None
    texts: list[str] = TEXTS


CASES = {
    "gpt2": Case("gpt2", gpt2, None),
    "llama": Case("llama", llama, "<s>"),
    # of its SentencePiece model transformers itself loses a space, and adds none after a special token: see below
    "llama with pieces": Case("llama", llama_pieces, "<s>", [text for text in TEXTS if text[0] not in " <"]),
    "opt": Case("opt", opt, "</s>"),
    "gemma": Case("gemma", gemma, "<bos>"),
}
QUICK = ("gpt2", "llama")
OTHERS = [
    name for name, (kind, _) in MODELS.items() if kind.endswith(("CausalLM", "LMHeadModel")) and name not in CASES
]


def theirs(case: Case, folder: Path) -> tuple[Any, Any]:
    """The makers' tokenizer and model, which are in the folder too."""
    folder.mkdir()
    name, settings = MODELS[case.model]
    kind = getattr(transformers, name)
    (folder / "config.json").write_text(json.dumps({"model_type": kind.config_class.model_type}))
    case.tokenizer(folder)
    tokenizer = read_by_them(folder)
    roles = {role: getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos")}
    ids = {f"{role}_token_id": id for role, id in roles.items()} | {"pad_token_id": None}
    places = {key: 96 for key in settings if key in ("max_position_embeddings", "n_positions")}
    torch.manual_seed(5)
    model = kind(kind.config_class(**{**settings, **places, **ids, "vocab_size": len(tokenizer)})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
        model.get_output_embeddings().weight[roles["eos"]] *= (
            2.5 if case.model == "opt" else 2.0
        )  # some texts shall end
    vocabulary = tokenizer.get_vocab()
    beyond = [vocabulary[token] for byte in range(128, 256) if (token := f"<0x{byte:02X}>") in vocabulary]
    model.generation_config.suppress_tokens = beyond or None
    model.save_pretrained(folder)
    return tokenizer, model


def read_by_them(folder: Path) -> Any:
    """A tokenizer as it is read where texts are to be continued: together, the shorter ones padded on the left."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@torch.no_grad()
def continued(tokenizer: Any, model: Any, texts: list[str], beams: int, **read_with: Any) -> list[str]:
    """The texts with what transformers makes of them."""
    read = tokenizer(texts, return_tensors="pt", padding=True, **read_with)
    ids = model.generate(
        input_ids=read["input_ids"],
        attention_mask=read["attention_mask"],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
        max_new_tokens=NEW,
        num_beams=beams,
    )
    return tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def ours(run: Run, tokenizer: Any, texts: list[str], beams: int, **read_with: Any) -> tuple[list[str], set[str]]:
    """The same by weft, after the prompts as their tokenizer gives them back, and why the texts end."""
    settings = (
        sampling(**{**run.defaults, "temperature": 0.0, "max_tokens": NEW})
        if beams == 1
        else beam(**{**run.beam_defaults, "beams": beams, "max_tokens": NEW})
    )
    ids = [tokenizer(text, **read_with)["input_ids"] for text in texts]
    read = tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    written = run.complete(texts, settings)
    together = [text + found.text for text, found in zip(read, written, strict=True)]
    return together, {found.finish for found in written}


def check(case: Case, folder: Path, every: bool = True) -> set[str]:
    """That all write the same, before and after; why the texts end.

    `every` way of reading special tokens and each re-export are tried with one beam and with five; else one of them.
    """
    tokenizer, model = theirs(case, folder / "theirs")
    first = tokenizer.convert_ids_to_tokens(tokenizer(TEXTS[0])["input_ids"][0])
    assert (first if first in tokenizer.all_special_tokens else None) == case.begins
    import_model(folder / "theirs", folder / "run")
    run = load(folder / "run", "cpu")
    export_model(folder / "run", "hf", folder / "out")
    there = read_by_them(folder / "out")
    again = type(model).from_pretrained(folder / "out").eval()
    ends: set[str] = set()
    for beams in (1, 5):
        expected = continued(tokenizer, model, case.texts, beams)
        assert len({text[-4:] for text in expected}) > 5
        found, why = ours(run.reading_specials(), tokenizer, case.texts, beams)
        assert found == expected
        if every or beams == 1:
            split, special = {"split_special_tokens": True}, [text for text in case.texts if "<" in text]
            special = special or case.texts[:3]
            theirs_ = continued(tokenizer, model, special, beams, **split)
            assert ours(run, tokenizer, special, beams, **split)[0] == theirs_
        if every or beams > 1:
            assert continued(there, again, case.texts, beams) == expected
        ends = why
    return ends


@pytest.mark.parametrize(
    ("name", "every"),
    [
        *(pytest.param(name, False, id=name) for name in QUICK),
        *(pytest.param(name, True, id=f"{name}-every", marks=pytest.mark.slow) for name in CASES),
    ],
)
def test_the_makers_go_on_the_same(name: str, every: bool, tmp_path: Path) -> None:
    assert check(CASES[name], tmp_path, every) == {"eos", "length"}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_every_other_decoder_goes_on_the_same(name: str, tmp_path: Path) -> None:
    """With one tokenizer for all but Qwen2."""
    check(Case(name, qwen2, None) if name.startswith("qwen2") else Case(name, shared, "<s>"), tmp_path)


def test_llamas_pieces_are_read_as_sentencepiece_reads_them(tmp_path: Path) -> None:
    """With the spaces that a text begins with, one of which transformers' own class takes for its prefix."""
    llama_pieces(tmp_path)
    read = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokenizer, _ = read_tokenizer(tmp_path, {"model_type": "llama"}, preset("llama-tiny"))
    assert tokenizer is not None
    assert tokenizer.leading == (read.bos_id(),)
    assert [tokenizer.encode(text) for text in TEXTS] == read.encode(TEXTS)
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS
