"""Decoders: weft continues prompts as the reference tokenizer, model and search do, also after an export.

As in `test_text_to_text`, special tokens in prompts are recognised only after `reading_specials`. One difference is
intended: transformers decodes bytes that are not UTF-8 to nothing legible if they are next to others (LLaMA's line feed
is a byte token), so the models here generate no byte tokens beyond ASCII.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.interop.hf_models import CASES as MODELS
from tests.interop.small_tokenizers import (
    MAX_NEW_TOKENS,
    TEXTS,
    bpe_with_bos,
    byte_bpe,
    pieces_and_merges,
    search,
    sentencepiece_model,
)
from tests.later import Later

from weft.api.export_model import export_model
from weft.api.import_model import import_model
from weft.api.load import load
from weft.api.run import Run
from weft.interop.hf.tokenizer import read_tokenizer
from weft.models.presets import preset

transformers = Later("transformers")
sentencepiece = pytest.importorskip("sentencepiece")


# ---- tokenizers


def write_bpe(folder: Path, specials: tuple[str, ...], settings: dict[str, Any]) -> None:
    """Write GPT-2's two files, and tokenizer_config.json."""
    bpe = byte_bpe(*specials)
    (folder / "vocab.json").write_text(json.dumps(bpe["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, bpe["merges"])]) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **settings}))


def gpt2(folder: Path) -> None:
    """GPT-2's, which has no frame."""
    write_bpe(folder, ("<|endoftext|>",), {f"{role}_token": "<|endoftext|>" for role in ("bos", "eos", "unk")})


def opt(folder: Path) -> None:
    """OPT's, which puts `</s>` before every text, and ends texts with it."""
    roles = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    write_bpe(folder, ("<s>", "<pad>", "</s>", "<unk>"), {"add_bos_token": True, **roles})
    (folder / "special_tokens_map.json").write_text(json.dumps(roles))


def bpe_pieces() -> bytes:
    """A SentencePiece BPE with byte fallback, as LLaMA and Gemma have it."""
    options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    return sentencepiece_model(370, model_type="bpe", byte_fallback=True, **options)


def llama_pieces(folder: Path) -> None:
    """LLaMA's SentencePiece model, which puts a space before every text."""
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True}
    (folder / "tokenizer.model").write_bytes(bpe_pieces())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def llama(folder: Path) -> None:
    """LLaMA's as tokenizer.json."""
    llama_pieces(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    (folder / "tokenizer.model").unlink()
    tokenizer.save_pretrained(folder)


def gemma(folder: Path) -> None:
    """Gemma's: LLaMA's pieces, without a space before a text."""
    bpe = pieces_and_merges(bpe_pieces(), ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"], longest=5)
    transformers.GemmaTokenizer(**bpe, add_bos_token=True).save_pretrained(folder)


def qwen2(folder: Path) -> None:
    """Qwen2's class, with which transformers reads every Qwen2, even if the folder names another."""
    transformers.Qwen2Tokenizer(**byte_bpe("<|endoftext|>")).save_pretrained(folder)


def with_bos(folder: Path) -> None:
    bpe_with_bos().save_pretrained(folder)


# ---- models


class Case(NamedTuple):
    """A model of `hf_models`, a function that writes its tokenizer, and the special token before a text."""

    model: str
    write_tokenizer: Callable[[Path], None]
    first: str | None
    texts: list[str] = TEXTS


CASES = {
    "gpt2": Case("gpt2", gpt2, None),
    "llama": Case("llama", llama, "<s>"),
    # transformers itself drops a space of a SentencePiece model and adds none after a special token; see the last test
    "llama with pieces": Case("llama", llama_pieces, "<s>", [text for text in TEXTS if text[0] not in " <"]),
    "opt": Case("opt", opt, "</s>"),
    "gemma": Case("gemma", gemma, "<bos>"),
}
QUICK = ("gpt2", "llama")
# not comparable here: transformers chooses longrope's factors by the longest row of a batch, its MPT ends at the
# context, its `generate` counts RoBERTa's positions from 0, unlike its model, its ModernBERT needs a padding token, and
# its Llama 4 scales queries by positions that count padding
APART = ("phi3-longrope", "mpt", "roberta", "xlm-roberta", "modernbert-decoder", "llama4_text")
OTHERS = [
    name
    for name, (kind, _) in MODELS.items()
    if kind.endswith(("CausalLM", "LMHeadModel")) and name not in CASES and not name.startswith(APART)
]


def left_padding(folder: Path) -> Any:
    """Read a tokenizer for generation: shorter prompts are padded on the left."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def reference(case: Case, folder: Path) -> tuple[Any, Any]:
    """Return a tokenizer and a model of transformers, which are saved in the folder."""
    folder.mkdir()
    name, settings = MODELS[case.model]
    model_class = getattr(transformers, name)
    (folder / "config.json").write_text(json.dumps({"model_type": model_class.config_class.model_type}))
    case.write_tokenizer(folder)
    tokenizer = left_padding(folder)
    roles = {role: getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos")}
    ids = {f"{role}_token_id": id for role, id in roles.items()} | {"pad_token_id": None}
    positions = {key: 96 for key in settings if key in ("max_position_embeddings", "n_positions")}
    torch.manual_seed(5)
    config = model_class.config_class(**{**settings, **positions, **ids, "vocab_size": len(tokenizer)})
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
        # let some texts end
        model.get_output_embeddings().weight[roles["eos"]] *= 2.5 if case.model == "opt" else 2.0
    vocabulary = tokenizer.get_vocab()
    beyond_ascii = [vocabulary[token] for byte in range(128, 256) if (token := f"<0x{byte:02X}>") in vocabulary]
    model.generation_config.suppress_tokens = beyond_ascii or None
    model.save_pretrained(folder)
    return tokenizer, model


def decoded(tokenizer: Any, rows: Any) -> list[str]:
    return tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@torch.no_grad()
def continuations(tokenizer: Any, model: Any, texts: list[str], *, beams: int, **options: Any) -> list[str]:
    """Texts and their continuations by transformers; `options` are those of the tokenizer."""
    batch = tokenizer(texts, return_tensors="pt", padding=True, **options)
    ids = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        num_beams=beams,
    )
    return decoded(tokenizer, ids)


def ours(run: Run, tokenizer: Any, texts: list[str], *, beams: int, **options: Any) -> tuple[list[str], set[str]]:
    """Texts as the reference tokenizer decodes them, with weft's continuations; and the reasons of their ends."""
    prompts = decoded(tokenizer, [tokenizer(text, **options)["input_ids"] for text in texts])
    completions = run.complete(texts, search(run, beams))
    joined = [text + completion.text for text, completion in zip(prompts, completions, strict=True)]
    return joined, {completion.finish for completion in completions}


def check(case: Case, folder: Path, every: bool = True) -> set[str]:
    """Compare the continuations of weft, transformers and the re-export; return the reasons of their ends.

    `every` checks the re-export and special tokens as text with one beam and with five; otherwise each with one of
    them.
    """
    tokenizer, model = reference(case, folder / "theirs")
    first = tokenizer.convert_ids_to_tokens(tokenizer(TEXTS[0])["input_ids"][0])
    assert (first if first in tokenizer.all_special_tokens else None) == case.first
    import_model(folder / "theirs", folder / "run")
    run = load(folder / "run", "cpu")
    export_model(folder / "run", "hf", folder / "out")
    exported = left_padding(folder / "out")
    exported_model = type(model).from_pretrained(folder / "out").eval()
    special = [text for text in case.texts if "<" in text] or case.texts[:3]
    reasons: set[str] = set()
    for beams in (1, 5):
        expected = continuations(tokenizer, model, case.texts, beams=beams)
        assert len({text[-4:] for text in expected}) > 5
        texts, reasons = ours(run.reading_specials(), tokenizer, case.texts, beams=beams)
        assert texts == expected
        if every or beams == 1:
            as_text = continuations(tokenizer, model, special, beams=beams, split_special_tokens=True)
            assert ours(run, tokenizer, special, beams=beams, split_special_tokens=True)[0] == as_text
        if every or beams > 1:
            assert continuations(exported, exported_model, case.texts, beams=beams) == expected
    return reasons


@pytest.mark.parametrize(
    ("name", "every"),
    [
        *(pytest.param(name, False, id=name) for name in QUICK),
        *(pytest.param(name, True, id=f"{name}-every", marks=pytest.mark.slow) for name in CASES),
    ],
)
def test_continuations_are_those_of_transformers(name: str, every: bool, tmp_path: Path) -> None:
    assert check(CASES[name], tmp_path, every) == {"eos", "length"}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_continuations_of_every_other_decoder(name: str, tmp_path: Path) -> None:
    """With one tokenizer for all but Qwen2."""
    check(Case(name, qwen2, None) if name.startswith("qwen2") else Case(name, with_bos, "<s>"), tmp_path)


def test_llamas_pieces_are_read_as_sentencepiece_reads_them(tmp_path: Path) -> None:
    """With all leading spaces; transformers' class takes one of them for the prefix."""
    llama_pieces(tmp_path)
    reader = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokenizer, _ = read_tokenizer(tmp_path, {"model_type": "llama"}, preset("llama-tiny"))
    assert tokenizer is not None
    assert tokenizer.leading == (reader.bos_id(),)
    assert [tokenizer.encode(text) for text in TEXTS] == reader.encode(TEXTS)
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS
