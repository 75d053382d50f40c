"""Text in, text out: what weft writes is what the makers' own tokenizer, model and search write, also after an export.

Their tokenizers find special tokens in any text, as weft does where it is asked to (`reading_specials`). Otherwise what
merely looks like one is text, which theirs can be asked for too (`split_special_tokens`), but for unigram models.
"""

import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
import torch
from tests.interop import test_ctranslate2 as by_hand
from tests.later import Later
from tokenizers import pre_tokenizers, processors, trainers

import weft
from weft.api.export_model import export_model
from weft.api.import_model import import_model
from weft.api.load import load
from weft.api.run import Run
from weft.api.settings import beam, sampling
from weft.interop.hf.tokenizer import M2M100
from weft.objectives.frame import ANY_LANGUAGES, LanguagePair

transformers = Later("transformers")
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
    "</s> and <unk> may be text",
    "so may <pad>",
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


@cache
def merged() -> dict[str, Any]:
    """A BPE of bytes, as GPT-2 and BART have it."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=specials, initial_alphabet=letters, show_progress=False
    )
    made.train_from_iterator(LINES, trainer)
    model = json.loads(made.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(merge) for merge in model["merges"]]}


def bart() -> Any:
    return transformers.BartTokenizer(**merged())


def t5() -> Any:
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return transformers.T5Tokenizer(vocab=[*specials, *scored()], extra_ids=2)


def pegasus() -> Any:
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<mask_1>", 0.0), ("<mask_2>", 0.0), ("<unk_2>", 0.0), ("<unk>", 0.0)]
    return transformers.PegasusTokenizer(vocab=[*specials, *scored()], offset=3)


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
    languages = [f"__{code}__" for code in M2M100]
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
    if kind in ("T5", "MT5"):
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
    languages: LanguagePair = ANY_LANGUAGES


SUMS_UP = {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0, "no_repeat_ngram_size": 3, "min_length": 4}
FAIRSEQ = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
CASES = {
    "bart": Case("Bart", bart, {**FAIRSEQ, "forced_bos_token_id": 0, "forced_eos_token_id": 2}),
    "bart of a least length": Case("Bart", bart, {**FAIRSEQ, "min_length": 9}),
    "bart that sums up": Case("Bart", bart, {**FAIRSEQ, **SUMS_UP}),
    "marian": Case("Marian", lambda: marian(), {"eos_token_id": 0, "forced_eos_token_id": 0}),
    "marian to several": Case(
        "Marian", lambda: marian(">>deu<<", ">>eng<<"), {"eos_token_id": 0}, LanguagePair(None, "deu")
    ),
    "t5": Case("T5", t5, {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}),
    "t5 that repeats little": Case(
        "T5",
        t5,
        {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
        | {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    ),
    "mt5": Case("MT5", t5, {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}),
    "pegasus": Case("Pegasus", pegasus, {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}),
    "mbart": Case(
        "MBart", lambda: transformers.MBartTokenizer(vocab=fairseq()), FAIRSEQ, LanguagePair("de_DE", "ro_RO")
    ),
    "mbart50": Case("MBart", mbart50, FAIRSEQ, LanguagePair("de_DE", "fr_XX")),
    "nllb": Case("M2M100", nllb, FAIRSEQ, LanguagePair("deu_Latn", "fra_Latn")),
    "m2m100": Case("M2M100", m2m, FAIRSEQ, LanguagePair("de", "fr")),
}
QUICK = ("bart", "bart that sums up", "marian")
GENERATED = (
    *("forced_bos_token_id", "forced_eos_token_id", "decoder_start_token_id"),
    *("min_length", "bad_words_ids", "suppress_tokens", "no_repeat_ngram_size"),
    *("num_beams", "early_stopping", "length_penalty", "renormalize_logits", "repetition_penalty"),
)


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
    ids = {"pad_token_id": pad, "decoder_start_token_id": pad, "bad_words_ids": [[pad]], **case.ids}
    marks = [id for token, id in tokenizer.get_vocab().items() if token.startswith(">>")]
    ids |= {"suppress_tokens": marks or None}  # which no answer has, but theirs would show it
    torch.manual_seed(3)
    given = {key: id for key, id in ids.items() if key not in GENERATED[3:]}
    model = kind(kind.config_class(vocab_size=size, **sizes(case.model), **given)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and ("embed_positions" not in name or case.model in ("Bart", "MBart")):
                cross = "encoder_attn." in name or "EncDecAttention" in name  # what is read shall matter
                parameter.normal_(std=2.0 if cross else 0.4)
        if "min_length" in ids:
            model.final_logits_bias[0, tokenizer.eos_token_id] = 6.0  # an end that comes early, if it may
    for key in GENERATED:
        setattr(model.generation_config, key, ids.get(key))
    model.save_pretrained(folder)
    return tokenizer, model


def read_alike(case: Case) -> list[str]:
    """The texts, but for M2M-100's without padding in one, at which its positions start anew."""
    return [text for text in TEXTS if case.model != "M2M100" or "<pad>" not in text]


def splits(tokenizer: Any) -> bool:
    """Whether their tokenizer can be asked to read special tokens as text: a unigram model finds them by itself."""
    model = getattr(tokenizer, "_tokenizer", None)
    return model is not None and type(model.model).__name__ == "BPE"


@torch.no_grad()
def answers(tokenizer: Any, model: Any, case: Case, beams: int, **read_with: Any) -> list[str]:
    """What transformers makes of the texts."""
    texts, (reads, writes) = read_alike(case), case.languages
    given: dict[str, Any] = {"num_beams": beams}
    if case.model == "Marian" and writes is not None:
        texts = [f">>{writes}<<{text}" for text in texts]
    elif writes is not None:
        tokenizer.src_lang = reads
        known = getattr(tokenizer, "get_lang_id", tokenizer.convert_tokens_to_ids)
        starts = type(tokenizer).__name__ == "MBartTokenizer"
        given["decoder_start_token_id" if starts else "forced_bos_token_id"] = known(writes)
    read = tokenizer(texts, return_tensors="pt", padding=True, **read_with)
    ids = model.generate(
        input_ids=read["input_ids"],
        attention_mask=read["attention_mask"],
        do_sample=False,
        max_new_tokens=NEW,
        **given,
    )
    return tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def ours(run: Run, texts: list[str], beams: int, languages: LanguagePair = ANY_LANGUAGES) -> list[str]:
    """What weft makes of them."""
    settings = (
        sampling(**{**run.defaults, "temperature": 0.0, "max_tokens": NEW})
        if beams == 1
        else beam(**{**run.beam_defaults, "beams": beams, "max_tokens": NEW})
    )
    return run.translate(texts, settings, languages=languages)


@pytest.mark.parametrize(
    ("name", "every"),
    [
        *(pytest.param(name, False, id=name) for name in QUICK),
        *(pytest.param(name, True, id=f"{name}-every", marks=pytest.mark.slow) for name in CASES),
    ],
)
def test_the_makers_write_the_same(name: str, every: bool, tmp_path: Path) -> None:
    """With `every`, the re-export and special tokens with one beam and with five; else one of them with each."""
    case = CASES[name]
    tokenizer, model = theirs(case, tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "run")
    run = load(tmp_path / "run", "cpu")
    export_model(tmp_path / "run", "hf", tmp_path / "out")
    there = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    again, texts = type(model).from_pretrained(tmp_path / "out").eval(), read_alike(case)
    for beams in (1, 5):
        expected = answers(tokenizer, model, case, beams)
        assert len(set(expected)) > 5
        assert ours(run.reading_specials(), texts, beams, case.languages) == expected
        if every or beams > 1:  # which the exported settings of a search are for
            assert answers(there, again, case, beams) == expected
        if (every or beams == 1) and splits(tokenizer):
            assert ours(run, texts, beams, case.languages) == answers(
                tokenizer, model, case, beams, split_special_tokens=True
            )


# ---- texts that get a label


def opened() -> Any:
    """A tokenizer that puts bos before every text, as LLaMA's does."""
    made = transformers.GPT2Tokenizer(**merged(), bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made._tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 0)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


PLAIN = {"n_embd": D, "n_layer": 1, "n_head": HEADS, "n_positions": 64}
LABELLED: dict[str, tuple[str, Callable[[], Any], dict[str, Any]]] = {
    "gpt2": ("GPT2", lambda: transformers.GPT2Tokenizer(**merged(), eos_token="</s>", bos_token="</s>"), PLAIN),
    "gpt2 with bos": ("GPT2", opened, PLAIN),
    "roberta": (
        "Roberta",
        lambda: transformers.RobertaTokenizer(**merged()),
        {"hidden_size": D, "num_hidden_layers": 1, "num_attention_heads": HEADS, "intermediate_size": FF}
        | {"max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1},
    ),
}


@pytest.mark.parametrize("name", LABELLED)
def test_texts_and_pairs_get_the_makers_labels(name: str, tmp_path: Path) -> None:
    """Classifiers read a text, or two, in the frame of their own tokenizer: GPT-2's is none, RoBERTa's has two eos."""
    kind, make, settings = LABELLED[name]
    made, tokenizer = getattr(transformers, f"{kind}ForSequenceClassification"), make()
    torch.manual_seed(0)
    model = made(made.config_class(vocab_size=len(tokenizer), num_labels=3, **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    model.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "run")
    run = load(tmp_path / "run", "cpu")
    read = {"split_special_tokens": True, "return_tensors": "pt"}
    for second in (None, list(reversed(TEXTS))):
        rows = [(text,) for text in TEXTS] if second is None else list(zip(TEXTS, second, strict=True))
        with torch.no_grad():
            expected = torch.cat([model(**tokenizer(*row, **read)).logits.softmax(-1) for row in rows])
        found = [[row[f"LABEL_{n}"] for n in range(3)] for row in run.classify(TEXTS, second)]
        torch.testing.assert_close(torch.tensor(found), expected, atol=1e-5, rtol=1e-4)
    assert expected.std(dim=0).max() > 0.005


def test_a_classifier_that_weft_made_of_a_decoder_is_the_same_elsewhere(tmp_path: Path) -> None:
    """It was taught to read eos after a text, which the exported tokenizer then puts there."""
    rows = [f"{text}\t{'odd' if n % 2 else 'even'}" for n, text in enumerate(LINES * 4)]
    (tmp_path / "rows.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    head = {"kind": "sequence", "labels": 2, "pooling": "last", "pooler": False, "bias": False, "dropout": 0.0}
    small = {"layers": 1, "d_model": D, "attention": {"heads": HEADS}, "feedforward": {"d_ff": FF}, "head": head}
    changes = {"objective": "classify", "model": small, "steps": 2, "batch.length": 64, "tokenizer": "byte"}
    run = weft.train("gpt-tiny", data=str(tmp_path / "rows.tsv"), run=tmp_path / "run", changes=changes, log=str)
    run.export("hf", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.GPT2ForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    read = [tokenizer(text, return_tensors="pt", split_special_tokens=True) for text in TEXTS]
    with torch.no_grad():
        expected = torch.cat([model(**each).logits.softmax(-1) for each in read])
    found = [[row[label] for label in run.config.objective.labels] for row in run.classify(TEXTS)]
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-5, rtol=1e-4)


# ---- CTranslate2


@pytest.mark.parametrize("exported", [(5,), pytest.param((1, 5), marks=pytest.mark.slow)], ids=["5", "1-and-5"])
def test_ctranslate2_writes_the_same_with_marians_model(exported: tuple[int, ...], tmp_path: Path) -> None:
    """A model by its own converter, which leaves eos to the tokenizer; exported, it is Marian's again."""
    theirs_ = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    case = CASES["marian"]
    tokenizer, _ = theirs(case, tmp_path / "theirs")
    converter = theirs_.converters.TransformersConverter(
        str(tmp_path / "theirs"), copy_files=["source.spm", "target.spm"]
    )
    converter.convert(str(tmp_path / "converted"))
    import_model(tmp_path / "converted", tmp_path / "run")
    run = load(tmp_path / "run", "cpu")
    translator = theirs_.Translator(str(tmp_path / "converted"), compute_type="float32", intra_threads=1)
    texts = [text for text in TEXTS if "<pad>" not in text]  # which is no token to CTranslate2
    rows = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in texts]
    export_model(tmp_path / "run", "hf", tmp_path / "out")
    there = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    again = transformers.MarianMTModel.from_pretrained(tmp_path / "out").eval()
    for beams in (1, 5):
        found = translator.translate_batch(rows, beam_size=beams, max_decoding_length=NEW)
        written = [tokenizer.convert_tokens_to_ids(each.hypotheses[0]) for each in found]
        expected = tokenizer.batch_decode(written, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert len(set(expected)) > 5
        assert ours(run.reading_specials(), texts, beams) == expected
        if beams in exported:
            after = zip(TEXTS, answers(there, again, case, beams), strict=True)
            assert [answer for text, answer in after if text in texts] == expected


@pytest.mark.parametrize(
    ("before", "after", "scale"),
    [(False, False, 4.0), (True, False, 4.0), (True, False, 5.0), (False, True, 4.0), (True, True, 4.0)],
)
def test_ctranslate2s_settings_say_what_stands_around_a_source(
    before: bool, after: bool, scale: float, tmp_path: Path
) -> None:
    """Its search gives no chance to an empty answer, which makes a short one likelier: one in the third case."""
    theirs_ = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    model = by_hand.made(by_hand.MODELS["opennmt"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(float(name.endswith("norm.weight")))
            elif ".cross." in name:
                parameter.mul_(scale)  # what is read shall matter
    data = by_hand.binary(*by_hand.variables(model))
    place = by_hand.folder(tmp_path / "theirs", data, add_source_bos=before, add_source_eos=after)
    import_model(place, tmp_path / "run")
    run = load(tmp_path / "run", "cpu")
    assert run.tokenizer.pad_id is None  # and still texts of several lengths are read together
    translator = theirs_.Translator(str(place), compute_type="float32", intra_threads=1)
    texts = [" ".join(f"w{(7 * n + k * k) % 20}" for k in range(1 + n % 6)) for n in range(20)]
    for beams in (1, 5):
        found = translator.translate_batch([text.split() for text in texts], beam_size=beams, max_decoding_length=8)
        expected = [" ".join(token for token in each.hypotheses[0] if token != "<s>") for each in found]
        assert len(set(expected)) > 5
        assert run.translate(texts, beam(**{**run.beam_defaults, "beams": beams, "max_tokens": 8})) == expected
