"""Files of Hugging Face folders: old names, shards, tokenizers, and broken folders, which are refused in one line."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.interop.hf_models import (
    BERT,
    CASES,
    DEBERTA,
    GPT2,
    PAIRS,
    ROTARY,
    T5,
    D,
    F,
    H,
    V,
    a_folder,
    built,
    difference,
    edit,
    exported,
    fresh_model,
    gap,
    hf_models,
    same_files,
    saved,
    words,
)
from tests.text.test_sentencepiece import PLAIN, SPECIALS, block, number, piece
from torch import Tensor

from weft.errors import InteropError, WeftError
from weft.interop.hf import hf
from weft.models.config import Decoder, EncoderDecoder
from weft.models.head_config import LMHead
from weft.models.presets import llama, vaswani
from weft.nn.position_config import Sinusoidal

# ---- names and tensors of older files


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change the tensors of model.safetensors."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def first_bert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As in the first BERT files: gamma and beta, position ids, a second head, the embeddings under a second name."""
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {reduce(lambda n, new: n.replace(new, old[new]), old, name): t for name, t in tensors.items()}
    tensors["bert.embeddings.position_ids"] = torch.arange(32)[None]
    tensors["cls.seq_relationship.weight"] = torch.randn(2, D)
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    return tensors


def renamed_table(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As in files with a tied table under its other name."""
    return {name.replace("model.shared.weight", "lm_head.weight"): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("name", "settings", "change"),
    [("BertForMaskedLM", BERT, first_bert), ("BartForConditionalGeneration", PAIRS, renamed_table)],
)
def test_old_names_unused_tensors_and_copies_are_kept(
    name: str, settings: dict[str, Any], change: Any, tmp_path: Path
) -> None:
    other = saved(tmp_path / "theirs", name, settings)
    rewrite(tmp_path / "theirs", change)
    bundle = hf.read(tmp_path / "theirs")
    assert difference(built(bundle), other) <= 1e-5
    assert same_files(tmp_path / "theirs", exported(bundle, tmp_path / "back"))


def test_the_base_model_has_no_prefix(tmp_path: Path) -> None:
    other = saved(tmp_path / "theirs", "GPT2Model", GPT2)
    assert "wte.weight" in load_file(tmp_path / "theirs/model.safetensors")
    bundle = hf.read(tmp_path / "theirs")
    ours, tokens = built(bundle), torch.randint(V, (2, 9))
    with torch.no_grad():
        assert gap(ours.features(tokens), other(tokens).last_hidden_state) <= 1e-5
    assert same_files(tmp_path / "theirs", exported(bundle, tmp_path / "back"))


def test_an_lm_head_that_differs_is_not_tied(tmp_path: Path) -> None:
    """Even if config.json calls T5 v1.1 tied."""
    saved(tmp_path / "theirs", "T5ForConditionalGeneration", {**T5, "tie_word_embeddings": False})
    rewrite(tmp_path / "theirs", lambda tensors: tensors | {"lm_head.weight": torch.randn(V, D)})
    bundle = hf.read(tmp_path / "theirs")
    assert isinstance(bundle.model, EncoderDecoder)
    assert isinstance(bundle.model.head, LMHead) and not bundle.model.head.tied
    back = exported(bundle, tmp_path / "back")
    assert same_files(tmp_path / "theirs", back)
    other = hf_models.T5ForConditionalGeneration.from_pretrained(back)
    assert difference(built(bundle), other.eval()) <= 1e-5


def test_settings_that_weft_lacks_are_kept(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "theirs")
    edit(folder, use_cache=False, summary_type="cls_index", task_specific_params={"a": [1]})
    back = exported(hf.read(folder), tmp_path / "back")
    assert json.loads((back / "config.json").read_text()) == json.loads((folder / "config.json").read_text())


def test_names_of_labels(tmp_path: Path) -> None:
    saved(tmp_path / "theirs", *CASES["bert-labels"])
    bundle = hf.read(tmp_path / "theirs")
    assert bundle.labels == ("bad", "fair", "good")
    fresh = exported(replace(bundle, notes={}), tmp_path / "fresh")
    assert json.loads((fresh / "config.json").read_text())["id2label"] == {"0": "bad", "1": "fair", "2": "good"}


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ({"num_labels": 2}, ("LABEL_0", "LABEL_1")),  # not written by transformers
        ({"id2label": {0: "a", 1: "a", 2: "b"}}, ("LABEL_0", "LABEL_1", "LABEL_2")),
    ],
)
def test_default_names_of_labels(tmp_path: Path, settings: dict[str, Any], labels: tuple[str, ...]) -> None:
    saved(tmp_path, "BertForSequenceClassification", {**BERT, **settings})
    assert hf.read(tmp_path).labels == labels


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_other_problem_types_are_refused(tmp_path: Path, kind: str) -> None:
    saved(tmp_path, "BertForSequenceClassification", {**BERT, "num_labels": 3})
    edit(tmp_path, problem_type=kind)
    with pytest.raises(InteropError, match=f"problem_type = '{kind}': with 3 labels"):
        hf.read(tmp_path)


# ---- tokenizers


def test_transformers_reads_the_tokenizer(tmp_path: Path, transformers_warnings: list[str]) -> None:
    tokenizer = words()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = a_folder(tmp_path / "ours", tokenizer)
    other = hf_models.AutoTokenizer.from_pretrained(folder)
    assert other("w1 w2 w99")["input_ids"] == tokenizer.encode("w1 w2 w99")
    assert (other.eos_token_id, other.pad_token_id) == (tokenizer.eos_id, tokenizer.pad_id)
    assert other.chat_template == tokenizer.chat_template
    assert transformers_warnings == []
    imported = hf.read(folder).tokenizer
    assert imported is not None and imported.fingerprint == tokenizer.fingerprint
    assert imported.chat_template == tokenizer.chat_template


def test_roles_may_be_in_other_files(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "ours", words())
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 32}')
    (folder / "special_tokens_map.json").write_text('{"pad_token": {"content": "<pad>"}}')
    edit(folder, eos_token_id=3, bos_token_id=None)
    tokenizer = hf.read(folder).tokenizer
    assert tokenizer is not None
    assert tokenizer.roles == {"pad": "<pad>", "eos": tokenizer.token(3)}


TRANSLATOR = vaswani(1, D, H, d_ff=F, dropout=0.0, vocab_size=V, context=32).replace(
    position=Sinusoidal(layout="halves")
)


def test_the_start_token_of_an_encoder_decoder_is_bos(tmp_path: Path) -> None:
    folder = exported(replace(fresh_model(TRANSLATOR), tokenizer=words()), tmp_path / "ours")
    edit(folder, decoder_start_token_id=0)
    tokenizer = hf.read(folder).tokenizer  # generation_config.json takes precedence in transformers
    assert tokenizer is not None
    assert tokenizer.bos_id == json.loads((folder / hf.GENERATION).read_text())["decoder_start_token_id"] != 0
    (folder / hf.GENERATION).unlink()
    tokenizer = hf.read(folder).tokenizer
    assert tokenizer is not None and tokenizer.bos_id == tokenizer.pad_id == 0


def test_the_two_tokenizers_of_marian(tmp_path: Path) -> None:
    """One vocabulary and two SentencePiece models, for source and target."""
    folder = tmp_path / "theirs"
    saved(folder, *CASES["marian"])
    for side, letters in (("source", "ab"), ("target", "xy")):
        pieces = b"".join(piece(f"▁{letter}", -2) for letter in letters) + piece("▁", -4)
        (folder / f"{side}.spm").write_bytes(SPECIALS + pieces + block(2, number(3, 1)) + PLAIN)
    vocabulary = ["<pad>", "</s>", "<unk>", "▁a", "▁b", "▁x", "▁y", "▁"]
    (folder / "vocab.json").write_text(json.dumps({token: id for id, token in enumerate(vocabulary)}))
    bundle = hf.read(folder)
    assert bundle.tokenizer is not None and bundle.source_tokenizer is not None
    assert bundle.source_tokenizer.encode("a b") == [3, 4]
    assert bundle.tokenizer.decode([5, 6]) == "x y"
    assert (bundle.source_tokenizer.eos_id, bundle.source_tokenizer.pad_id) == (1, 0)
    assert (bundle.tokenizer.bos_id, bundle.tokenizer.eos_id) == (0, 1)
    notes = {**bundle.notes, "tokenizer": bundle.tokenizer.fingerprint}
    out = exported(replace(bundle, notes=notes), tmp_path / "out")
    for name in ("source.spm", "target.spm", "vocab.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("case", ["m2m_100", "mbart", "xlm-roberta", "pegasus"])
def test_ids_of_pieces_are_those_of_the_family(case: str, tmp_path: Path) -> None:
    """Not those of the SentencePiece file, if there is no tokenizer.json."""
    folder, file, languages = tmp_path / "theirs", "spiece.model", ["__af__", "__am__"]
    saved(folder, CASES[case][0], {**CASES[case][1], "vocab_size": 300})
    pieces, ids = piece("▁a", -2) + piece("▁b", -3) + piece("a", -4) + piece("▁", -5), b""
    if case == "pegasus":
        symbols = piece("<pad>", 0, 3) + piece("</s>", 0, 3) + piece("<unk>", 0, 2)
        ids = number(43, 0) + number(42, 1) + number(40, 2) + number(41, 2**64 - 1)
    else:
        file, symbols = "sentencepiece.bpe.model", piece("<unk>", 0, 2) + piece("<s>", 0, 3) + piece("</s>", 0, 3)
        texts = ["<s>", "<pad>", "</s>", "<unk>", "▁a", "▁b", "a", "▁"]
        (folder / "vocab.json").write_text(json.dumps({text: id for id, text in enumerate(texts)}))
    if case == "mbart":
        languages = hf_models.models.mbart50.tokenization_mbart50.FAIRSEQ_LANGUAGE_CODES
    (folder / file).write_bytes(symbols + pieces + block(2, number(3, 1) + ids) + PLAIN)
    (folder / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": languages}))
    tokenizer = hf.read(folder).tokenizer
    assert tokenizer is not None
    kinds = {"m2m_100": "M2M100", "mbart": "MBart50", "xlm-roberta": "XLMRoberta", "pegasus": "Pegasus"}
    reference = getattr(hf_models, f"{kinds[case]}Tokenizer").from_pretrained(folder)
    for text in ("a b", "b aa", "ba c"):
        assert tokenizer.encode(text) == reference(text, add_special_tokens=False)["input_ids"], text
    for token in ("<pad>", "</s>", "<mask>", "<mask_2>", languages[-1]):
        if token in reference.get_vocab():
            assert tokenizer.id(token) == reference.convert_tokens_to_ids(token)
    assert tokenizer.pad_id == reference.pad_token_id


def test_the_tokenizer_of_the_source_is_kept(tmp_path: Path) -> None:
    """Also after import from a folder that weft wrote."""
    model = fresh_model(TRANSLATOR.replace(source_vocab_size=50))
    folder = exported(replace(model, tokenizer=words(), source_tokenizer=words(50)), tmp_path / "ours")
    bundle = hf.read(folder)
    assert bundle.tokenizer is not None
    assert bundle.source_tokenizer is not None and bundle.source_tokenizer.vocab_size == 50
    notes = {**bundle.notes, "tokenizer": bundle.tokenizer.fingerprint}  # as in a run
    assert same_files(folder, exported(replace(bundle, notes=notes), tmp_path / "back"))
    assert (tmp_path / "back/source/tokenizer.json").is_file()
    files = {name: data for name, data in bundle.files.items() if not name.startswith("source/")}  # an older import
    exported(replace(bundle, notes=notes, files=files), tmp_path / "older")
    assert (tmp_path / "older/source/tokenizer.json").is_file()


# ---- broken folders


def with_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder, **changes)


def with_tensor(name: str, tensor: Tensor | None) -> Callable[[Path], None]:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        others = {key: value for key, value in tensors.items() if key != name}
        return others if tensor is None else others | {name: tensor}

    return lambda folder: rewrite(folder, change)


def with_file(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content)


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def indexed(weight_map: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        shutil.move(folder / "model.safetensors", folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "unknown family": (
        with_config(model_type="mamba", state_size=16),
        r"'mamba': not a family that weft reads; the nearest is GPT-2 \('gpt2'\), which has no state_size$",
    ),
    "one attention": (
        with_config(model_type="t5gemma2"),
        r"'t5gemma2': not a family that weft reads; it needs a decoder that attends to the source and to itself in one "
        "attention$",
    ),
    "convolution": (
        with_config(**DEBERTA, model_type="deberta-v2", architectures=None, conv_kernel_size=3),
        r"conv_kernel_size = 3: weft has only 0$",
    ),
    "one direction": (
        with_config(**{**DEBERTA, "pos_att_type": ["c2p"]}, model_type="deberta-v2", architectures=None),
        r"pos_att_type = \['c2p'\]: weft has only both kinds, c2p and p2c$",
    ),
    "no experts": (
        with_config(model_type="granitemoehybrid", num_local_experts=0, num_experts_per_tok=0, shared=1),
        r"the nearest is GPT-2 \('gpt2'\), which has no num_experts_per_tok, num_local_experts, shared$",
    ),
    "images": (
        with_config(model_type="gemma9", text_config={"model_type": "gemma3_text"}),
        r"'gemma9': a multimodal model, and weft reads only text models \(its text_config has .* = 'gemma3_text'\)$",
    ),
    "no family": (
        with_file("config.json", b"{}"),
        r"model_type = None: not a family that weft reads, nor like one; it reads \d+, among them gpt2, llama, .*t5$",
    ),
    "unknown head": (
        with_config(architectures=["GPT2DoubleHeadsModel"]),
        r"of GPT-2 weft reads GPT2LMHeadModel, GPT2ForSequenceClassification, .*, GPT2Model$",
    ),
    "not JSON": (with_file("config.json", b"{"), r"config\.json: not valid JSON"),
    "no object": (with_file("config.json", b"[]"), r"expected a JSON object$"),
    "wrong type of value": (with_config(n_layer="two"), r"n_layer = 'two': expected a whole number above 0$"),
    "sizes that do not divide": (with_config(n_head=5), r"n_head = 5 does not divide n_embd = 32$"),
    "too many layers": (with_config(n_layer=9000), r"9000 layers, but the files have only \d+ tensors$"),
    "a setting weft lacks": (
        with_config(scale_attn_by_inverse_layer_idx=True),
        r"scale_attn_by_inverse_layer_idx = True: weft has only False$",
    ),
    "activation": (with_config(activation_function="mish"), r"activation_function = 'mish': weft has gelu, "),
    "missing tensor": (
        with_tensor("transformer.h.1.ln_1.bias", None),
        r"'transformer\.h\.1\.ln_1\.bias' \[32\] is missing$",
    ),
    "extra tensor": (with_tensor("stray", torch.zeros(3)), r"'stray' \[3\] has no place in this model$"),
    "one layer more": (with_config(n_layer=1), r"'transformer\.h\.1\..*has no place in this model \(and \d+ more\)$"),
    "wrong shape": (
        with_tensor("transformer.wpe.weight", torch.zeros(31, D)),
        r"'transformer\.wpe\.weight' is \[31, 32\]; the settings require \[32, 32\]$",
    ),
    "integers": (
        with_tensor("transformer.ln_f.bias", torch.zeros(D, dtype=torch.int32)),
        r"has dtype I32; weights",
    ),
    "truncated": (truncate, r"model\.safetensors: not a complete safetensors file"),
    "huge header": (
        with_file("model.safetensors", (2**62).to_bytes(8, "little") + b"{}"),
        r"model\.safetensors: not a complete safetensors file",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"it has none of model\.safetensors"),
    "path in the index": (
        indexed({"x": "../outside.safetensors"}),
        r"'\.\./outside\.safetensors' is not the name of a",
    ),
    "absolute path in the index": (indexed({"x": "/etc/passwd"}), r"'/etc/passwd' is not the name of a"),
    "absent shard": (indexed({"x": "b.safetensors"}), r"b\.safetensors: missing, though"),
    "not in its shard": (indexed({"x": "a.safetensors"}), r"'x' is not in a\.safetensors, where it should be$"),
    "empty index": (indexed({}), r"'weight_map' does not say"),
    "too many tokens": (with_config(vocab_size=V), r"tokenizer has 76 tokens, the model's vocab_size is 61$"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    change, message = BROKEN[case]
    folder = a_folder(tmp_path / "broken", words(76) if case == "too many tokens" else None)
    change(folder)
    with pytest.raises(WeftError, match=message) as caught:
        hf.read(folder)
    assert "\n" not in str(caught.value)


def test_unknown_rotary_scaling_is_refused(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "ours", settings=llama(1, D, H, d_ff=F, context=32, vocab_size=V))
    edit(folder, rope_scaling={"rope_type": "proportional", "factor": 4.0})
    with pytest.raises(InteropError, match=r"rope_scaling: rope_type = 'proportional': weft scales rotary pos"):
        hf.read(folder)


def test_a_window_in_some_layers(tmp_path: Path) -> None:
    """Also without layer_types, which older files lack."""
    saved(tmp_path, "Qwen2ForCausalLM", ROTARY)
    edit(tmp_path, use_sliding_window=True, sliding_window=4, max_window_layers=1, layer_types=None)
    model = hf.read(tmp_path).model
    assert isinstance(model, Decoder) and [kind.window for kind in model.layer_kinds(2)] == [None, 4]
    edit(tmp_path, layer_types=["full_attention", "chunked_attention"])
    with pytest.raises(InteropError, match=r"layer_types = .*: expected 'sliding_attention' or 'full_attention' for"):
        hf.read(tmp_path)
