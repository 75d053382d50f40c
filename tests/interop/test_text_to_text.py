"""Text in, text out: what weft writes is what the makers' own tokenizer, model and search write, also after an export.

One thing differs on purpose: text that merely looks like a special token is text in weft, so their tokenizers are asked
to read it so (`split_special_tokens`).
"""

import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from weft.api.export_model import export_model
from weft.api.import_model import import_model
from weft.api.run import Run, load
from weft.api.settings import beam, sampling
from weft.interop.framing import M2M100
from weft.objectives.languages import ANY, Asked

transformers = pytest.importorskip("transformers")
sentencepiece = pytest.importorskip("sentencepiece")

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
    "</s> and <pad> are text here",
    "so is <s>",
    "it's the dog's mat",
    "the the the the the the the the the the the the",
    "der Hund\u00a0saß",
    "  \u2002 wide  space",
    "e\u0301 é ﬁ",
]
D, HEADS, FF, NEW = 16, 2, 24, 14


# ---- the makers' tokenizers, small


@cache
def spm(size: int = 90, **given: Any) -> bytes:
    """A SentencePiece model of the lines."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 3),
        model_writer=file,
        vocab_size=size,
        hard_vocab_limit=False,
        minloglevel=2,
        **given,
    )
    return file.getvalue()


def scored() -> list[tuple[str, float]]:
    """Its pieces but the special ones, with their scores."""
    read = sentencepiece.SentencePieceProcessor(model_proto=spm())
    return [(read.id_to_piece(id), read.get_score(id)) for id in range(3, read.get_piece_size())]


def bart() -> Any:
    import tokenizers
    from tokenizers import pre_tokenizers, trainers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=specials, initial_alphabet=letters, show_progress=False
    )
    made.train_from_iterator(LINES, trainer)
    model = json.loads(made.to_str())["model"]
    return transformers.BartTokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])


def t5() -> Any:
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return transformers.T5Tokenizer(vocab=[*specials, *scored()], extra_ids=2)


def fairseq() -> list[tuple[str, float]]:
    return [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *scored()]


def files(*names: str, tokens: list[str], **settings: Any) -> Callable[[Path], None]:
    """SentencePiece models with the ids of a vocab.json."""

    def write(folder: Path) -> None:
        for name in names:
            (folder / name).write_bytes(spm())
        (folder / "vocab.json").write_text(json.dumps({token: id for id, token in enumerate(tokens)}))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    return write


def marian(*languages: str) -> Callable[[Path], None]:
    tokens = ["</s>", "<unk>", *(piece for piece, _ in scored()), *languages, "<pad>"]
    return files("source.spm", "target.spm", tokens=tokens, tokenizer_class="MarianTokenizer")


def m2m() -> Callable[[Path], None]:
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *(piece for piece, _ in scored())]
    languages = [f"__{code}__" for code in M2M100.split()]
    settings = {"tokenizer_class": "M2M100Tokenizer", "additional_special_tokens": languages}
    return files("sentencepiece.bpe.model", tokens=tokens, **settings)


def mbart50() -> Any:
    return transformers.MBart50Tokenizer(vocab=[("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *scored()])


def nllb() -> Any:
    read = sentencepiece.SentencePieceProcessor(model_proto=spm(120, model_type="bpe"))
    pieces = [read.id_to_piece(id) for id in range(3, read.get_piece_size())]
    vocab = {token: id for id, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
    cut = [(piece[:at], piece[at:]) for piece in pieces for at in range(1, len(piece))]
    return transformers.NllbTokenizer(vocab=vocab, merges=[pair for pair in cut if set(pair) <= vocab.keys()])


# ---- the makers' models


def sizes(kind: str) -> dict[str, Any]:
    if kind == "T5":
        layers = {"num_layers": 1, "num_decoder_layers": 1}
        return {"d_model": D, "d_kv": D // HEADS, "num_heads": HEADS, "d_ff": FF, **layers}
    found: dict[str, Any] = {"d_model": D, "max_position_embeddings": 64}
    for side in ("encoder", "decoder"):
        found |= {f"{side}_layers": 1, f"{side}_attention_heads": HEADS, f"{side}_ffn_dim": FF}
    return found


class Case(NamedTuple):
    """A family: its model's class, its tokenizer or what writes its files, ids in its config, and languages to name."""

    model: str
    tokenizer: Callable[..., Any]
    ids: dict[str, Any]
    languages: Asked = ANY


FAIRSEQ = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
CASES = {
    "bart": Case("Bart", bart, {**FAIRSEQ, "forced_bos_token_id": 0, "forced_eos_token_id": 2}),
    "marian": Case("Marian", lambda: marian(), {"eos_token_id": 0, "forced_eos_token_id": 0}),
    "marian to several": Case("Marian", lambda: marian(">>deu<<", ">>eng<<"), {"eos_token_id": 0}, Asked(None, "deu")),
    "t5": Case("T5", t5, {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}),
    "mbart": Case("MBart", lambda: transformers.MBartTokenizer(vocab=fairseq()), FAIRSEQ, Asked("de_DE", "ro_RO")),
    "mbart50": Case("MBart", mbart50, FAIRSEQ, Asked("de_DE", "fr_XX")),
    "nllb": Case("M2M100", nllb, FAIRSEQ, Asked("deu_Latn", "fra_Latn")),
    "m2m100": Case("M2M100", m2m, FAIRSEQ, Asked("de", "fr")),
}
QUICK = ("bart", "marian")
GENERATED = ("forced_bos_token_id", "forced_eos_token_id", "decoder_start_token_id", "bad_words_ids", "suppress_tokens")


def theirs(case: Case, folder: Path) -> tuple[Any, Any]:
    """The makers' tokenizer and model, which are in the folder too."""
    folder.mkdir()
    name = f"{case.model}MTModel" if case.model == "Marian" else f"{case.model}ForConditionalGeneration"
    kind = getattr(transformers, name)
    (folder / "config.json").write_text(json.dumps({"model_type": kind.config_class.model_type}))
    made = case.tokenizer()
    made.save_pretrained(folder) if hasattr(made, "save_pretrained") else made(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    size = tokenizer.get_lang_id("zu") + 1 if hasattr(tokenizer, "get_lang_id") else len(tokenizer)
    pad = tokenizer.pad_token_id
    # no trained model writes padding, and what weft shows of an unknown token, theirs leave out
    ids = {"pad_token_id": pad, "decoder_start_token_id": pad, **case.ids}
    ids |= {"bad_words_ids": [[pad]], "suppress_tokens": [tokenizer.unk_token_id]}
    torch.manual_seed(3)
    given = {key: id for key, id in ids.items() if key not in GENERATED[-2:]}
    model = kind(kind.config_class(vocab_size=size, **sizes(case.model), **given)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and ("embed_positions" not in name or case.model in ("Bart", "MBart")):
                cross = "encoder_attn." in name or "EncDecAttention" in name  # what is read shall matter
                parameter.normal_(std=2.0 if cross else 0.4)
    for key in GENERATED:
        setattr(model.generation_config, key, ids.get(key))
    model.save_pretrained(folder)
    return tokenizer, model


def asked(tokenizer: Any) -> list[str]:
    """Texts for a tokenizer: a unigram model of theirs finds even special tokens that it is not asked to find."""
    model = getattr(tokenizer, "_tokenizer", None)
    return TEXTS if model is not None and type(model.model).__name__ == "BPE" else [t for t in TEXTS if "<" not in t]


@torch.no_grad()
def answers(tokenizer: Any, model: Any, case: Case, beams: int) -> list[str]:
    """What transformers makes of the texts."""
    texts, (reads, writes) = asked(tokenizer), case.languages
    given: dict[str, Any] = {}
    if case.model == "Marian" and writes is not None:
        texts = [f">>{writes}<<{text}" for text in texts]
    elif writes is not None:
        tokenizer.src_lang = reads
        known = getattr(tokenizer, "get_lang_id", tokenizer.convert_tokens_to_ids)
        starts = type(tokenizer).__name__ == "MBartTokenizer"
        given["decoder_start_token_id" if starts else "forced_bos_token_id"] = known(writes)
    if beams > 1:  # as long as a better text may be found, with probabilities that sum to 1
        given |= {"num_beams": beams, "early_stopping": "never", "renormalize_logits": True}
    read = tokenizer(texts, return_tensors="pt", padding=True, split_special_tokens=True)
    ids = model.generate(
        input_ids=read["input_ids"],
        attention_mask=read["attention_mask"],
        do_sample=False,
        max_new_tokens=NEW,
        **given,
    )
    return tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def ours(run: Run, texts: list[str], beams: int, languages: Asked = ANY) -> list[str]:
    """What weft makes of them."""
    settings = (
        sampling(**{**run.defaults, "temperature": 0.0, "max_tokens": NEW})
        if beams == 1
        else beam(**{**run.beam_defaults, "beams": beams, "max_tokens": NEW})
    )
    return run.translate(texts, settings, languages=languages)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_the_makers_write_the_same(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    tokenizer, model = theirs(case, tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "run")
    run = load(tmp_path / "run", "cpu")
    export_model(tmp_path / "run", "hf", tmp_path / "out")
    there = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    again = type(model).from_pretrained(tmp_path / "out").eval()
    for beams in (1, 5):
        expected = answers(tokenizer, model, case, beams)
        assert len(set(expected)) > 5
        assert ours(run, asked(tokenizer), beams, case.languages) == expected
        assert answers(there, again, case, beams) == expected
