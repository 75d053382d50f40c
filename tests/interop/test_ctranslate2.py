"""CTranslate2 folders: files written by hand here, scored by weft and, where it is installed, by CTranslate2."""

import io
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from weft.errors import InteropError, WeftError
from weft.interop.bundle import ModelBundle
from weft.interop.ctranslate2 import ctranslate2
from weft.models.build import build
from weft.models.config import EncoderDecoder, LMHead
from weft.models.transformer import Transformer
from weft.nn.config import Attention, Gated, LayerNorm, Plain, RMSNorm
from weft.nn.position import sinusoids
from weft.nn.position_config import Learned, Relative, Sinusoidal, T5Bias

D, HEADS, FF = 16, 4, 24
TOKENS = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(20))]
BASE = EncoderDecoder(
    vocab_size=len(TOKENS),
    context=40,
    layers=1,
    encoder_layers=2,
    d_model=D,
    attention=Attention(heads=HEADS, bias="all"),
    feedforward=Plain(d_ff=FF),
    norm=LayerNorm(),
    placement="post",
    position=Sinusoidal(layout="halves"),
    embedding_scale=True,
    head=LMHead(bias=True),
)
MODELS = {
    "marian": BASE.replace(feedforward=Plain(d_ff=FF, activation="silu")),
    "opennmt": BASE.replace(placement="pre", head=LMHead(tied=False, bias=True), position=Sinusoidal()),
    "apart": BASE.replace(source_vocab_size=len(TOKENS), embedding_scale=False),
    "bart": BASE.replace(
        position=Learned(), embedding_norm=True, feedforward=Plain(d_ff=FF, activation="gelu"), embedding_scale=False
    ),
    "relative": BASE.replace(placement="pre", position=Relative(max_distance=3)),
    "t5": BASE.replace(
        placement="pre",
        attention=Attention(heads=HEADS, d_head=3, scale=1.0),
        feedforward=Gated(d_ff=FF, activation="gelu-tanh"),
        norm=RMSNorm(eps=1e-6),
        position=T5Bias(buckets=8, max_distance=20),
        embedding_scale=False,
        head=LMHead(scale=D**-0.5),
    ),
}

Variables = dict[str, np.ndarray]


# ---- writing a folder


def made(config: EncoderDecoder) -> Transformer:
    torch.manual_seed(0)
    model = build(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def variables(model: Transformer) -> tuple[Variables, dict[str, str]]:
    """The model's tensors and settings under CTranslate2's names, and aliases."""
    config, state = model.config, {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    assert isinstance(config, EncoderDecoder)
    acts = ("relu", "gelu-tanh", "silu", "gelu")
    found: Variables = {"decoder/embeddings/weight": state["embedding.weight"]}
    aliases = {}
    if "source_embedding.weight" in state:
        found["encoder/embeddings_0/weight"] = state["source_embedding.weight"]
    else:
        aliases["encoder/embeddings_0/weight"] = "decoder/embeddings/weight"
    if "output.weight" in state:
        found["decoder/projection/weight"] = state["output.weight"]
    else:
        aliases["decoder/projection/weight"] = "decoder/embeddings/weight"
    if "output.bias" in state:
        found["decoder/projection/bias"] = state["output.bias"]
    if config.head.scale:
        found["decoder/scale_outputs"] = np.float32(config.head.scale)
    pieces = {
        "attention.qkv": "self_attention/linear_0",
        "attention.out": "self_attention/linear_1",
        "attention_skip.norm": "self_attention/layer_norm",
        "cross.q": "attention/linear_0",
        "cross.kv": "attention/linear_1",
        "cross.out": "attention/linear_2",
        "cross_skip.norm": "attention/layer_norm",
        "feedforward.up": "ffn/linear_0",
        "feedforward.down": "ffn/linear_1",
        "feedforward_skip.norm": "ffn/layer_norm",
    }
    for side, layers in (("encoder", config.encoder_layers), ("decoder", config.layers)):
        found[f"{side}/num_heads"] = np.int16(HEADS)
        found[f"{side}/pre_norm"] = np.int8(config.placement == "pre")
        found[f"{side}/activation"] = np.int8(acts.index(config.feedforward.activation))
        found[f"{side}/scale_embeddings"] = np.float32(D**0.5) if config.embedding_scale else np.int8(0)
        if isinstance(config.position, Sinusoidal):
            waves = sinusoids(torch.arange(config.context), D, config.position.layout).float().numpy()
            found[f"{side}/position_encodings/encodings"] = waves
        if isinstance(config.position, Learned):
            found[f"{side}/position_encodings/encodings"] = state[f"{side}.position.weight"]
        for ours, theirs in (("norm", "layer_norm"), ("embedding_norm", "layernorm_embedding")):
            for kind, name in (("weight", "gamma"), ("bias", "beta")):
                if f"{side}.{ours}.{kind}" in state:
                    found[f"{side}/{theirs}/{name}"] = state[f"{side}.{ours}.{kind}"]
        for layer in range(layers or 0):
            block, scope = f"{side}.blocks.{layer}", f"{side}/layer_{layer}"
            for ours, theirs in pieces.items():
                for kind in ("weight", "bias"):
                    if f"{block}.{ours}.{kind}" in state:
                        name = {"weight": "gamma", "bias": "beta"}[kind] if ours.endswith("norm") else kind
                        found[f"{scope}/{theirs}/{name}"] = state[f"{block}.{ours}.{kind}"]
            if f"{block}.feedforward.gate_up.weight" in state:
                gate, up = np.split(state[f"{block}.feedforward.gate_up.weight"], 2)
                found |= {f"{scope}/ffn/linear_0/weight": gate, f"{scope}/ffn/linear_0_noact/weight": up}
            if isinstance(config.position, Relative):
                for kind in ("keys", "values"):
                    name = f"{scope}/self_attention/relative_position_{kind}"
                    found[name] = state[f"{block}.attention.relative_{kind}"]
            if isinstance(config.position, T5Bias):
                name = "self_attention/relative_attention_bias"
                found[f"{scope}/self_attention/relative_attention_max_distance"] = np.int32(20)
                if layer:
                    aliases[f"{scope}/{name}"] = f"{side}/layer_0/{name}"
                else:
                    found[f"{scope}/{name}"] = state[f"{side}.position.weight"]
            for own in ("self_attention", "attention") if config.attention.scale else ():
                if f"{scope}/{own}/linear_0/weight" in found:
                    found[f"{scope}/{own}/queries_scale"] = np.float32(config.attention.scale)
            if config.attention.d_head:
                for own in ("self_attention", "attention"):
                    if f"{scope}/{own}/linear_0/weight" in found:
                        found[f"{scope}/{own}/head_dim"] = np.int32(config.attention.d_head)
    return found, aliases


def text(word: str) -> bytes:
    return struct.pack("<H", len(word.encode()) + 1) + word.encode() + b"\0"


def binary(
    found: Variables, aliases: Mapping[str, str], kind: str = "TransformerSpec", version: int = 6, revision: int = 7
) -> bytes:
    types = ["float32", "int8", "int16", "int32", "float16"]
    out = struct.pack("<I", version) + text(kind) + struct.pack("<II", revision, len(found))
    for name in sorted(found):
        array = np.asarray(found[name])
        out += text(name) + struct.pack("<B", array.ndim) + struct.pack(f"<{array.ndim}I", *array.shape)
        if version >= 4:
            out += struct.pack("<BI", types.index(array.dtype.name), array.nbytes)
        else:
            out += struct.pack("<BI", array.itemsize, array.size)
        out += array.tobytes()
    return out + struct.pack("<I", len(aliases)) + b"".join(text(a) + text(b) for a, b in sorted(aliases.items()))


def folder(path: Path, data: bytes, tokens: list[str] = TOKENS, **settings: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "model.bin").write_bytes(data)
    (path / "shared_vocabulary.json").write_text(json.dumps(tokens))
    config = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "decoder_start_token": "<s>"}
    config |= {"add_source_bos": False, "add_source_eos": False, "layer_norm_epsilon": None} | settings
    (path / "config.json").write_text(json.dumps(config))
    return path


def rebuilt(bundle: ModelBundle) -> Transformer:
    model = build(bundle.model).eval()
    model.load_state_dict({name: read() for name, read in bundle.weights.items()})
    assert isinstance(model, Transformer)
    return model


def logits(model: Transformer, target: list[int], source: list[int]) -> Tensor:
    given = SimpleNamespace(tokens=torch.tensor([source]), mask=torch.ones(1, len(source), dtype=torch.bool))
    with torch.no_grad():
        return model(torch.tensor([target]), source=given)[0].float()


SOURCE, TARGET = [3, 9, 17, 4, 4], [1, 5, 9, 21]


# ---- reading


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_model_comes_back(name: str, tmp_path: Path) -> None:
    model = made(MODELS[name])
    bundle = ctranslate2.read(folder(tmp_path, binary(*variables(model))))
    again = rebuilt(bundle)
    torch.testing.assert_close(logits(again, TARGET, SOURCE), logits(model, TARGET, SOURCE), atol=1e-5, rtol=1e-5)
    assert type(bundle.model.position) is type(model.config.position)
    assert ctranslate2.recognises(tmp_path)
    assert bundle.tokenizer is not None
    assert bundle.tokenizer.encode("w0 w6 unheard") == [3, 9, 0]
    assert (bundle.tokenizer.bos_id, bundle.tokenizer.eos_id, bundle.tokenizer.unk_id) == (1, 2, 0)


def test_older_layouts(tmp_path: Path) -> None:
    """Before version 4 an element's size stood for its type; the embeddings had no number; settings stood once."""
    model = made(MODELS["marian"])
    found, aliases = variables(model)
    aliases["encoder/embeddings/weight"] = aliases.pop("encoder/embeddings_0/weight")
    for setting in ("num_heads", "pre_norm", "activation"):
        found[setting] = found.pop(f"encoder/{setting}")
        del found[f"decoder/{setting}"]
    (tmp_path / "shared_vocabulary.txt").write_text("\n".join(TOKENS) + "\n")
    path = folder(tmp_path, binary(found, aliases, version=3))
    (path / "shared_vocabulary.json").unlink()
    (path / "config.json").unlink()
    again = rebuilt(ctranslate2.read(path / "model.bin"))
    torch.testing.assert_close(logits(again, TARGET, SOURCE), logits(model, TARGET, SOURCE), atol=1e-5, rtol=1e-5)


def first_names(found: Variables, aliases: Mapping[str, str]) -> Variables:
    """The arrays as the first revision has them: by OpenNMT-tf's names, none under two, positions by their formula."""
    words = {"embeddings_0/": "embeddings/", "embeddings/weight": "w_embs", "projection": "dense", "/weight": "/kernel"}
    words |= {"layer_norm": "LayerNorm", "linear_0": "conv1d", "linear_": "conv1d_"}
    made = {}
    for name, array in {**found, **{alias: found[name] for alias, name in aliases.items()}}.items():
        if array.ndim and "encodings" not in name:
            for new, old in words.items():
                name = name.replace(new, old)
            if name.startswith("encoder"):
                name = name.replace("self_attention", "multi_head")
            else:
                name = name.replace("/attention", "/multi_head").replace("self_attention", "masked_multi_head")
            made[f"transformer/{name}:0"] = array
    return made


@pytest.mark.parametrize("kind", ["", "TransformerBase", "TransformerBig"])
@pytest.mark.parametrize("int16", [False, True])
def test_the_oldest_files(kind: str, int16: bool, tmp_path: Path) -> None:
    """No kind in version 1, heads by the kind, OpenNMT-tf's names, int16 without scales: as CTranslate2 runs them."""
    theirs = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    heads = 16 if kind == "TransformerBig" else 8
    model = made(MODELS["opennmt"].replace(attention=Attention(heads=heads, bias="all")))
    found = first_names(*variables(model))
    if int16:
        found = {name: np.rint(a * 1000).astype(np.int16) if a.ndim == 2 else a for name, a in found.items()}
    data = binary(found, {}, kind, version=2, revision=1)[:-4]  # a count of aliases comes with version 3
    if not kind:
        data = struct.pack("<I", 1) + data[4 + len(text(kind)) + 4 :]
    (tmp_path / "model.bin").write_bytes(data)
    (tmp_path / "shared_vocabulary.txt").write_text("\n".join(TOKENS) + "\n")
    assert ctranslate2.recognises(tmp_path / "model.bin")
    bundle = ctranslate2.read(tmp_path / "model.bin")
    assert bundle.model.attention.heads == heads  # type: ignore[union-attr]
    assert bundle.origin.endswith("int16" if int16 else "float32")
    translator = theirs.Translator(str(tmp_path), device="cpu", compute_type="float32", intra_threads=1)
    scored = translator.score_batch([[TOKENS[id] for id in SOURCE]], [[TOKENS[id] for id in TARGET[1:]]])[0].log_probs
    scores = logits(rebuilt(bundle), TARGET, SOURCE).log_softmax(-1)
    mine = scores[torch.arange(4), torch.tensor([*TARGET[1:], 2])]
    torch.testing.assert_close(mine, torch.tensor(scored), atol=2e-5, rtol=1e-4)


def test_int8_without_its_scale_is_one_line(tmp_path: Path) -> None:
    found, aliases = variables(made(MODELS["marian"]))
    found["decoder/embeddings/weight"] = found["decoder/embeddings/weight"].astype(np.int8)
    bundle = ctranslate2.read(folder(tmp_path, binary(found, aliases)))
    with pytest.raises(InteropError, match="its scale 'decoder/embeddings/weight_scale' is missing"):
        bundle.weights["embedding.weight"]()


def test_older_files_name_their_own_tokens(tmp_path: Path) -> None:
    """What stands in config.json since version 6 was in variables; a text was the numbers of its bytes."""
    found, aliases = variables(made(MODELS["marian"]))
    found |= {"bos_token": np.frombuffer(b"w0", np.int8), "eos_token": np.frombuffer(b"w1", np.int8)}
    found |= {"with_source_eos": np.int8(1), "with_target_bos": np.int8(0), "with_source_bos": np.int8(0)}
    tokenizer = ctranslate2.read(folder(tmp_path, binary(found, aliases, version=5))).tokenizer
    assert tokenizer is not None
    # the decoder starts with eos, whatever config.json says
    assert [tokenizer.token(id or 0) for id in (tokenizer.bos_id, tokenizer.eos_id)] == ["w1", "w1"]
    found["unk_token"] = np.frombuffer(b"\xff\xfe", np.int8)
    with pytest.raises(InteropError, match="'unk_token' is not UTF-8 text"):
        ctranslate2.read(folder(tmp_path, binary(found, aliases, version=5)))


@pytest.mark.parametrize("scaled", [True, False, None])
def test_older_files_switch_the_embedding_scale_beside_the_table(scaled: bool | None, tmp_path: Path) -> None:
    found, aliases = variables(made(MODELS["marian"]))
    for side in ("encoder", "decoder"):
        del found[f"{side}/scale_embeddings"]
    if scaled is not None:
        found["encoder/embeddings_0/multiply_by_sqrt_depth"] = np.int8(scaled)
    assert ctranslate2.read(folder(tmp_path, binary(found, aliases))).model.embedding_scale is (scaled is not False)


@pytest.mark.parametrize("kind", ["int8", "int16", "float16"])
def test_quantized(kind: str, tmp_path: Path) -> None:
    model = made(MODELS["marian"])
    found, aliases = variables(model)
    for name, array in list(found.items()):
        if kind == "float16" and array.ndim:
            found[name] = array.astype(np.float16)
        elif kind == "int8" and array.ndim == 2 and "encodings" not in name:
            scale = 127 / np.abs(array).max(axis=1)
            found |= {name: np.rint(array * scale[:, None]).astype(np.int8), f"{name}_scale": scale}
        elif kind == "int16" and array.ndim == 2 and "encodings" not in name:
            scale = np.float32(1024 / np.abs(array).max())
            found |= {name: np.rint(array * scale).astype(np.int16), f"{name}_scale": scale}
    bundle = ctranslate2.read(folder(tmp_path, binary(found, aliases)))
    wanted = torch.float16 if kind == "float16" else torch.float32
    for name, tensor in model.state_dict().items():
        read = bundle.weights[name]()
        assert read.dtype == wanted
        torch.testing.assert_close(read.float(), tensor, atol=8e-3 if kind == "int8" else 2e-3, rtol=0.0)
    assert kind in bundle.origin


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_start_from_zero_becomes_a_token(tied: bool, bias: bool, tmp_path: Path) -> None:
    found, aliases = variables(made(MODELS["marian"].replace(head=LMHead(tied=tied, bias=bias))))
    found["decoder/start_from_zero_embedding"] = np.int8(1)
    bundle = ctranslate2.read(folder(tmp_path, binary(found, aliases), decoder_start_token="</s>"))
    assert bundle.tokenizer is not None
    assert bundle.model.vocab_size == bundle.tokenizer.vocab_size == len(TOKENS) + 1  # type: ignore[union-attr]
    assert bundle.tokenizer.bos_id == bundle.tokenizer.pad_id == len(TOKENS)
    assert not bundle.weights["embedding.weight"]()[-1].any()
    assert logits(rebuilt(bundle), [len(TOKENS), 5], SOURCE)[:, -1].max() < -9000  # it is never generated


def test_positions_without_a_table_are_counted_from_one(tmp_path: Path) -> None:
    found, aliases = variables(made(MODELS["opennmt"]))
    found = {name: array for name, array in found.items() if "encodings" not in name}
    bundle = ctranslate2.read(folder(tmp_path, binary(found, aliases)))
    table = bundle.weights["decoder.position.weight"]()
    torch.testing.assert_close(table[0, 0], torch.tensor(1.0).sin())
    torch.testing.assert_close(table[4, -1], torch.tensor(5e-4).cos())


# ---- against CTranslate2


@pytest.mark.parametrize("name", [*sorted(MODELS), "zero", "formula"])
def test_ctranslate2_says_the_same(name: str, tmp_path: Path) -> None:
    theirs = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    found, aliases = variables(made(MODELS[{"zero": "marian", "formula": "opennmt"}.get(name, name)]))
    if name == "zero":
        found["decoder/start_from_zero_embedding"] = np.int8(1)
    if name == "formula":
        found = {key: array for key, array in found.items() if "encodings" not in key}
    bundle = ctranslate2.read(folder(tmp_path, binary(found, aliases)))
    assert bundle.tokenizer is not None
    translator = theirs.Translator(str(tmp_path), device="cpu", compute_type="float32", intra_threads=1)
    words = [TOKENS[id] for id in SOURCE], [TOKENS[id] for id in TARGET[1:]]
    scored = translator.score_batch([words[0]], [words[1]])[0].log_probs
    target = [bundle.tokenizer.bos_id or 0, *TARGET[1:]]
    model = rebuilt(bundle)
    scores = logits(model, target, SOURCE).log_softmax(-1)
    mine = scores[torch.arange(4), torch.tensor([*TARGET[1:], 2])]
    torch.testing.assert_close(mine, torch.tensor(scored), atol=2e-5, rtol=1e-4)
    best = translator.translate_batch([words[0]], beam_size=1, max_decoding_length=6)[0].hypotheses[0]
    written = target[:1]
    while len(written) < 7 and written[-1] != 2:
        written.append(int(logits(model, written, SOURCE)[-1].argmax()))
    assert [TOKENS[id] for id in written[1:] if id != 2] == best


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_marian_model_by_its_own_converter(quantization: str | None, tmp_path: Path) -> None:
    theirs = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pieces = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    marian = tmp_path / "marian"
    marian.mkdir()
    lines = {
        "source": ["the cat sat on the mat", "a dog and a cat", "the mat is red, the dog is not"],
        "target": ["die Katze saß auf der Matte", "ein Hund und eine Katze", "die Matte ist rot"],
    }
    found: list[str] = []
    for side, texts in lines.items():
        file = io.BytesIO()
        pieces.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=file, vocab_size=60, hard_vocab_limit=False, minloglevel=2
        )
        (marian / f"{side}.spm").write_bytes(file.getvalue())
        cutter = pieces.SentencePieceProcessor(model_proto=file.getvalue())
        found += [cutter.id_to_piece(id) for id in range(3, cutter.get_piece_size())]
    order = ["</s>", "<unk>", *dict.fromkeys(found), "<pad>"]
    (marian / "vocab.json").write_text(json.dumps({token: id for id, token in enumerate(order)}))
    named = {"tokenizer_class": "MarianTokenizer", "source_lang": "en", "target_lang": "de"}
    (marian / "tokenizer_config.json").write_text(json.dumps(named))
    pad = len(order) - 1
    sizes = {"d_model": D, "encoder_layers": 1, "decoder_layers": 2, "max_position_embeddings": 40}
    sizes |= {f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")}
    sizes |= {"encoder_ffn_dim": FF, "decoder_ffn_dim": FF, "vocab_size": len(order)}
    special = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 0}
    model = transformers.MarianMTModel(
        transformers.MarianConfig(activation_function="swish", scale_embedding=True, **sizes, **special)
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                parameter.normal_(std=0.3)
        model.final_logits_bias.normal_()
        model.model.shared.weight[pad] = 0.0
    model.save_pretrained(marian)
    converter = theirs.converters.TransformersConverter(str(marian), copy_files=["source.spm", "target.spm"])
    converter.convert(str(tmp_path / "converted"), quantization=quantization)

    bundle = ctranslate2.read(tmp_path / "converted")
    tokenizer = transformers.AutoTokenizer.from_pretrained(marian)
    assert bundle.tokenizer is not None
    assert bundle.source_tokenizer is not None
    for text_ in [*lines["source"], "a K and z"]:
        assert bundle.source_tokenizer.encode(text_) == tokenizer(text_, add_special_tokens=False)["input_ids"]
    for text_ in lines["target"]:
        assert bundle.tokenizer.decode(bundle.tokenizer.encode(text_)) == text_
    source, target = tokenizer("the red cat")["input_ids"], [pad, 5, 9, 3]
    with torch.no_grad():
        wanted = model(torch.tensor([source]), decoder_input_ids=torch.tensor([target])).logits[0, :, :-1]
    mine = logits(rebuilt(bundle), target, source)[:, :-1]
    torch.testing.assert_close(mine, wanted, atol=1e-5 if quantization is None else 0.2, rtol=1e-4)


# ---- what is refused


MARIAN = variables(made(MODELS["marian"]))


def changed(**changes: np.ndarray | None) -> bytes:
    found, aliases = dict(MARIAN[0]), MARIAN[1]
    for name, array in changes.items():
        name = name.replace("__", "/")
        found.pop(name, None)
        if array is not None:
            found[name] = array
    return binary(found, aliases)


GOOD = changed()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "truncated"),
        (b"PK\x03\x04 no model", "not a CTranslate2 model"),
        (GOOD[:40], "truncated"),
        (GOOD[:-1], "truncated"),
        (GOOD + b"\0", "1 bytes follow the end"),
        (struct.pack("<I", 9) + GOOD[4:], "begins with 9, weft reads 1 … 6"),
        (binary({}, {}, "WhisperSpec"), "a model of kind 'WhisperSpec'"),
        (binary({}, {"a": "b"}), "'a' is an alias of 'b'"),
        (struct.pack("<I", 6) + text("TransformerSpec") + struct.pack("<II", 7, 2**32 - 1), "truncated"),
        (
            struct.pack("<I", 6)
            + text("T")
            + struct.pack("<II", 7, 1)
            + text("x")
            + struct.pack("<B4IBI", 4, *[9**9] * 4, 0, 4),
            "does not fill its 4 bytes",
        ),
        (struct.pack("<I", 6) + text("T") + struct.pack("<II", 7, 1) + text("x") + b"\xff", "255 dimensions"),
        (
            struct.pack("<I", 6) + text("T") + struct.pack("<II", 7, 1) + text("x") + struct.pack("<BBI", 0, 77, 4),
            "type 77",
        ),
        (changed(decoder__layer_0__ffn__linear_1__bias=None), "'decoder/layer_0/ffn/linear_1/bias' .* is missing"),
        (changed(decoder__odd=np.zeros((2, 2), np.float32)), "'decoder/odd' .* has no place"),
        (changed(decoder__strange=np.int8(1)), "'decoder/strange' is a setting that weft does not know"),
        (changed(encoder__layer_0__ffn__layer_norm__beta=np.zeros(3, np.float32)), r"is \[3\]; the settings require"),
        (changed(decoder__activation=np.int8(4), encoder__activation=np.int8(4)), "activation number 4"),
        (changed(decoder__activation=np.int8(0)), "activation is 2 in the encoder and 0 in the decoder"),
        (changed(decoder__num_heads=np.int16(0), encoder__num_heads=np.int16(0)), "num_heads = 0"),
        (changed(decoder__alibi=np.int8(1)), "decoder/alibi is on"),
        (changed(decoder__layer_0__self_attention__num_heads_kv=np.int32(3)), "kv_heads = 3 does not divide"),
        (changed(encoder__embeddings_1__weight=np.zeros((2, 2), np.float32)), "several source embeddings"),
        (changed(decoder__scale_embeddings=np.float32(3), encoder__scale_embeddings=np.float32(3)), "multiplied by 3"),
    ],
)
def test_one_line_for_a_bad_file(data: bytes, expected: str, tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=expected) as error:
        ctranslate2.read(folder(tmp_path, data))
    assert "\n" not in str(error.value)


def test_one_line_for_bad_vocabularies(tmp_path: Path) -> None:
    for tokens, expected in (
        (TOKENS[:-1], "target vocabulary has 22 tokens, but the embeddings have 23 rows"),
        ([*TOKENS[:-1], "w0"], "a token appears twice"),
        ({"w0": 1}, "expected a list of tokens"),
    ):
        with pytest.raises(InteropError, match=expected):
            ctranslate2.read(folder(tmp_path, GOOD, tokens))  # type: ignore[arg-type]
    (tmp_path / "shared_vocabulary.json").unlink()
    with pytest.raises(InteropError, match="no source vocabulary; expected one of shared_vocabulary"):
        ctranslate2.read(tmp_path)
    assert not ctranslate2.recognises(tmp_path)
    folder(tmp_path, GOOD)
    (tmp_path / "source.spm").write_bytes(b"nothing")
    with pytest.raises(InteropError, match=r"source\.spm: .*SentencePiece"):
        ctranslate2.read(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(InteropError, match="not valid JSON"):
        ctranslate2.read(tmp_path)


@pytest.mark.parametrize("key", ["unk_token", "eos_token", "bos_token", "decoder_start_token"])
@pytest.mark.parametrize("value", [7, ["<unk>"], {"content": "<unk>"}, True])
def test_a_token_that_is_no_text_is_one_line(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(InteropError, match=rf"config\.json: {key} = .*: expected a text$"):
        ctranslate2.read(folder(tmp_path / "m", GOOD, **{key: value}))


@pytest.mark.parametrize("name", ["config.json", "shared_vocabulary.json"])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 10_000])
def test_deep_json_is_one_line(name: str, text: str, tmp_path: Path) -> None:
    place = folder(tmp_path / "m", binary(*variables(made(MODELS["marian"]))))
    (place / name).write_text(text)
    with pytest.raises(InteropError, match=f"{name}: not valid JSON: ") as caught:
        ctranslate2.read(place)
    assert "\n" not in str(caught.value)
