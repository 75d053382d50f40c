"""Encoder-decoders: weft writes what the reference tokenizer, model and search write, also after an export.

Reference tokenizers recognise special tokens in any text; weft does so only after `reading_specials`. Otherwise, text
that looks like a special token is text. Reference tokenizers other than unigram models support that as well
(`split_special_tokens`).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.interop import ctranslate2_models as ct2
from tests.interop.small_tokenizers import (
    MAX_NEW_TOKENS,
    TEXTS,
    bart_bpe,
    pieces_and_merges,
    scored_pieces,
    search,
    sentencepiece_model,
)
from tests.later import Later

from weft.api.export_model import export_model
from weft.api.import_model import import_model
from weft.api.load import load
from weft.api.settings import beam
from weft.interop.hf.tokenizer import M2M100
from weft.objectives.frame import ANY_LANGUAGES, LanguagePair

transformers = Later("transformers")

D, HEADS, FF = 16, 2, 24


# ---- tokenizers


def bart() -> Any:
    return transformers.BartTokenizer(**bart_bpe())


def with_specials(*specials: str) -> list[tuple[str, float]]:
    return [*((token, 0.0) for token in specials), *scored_pieces()]


def t5() -> Any:
    return transformers.T5Tokenizer(vocab=with_specials("<pad>", "</s>", "<unk>"), extra_ids=2)


def pegasus() -> Any:
    vocab = with_specials("<pad>", "</s>", "<mask_1>", "<mask_2>", "<unk_2>", "<unk>")
    return transformers.PegasusTokenizer(vocab=vocab, offset=3)


def mbart() -> Any:
    return transformers.MBartTokenizer(vocab=with_specials("<s>", "<pad>", "</s>", "<unk>"))


def mbart50() -> Any:
    return transformers.MBart50Tokenizer(vocab=with_specials("<unk>", "<s>", "</s>"))


def nllb() -> Any:
    model = sentencepiece_model(120, model_type="bpe")
    return transformers.NllbTokenizer(**pieces_and_merges(model, ["<s>", "<pad>", "</s>", "<unk>"]))


def files(*names: str, tokens: list[str], **settings: Any) -> Callable[[Path], None]:
    """Write SentencePiece models, and a vocab.json with the ids."""

    def write(folder: Path) -> None:
        for name in names:
            (folder / name).write_bytes(sentencepiece_model())
        (folder / "vocab.json").write_text(json.dumps({token: id for id, token in enumerate(tokens)}))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    return write


def marian(*languages: str) -> Callable[[Path], None]:
    tokens = ["</s>", "<unk>", *(piece for piece, _ in scored_pieces()), *languages, "<pad>"]
    return files("source.spm", "target.spm", tokens=tokens, tokenizer_class="MarianTokenizer")


def m2m() -> Callable[[Path], None]:
    tokens = [token for token, _ in with_specials("<s>", "<pad>", "</s>", "<unk>")]
    languages = [f"__{code}__" for code in M2M100]
    settings = {"tokenizer_class": "M2M100Tokenizer", "additional_special_tokens": languages}
    return files("sentencepiece.bpe.model", tokens=tokens, **settings)


# ---- models


class Case(NamedTuple):
    """Prefix of the model's classes, a tokenizer or a function that writes its files, ids and settings of generation,
    and the languages to request."""

    model: str
    tokenizer: Callable[[], Any]
    settings: dict[str, Any]
    languages: LanguagePair = ANY_LANGUAGES


SUMMARIES = {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0, "no_repeat_ngram_size": 3, "min_length": 4}
FAIRSEQ = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
PAD_FIRST = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
CASES = {
    "bart": Case("Bart", bart, {**FAIRSEQ, "forced_bos_token_id": 0, "forced_eos_token_id": 2}),
    "bart with a minimum length": Case("Bart", bart, {**FAIRSEQ, "min_length": 9}),
    "bart for summaries": Case("Bart", bart, {**FAIRSEQ, **SUMMARIES}),
    "marian": Case("Marian", marian, {"eos_token_id": 0, "forced_eos_token_id": 0}),
    "marian with languages": Case(
        "Marian", lambda: marian(">>deu<<", ">>eng<<"), {"eos_token_id": 0}, LanguagePair(None, "deu")
    ),
    "t5": Case("T5", t5, PAD_FIRST),
    "t5 with penalties": Case("T5", t5, {**PAD_FIRST, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2}),
    "mt5": Case("MT5", t5, PAD_FIRST),
    "pegasus": Case("Pegasus", pegasus, PAD_FIRST),
    "mbart": Case("MBart", mbart, FAIRSEQ, LanguagePair("de_DE", "ro_RO")),
    "mbart50": Case("MBart", mbart50, FAIRSEQ, LanguagePair("de_DE", "fr_XX")),
    "nllb": Case("M2M100", nllb, FAIRSEQ, LanguagePair("deu_Latn", "fra_Latn")),
    "m2m100": Case("M2M100", m2m, FAIRSEQ, LanguagePair("de", "fr")),
}
QUICK = ("bart", "bart for summaries", "marian")
CONFIG_KEYS = ("forced_bos_token_id", "forced_eos_token_id", "decoder_start_token_id")  # of a generation_config, too
GENERATION_KEYS = (  # of generation_config.json only
    *("min_length", "bad_words_ids", "suppress_tokens", "no_repeat_ngram_size"),
    *("num_beams", "early_stopping", "length_penalty", "renormalize_logits", "repetition_penalty"),
)


def sizes(kind: str) -> dict[str, Any]:
    if kind in ("T5", "MT5"):
        layers = {"num_layers": 1, "num_decoder_layers": 1}
        return {"d_model": D, "d_kv": D // HEADS, "num_heads": HEADS, "d_ff": FF, **layers}
    settings: dict[str, Any] = {"d_model": D, "max_position_embeddings": 64}
    for side in ("encoder", "decoder"):
        settings |= {f"{side}_layers": 1, f"{side}_attention_heads": HEADS, f"{side}_ffn_dim": FF}
    return settings


def reference(case: Case, folder: Path) -> tuple[Any, Any]:
    """Return a tokenizer and a model of transformers, which are saved in the folder."""
    folder.mkdir()
    name = f"{case.model}MTModel" if case.model == "Marian" else f"{case.model}ForConditionalGeneration"
    model_class = getattr(transformers, name)
    (folder / "config.json").write_text(json.dumps({"model_type": model_class.config_class.model_type}))
    made = case.tokenizer()
    made.save_pretrained(folder) if hasattr(made, "save_pretrained") else made(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    size = tokenizer.get_lang_id("zu") + 1 if hasattr(tokenizer, "get_lang_id") else len(tokenizer)
    pad = tokenizer.pad_token_id
    settings = {"pad_token_id": pad, "decoder_start_token_id": pad, "bad_words_ids": [[pad]], **case.settings}
    languages = [id for token, id in tokenizer.get_vocab().items() if token.startswith(">>")]
    settings["suppress_tokens"] = languages or None  # weft never generates them, transformers would
    torch.manual_seed(3)
    ids = {key: value for key, value in settings.items() if key not in GENERATION_KEYS}
    model = model_class(model_class.config_class(vocab_size=size, **sizes(case.model), **ids)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and ("embed_positions" not in name or case.model in ("Bart", "MBart")):
                cross = "encoder_attn." in name or "EncDecAttention" in name  # let the source change the answer
                parameter.normal_(std=2.0 if cross else 0.4)
        if "min_length" in settings:
            model.final_logits_bias[0, tokenizer.eos_token_id] = 6.0  # answers would end before min_length
    for key in (*CONFIG_KEYS, *GENERATION_KEYS):
        setattr(model.generation_config, key, settings.get(key))
    model.save_pretrained(folder)
    return tokenizer, model


def texts_for(case: Case) -> list[str]:
    """All texts, except for M2M-100 those that contain padding, after which it counts positions from the start."""
    return [text for text in TEXTS if case.model != "M2M100" or "<pad>" not in text]


def splits_specials(tokenizer: Any) -> bool:
    """Whether `split_special_tokens` makes the tokenizer read special tokens as text; a unigram model does not."""
    backend = getattr(tokenizer, "_tokenizer", None)
    return backend is not None and type(backend.model).__name__ == "BPE"


@torch.no_grad()
def answers(tokenizer: Any, model: Any, case: Case, *, beams: int, **options: Any) -> list[str]:
    """Answers by transformers; `options` are those of the tokenizer."""
    texts, (source, target) = texts_for(case), case.languages
    start: dict[str, int] = {}
    if case.model == "Marian" and target is not None:
        texts = [f">>{target}<<{text}" for text in texts]
    elif target is not None:
        tokenizer.src_lang = source
        language_id = getattr(tokenizer, "get_lang_id", tokenizer.convert_tokens_to_ids)
        starts = type(tokenizer).__name__ == "MBartTokenizer"
        start["decoder_start_token_id" if starts else "forced_bos_token_id"] = language_id(target)
    batch = tokenizer(texts, return_tensors="pt", padding=True, **options)
    ids = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        num_beams=beams,
        **start,
    )
    return decoded(tokenizer, ids)


def decoded(tokenizer: Any, rows: Any) -> list[str]:
    return tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize(
    ("name", "every"),
    [
        *(pytest.param(name, False, id=name) for name in QUICK),
        *(pytest.param(name, True, id=f"{name}-every", marks=pytest.mark.slow) for name in CASES),
    ],
)
def test_answers_are_those_of_transformers(name: str, every: bool, tmp_path: Path) -> None:
    """`every` checks the re-export and special tokens with one beam and with five; otherwise each with one of them."""
    case = CASES[name]
    tokenizer, model = reference(case, tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "run")
    run = load(tmp_path / "run", "cpu")
    export_model(tmp_path / "run", "hf", tmp_path / "out")
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    exported_model, texts = type(model).from_pretrained(tmp_path / "out").eval(), texts_for(case)
    for beams in (1, 5):
        expected = answers(tokenizer, model, case, beams=beams)
        assert len(set(expected)) > 5
        trusting = run.reading_specials()
        assert trusting.translate(texts, search(run, beams), languages=case.languages) == expected
        if every or beams > 1:  # the exported search settings matter with several beams
            assert answers(exported, exported_model, case, beams=beams) == expected
        if (every or beams == 1) and splits_specials(tokenizer):
            as_text = answers(tokenizer, model, case, beams=beams, split_special_tokens=True)
            assert run.translate(texts, search(run, beams), languages=case.languages) == as_text


# ---- CTranslate2


@pytest.mark.parametrize("checked", [(5,), pytest.param((1, 5), marks=pytest.mark.slow)], ids=["5", "1-and-5"])
def test_answers_of_a_converted_marian_are_those_of_ctranslate2(checked: tuple[int, ...], tmp_path: Path) -> None:
    """The converter leaves eos to the tokenizer; `checked` are the beams with which the export is compared, too."""
    theirs = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    case = CASES["marian"]
    tokenizer, _ = reference(case, tmp_path / "theirs")
    spm = ["source.spm", "target.spm"]
    theirs.converters.TransformersConverter(str(tmp_path / "theirs"), copy_files=spm).convert(
        str(tmp_path / "converted")
    )
    import_model(tmp_path / "converted", tmp_path / "run")
    run = load(tmp_path / "run", "cpu")
    translator = theirs.Translator(str(tmp_path / "converted"), compute_type="float32", intra_threads=1)
    texts = [text for text in TEXTS if "<pad>" not in text]  # CTranslate2 has no such token
    rows = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in texts]
    export_model(tmp_path / "run", "hf", tmp_path / "out")
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    exported_model = transformers.MarianMTModel.from_pretrained(tmp_path / "out").eval()
    for beams in (1, 5):
        results = translator.translate_batch(rows, beam_size=beams, max_decoding_length=MAX_NEW_TOKENS)
        ids = [tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
        expected = decoded(tokenizer, ids)
        assert len(set(expected)) > 5
        assert run.reading_specials().translate(texts, search(run, beams)) == expected
        if beams in checked:
            pairs = zip(TEXTS, answers(exported, exported_model, case, beams=beams), strict=True)
            assert [answer for text, answer in pairs if text in texts] == expected


@pytest.mark.parametrize(
    ("bos", "eos", "scale"),
    [(False, False, 4.0), (True, False, 4.0), (True, False, 5.0), (False, True, 4.0), (True, True, 4.0)],
)
def test_ctranslate2s_settings_define_the_frame_of_a_source(bos: bool, eos: bool, scale: float, tmp_path: Path) -> None:
    """CTranslate2's search excludes empty answers, so short ones become likelier; the third case has one."""
    theirs = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    model = ct2.random_model(ct2.MODELS["opennmt"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(float(name.endswith("norm.weight")))
            elif ".cross." in name:
                parameter.mul_(scale)  # let the source change the answer
    data = ct2.binary(*ct2.variables(model))
    folder = ct2.folder(tmp_path / "theirs", data, add_source_bos=bos, add_source_eos=eos)
    import_model(folder, tmp_path / "run")
    run = load(tmp_path / "run", "cpu")
    assert run.tokenizer.pad_id is None  # texts of different lengths are read in one batch even so
    translator = theirs.Translator(str(folder), compute_type="float32", intra_threads=1)
    texts = [" ".join(f"w{(7 * n + k * k) % 20}" for k in range(1 + n % 6)) for n in range(20)]
    for beams in (1, 5):
        results = translator.translate_batch([text.split() for text in texts], beam_size=beams, max_decoding_length=8)
        expected = [" ".join(token for token in result.hypotheses[0] if token != "<s>") for result in results]
        assert len(set(expected)) > 5
        assert run.translate(texts, beam(**{**run.beam_defaults, "beams": beams, "max_tokens": 8})) == expected
