"""GGUF files: written and read without a change; keys, licenses, tokenizers; models that the format cannot hold."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.interop.gguf_models import (
    FAMILIES,
    FF,
    HEADS,
    TINY,
    D,
    bpe,
    logits,
    random_weights,
    write,
)
from tests.spread import spread
from torch import Tensor

from weft.errors import InteropError, WeftError
from weft.interop.bundle import ModelBundle
from weft.interop.gguf import gguf as weft_gguf
from weft.interop.gguf.file import STRING, open_file
from weft.interop.gguf.gguf import architecture_of
from weft.models.config import Decoder
from weft.models.head_config import ClassificationHead, LMHead
from weft.models.presets import preset
from weft.nn.config import Attention, Gated, Plain
from weft.nn.position_config import ALiBi, Concatenated, DynamicNTK, Llama3Scaling, NoPosition, Rotary

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("name", spread(FAMILIES, 10))
def test_a_model_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    model, tokenizer = FAMILIES[name], bpe()
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    weights = random_weights(model)
    weft_gguf.write(ModelBundle(model, weights, tokenizer, "here"), tmp_path / "m.gguf")
    bundle = weft_gguf.read(tmp_path / "m.gguf")
    assert bundle.tokenizer is not None
    assert bundle.tokenizer.chat_template == tokenizer.chat_template
    assert bundle.tokenizer.roles == tokenizer.roles
    tokens = torch.randint(300, (2, 17))
    assert (logits(bundle, tokens) - logits(ModelBundle(model, weights, None, ""), tokens)).abs().max() <= 1e-5
    if name == "llama-neighbours":  # read as halves, with the rows of queries and keys reordered
        assert isinstance(bundle.model, Decoder) and bundle.model.replace(position=model.position) == model
    else:
        assert bundle.model == model
        rounded = name.startswith("gemma")  # 1 + w is stored, which rounds w
        exact = {n: read for n, read in weights.items() if not (rounded and "norm" in n)}
        assert all(torch.equal(bundle.weights[n](), read()) for n, read in exact.items())


def test_an_lm_head_equal_to_the_embeddings_is_tied(tmp_path: Path) -> None:
    model = FAMILIES["gpt2"].replace(head=LMHead(tied=False))
    weights = random_weights(model)
    weights["output.weight"] = weights["embedding.weight"]
    write(tmp_path / "m.gguf", model, weights)
    assert weft_gguf.read(tmp_path / "m.gguf").model == FAMILIES["gpt2"]


def test_windows_are_read_layer_by_layer(tmp_path: Path) -> None:
    for windowed in ([True, False, False, True, True, True, True], [True] * 7):
        notes = {"gguf": {"keys": {"gemma3.attention.sliding_window_pattern": [9, windowed, 7]}}}
        write(tmp_path / "m.gguf", FAMILIES["gemma3"], notes=notes)
        model = weft_gguf.read(tmp_path / "m.gguf").model
        assert isinstance(model, Decoder)
        assert [kind.window is not None for kind in model.layer_kinds(7)] == windowed


# ---- keys and tokenizers


def test_writing_an_imported_model_gives_the_same_bytes(tmp_path: Path) -> None:
    notes = {"gguf": {"keys": {"general.license": [STRING, "apache-2.0"]}}}
    write(tmp_path / "a.gguf", FAMILIES["llama"], notes=notes)
    weft_gguf.write(weft_gguf.read(tmp_path / "a.gguf"), tmp_path / "b.gguf")
    assert open_file(tmp_path / "b.gguf").get("general.license") == "apache-2.0"
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_the_license_is_written_and_read(tmp_path: Path) -> None:
    license = {"license": "other", "license_name": "deep 1.0", "license_link": "https://example.org/x"}
    notes = {"license": license, "gguf": {"keys": {"general.author": [STRING, "A. B."]}}}
    write(tmp_path / "a.gguf", FAMILIES["llama"], notes=notes)
    keys = {key: field.contents() for key, field in gguf.GGUFReader(tmp_path / "a.gguf").fields.items()}
    names = ("general.license", "general.license.name", "general.license.link", "general.author")
    assert [keys[name] for name in names] == [*license.values(), "A. B."]
    assert weft_gguf.read(tmp_path / "a.gguf").notes["license"] == license


def test_another_tokenizer_replaces_that_of_the_file(tmp_path: Path) -> None:
    notes = {"gguf": {"keys": {"tokenizer.ggml.eot_token_id": [4, 7]}}}
    write(tmp_path / "m.gguf", FAMILIES["llama"], notes=notes)
    assert "tokenizer.ggml.eot_token_id" in weft_gguf.read(tmp_path / "m.gguf").notes["gguf"]["keys"]
    bpe(280).save(tmp_path / "other")
    bundle = weft_gguf.read(tmp_path / "m.gguf", tmp_path / "other")
    assert bundle.tokenizer is not None and bundle.tokenizer.vocab_size == 280
    assert not [key for key in bundle.notes["gguf"]["keys"] if key.startswith("tokenizer.")]
    bpe(310).save(tmp_path / "larger")
    with pytest.raises(WeftError, match="310 tokens, the model's vocab_size is 300"):
        weft_gguf.read(tmp_path / "m.gguf", tmp_path / "larger")


# ---- refused and failed exports


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (preset("lstm"), "model.kind = 'recurrent'"),
        (preset("bert-tiny"), "model.kind = 'encoder'"),
        (preset("transformer"), "model.placement = 'post', where stablelm has 'pre'"),
        (FAMILIES["llama"].replace(attention=Attention(heads=HEADS, window=4)), "model.attention.window = 4"),
        (FAMILIES["llama"].replace(position=Rotary(scaling=DynamicNTK(factor=2.0))), "scaling.kind = 'dynamic-ntk'"),
        (
            FAMILIES["gpt2"].replace(feedforward={"kind": "plain", "d_ff": 9, "activation": "gelu"}),
            "activation = 'gelu'",
        ),
        (FAMILIES["llama"].replace(feedforward=Gated(d_ff=9, activation="relu")), "activation = 'relu'"),
        (FAMILIES["qwen3"].replace(position=Rotary(scaling=Llama3Scaling())), "kind = 'rms', where llama has None"),
        (
            FAMILIES["phi3"].replace(attention=Attention(heads=HEADS, d_head=8)),
            "fraction = 0.75, where llama has 1.0",
        ),
        (FAMILIES["llama"].replace(attention=Attention(heads=HEADS, d_v=3)), "d_v = 3, where llama has None"),
        (FAMILIES["llama"].replace(feedforward=Gated(d_ff=FF, beta=0.5)), "beta = 0.5, where llama has 1.0"),
        (FAMILIES["llama"].replace(position=Concatenated()), "kind = 'concatenated'"),
        (FAMILIES["llama"].replace(head=LMHead(bias=True)), "bias = 'none', where qwen2 has 'qkv'"),
        (FAMILIES["phi2"].replace(head=LMHead(tied=False)), "sublayers = 'parallel', where gptneox"),
        (
            FAMILIES["gptneox"].replace(attention=Attention(heads=HEADS, d_head=8, bias="all")),
            "d_head = 8, where gptneox",
        ),
        (FAMILIES["smollm3"].replace(pattern=[{}, {"position": NoPosition()}]), "model.pattern = "),
        (FAMILIES["gemma3"].replace(pattern=[{"window": 5}, {}, {}]), "model.pattern = "),
        (FAMILIES["gemma3"].replace(pattern=[{"window": 5}] * 5 + [{}]), "model.pattern = "),  # all scaled
        (FAMILIES["falcon"].replace(feedforward=Plain(d_ff=FF, activation="gelu", bias=False)), "activation = 'gelu'"),
        (FAMILIES["falcon"].replace(sublayers="sequential"), "model.sublayers = 'sequential', where falcon has"),
        (FAMILIES["stablelm"].replace(attention=Attention(heads=HEADS, bias="all")), "kind = 'gated', where gptneox"),
        (FAMILIES["olmo"].replace(attention=Attention(heads=HEADS, bias="qkv")), "norm.kind = 'layer', where qwen2"),
        (FAMILIES["bloom"].replace(position=ALiBi(rounded=True)), "rounded = True, where bloom has False"),
        (FAMILIES["llama"].replace(head=ClassificationHead(labels=3, pooling="last")), "head.kind = 'sequence', where"),
        (
            FAMILIES["mixtral"].replace(feedforward=FAMILIES["mixtral"].feedforward.replace(score="sigmoid")),
            r"mixtures \(llama, qwen2moe, .*gpt-oss\) can .*feedforward\.score = 'sigmoid', where llama",
        ),
        (
            FAMILIES["olmoe"].replace(attention=FAMILIES["olmoe"].attention.replace(kv_heads=2)),
            "kv_heads = 2, where olmoe",
        ),
        (
            FAMILIES["qwen3moe"].replace(
                feedforward=FAMILIES["qwen3moe"].feedforward.replace(dense_layers=(0,), dense=Gated(d_ff=FF))
            ),
            "dense",
        ),
        (TINY.replace(vocab_size=290), "300 tokens, the model's vocab_size is 290"),
    ],
)
def test_models_that_the_format_cannot_hold_are_refused(model: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InteropError, match=message):
        write(tmp_path / "m.gguf", model, {})
    assert not list(tmp_path.iterdir())


def test_the_largest_gemmas_have_another_scale() -> None:
    """llama.cpp recognises them by the number of layers; there is no key for it."""
    for name, layers in (("gemma2", 46), ("gemma3", 62)):
        model = FAMILIES[name].replace(layers=layers)
        with pytest.raises(InteropError, match=r"model\.attention\.scale = "):
            architecture_of(model)
        scale = (D // model.attention.heads) ** -0.5
        assert architecture_of(model.replace(attention=model.attention.replace(scale=scale))) == name


def test_a_failed_export_leaves_the_old_file(tmp_path: Path) -> None:
    weights = random_weights(TINY)

    def fail() -> Tensor:
        raise KeyboardInterrupt

    weights["decoder.norm.weight"] = fail
    (tmp_path / "m.gguf").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "m.gguf", TINY, weights)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
    assert (tmp_path / "m.gguf").read_text() == "old"


def test_values_beyond_fp16_are_refused(tmp_path: Path) -> None:
    weights = random_weights(TINY)
    weights["embedding.weight"] = lambda: torch.full((300, 32), 1e5)
    with pytest.raises(InteropError, match=r"'token_embd.weight' contains 1e\+05, which fp16 can't"):
        write(tmp_path / "m.gguf", TINY, weights, dtype="f16")
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_reported_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m.gguf", TINY, dtype="q8_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InteropError, match=r"pip install 'weft\[gguf\]'"):
        weft_gguf.read(tmp_path / "m.gguf")
    with pytest.raises(InteropError, match=r"pip install 'weft\[gguf\]'"):
        write(tmp_path / "n.gguf", TINY, {}, dtype="q8_0")


def test_a_missing_file_is_reported() -> None:
    with pytest.raises(InteropError, match="no such file"):
        weft_gguf.read(Path("nowhere.gguf"))
