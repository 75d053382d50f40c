"""CTranslate2 folders: read by weft, compared with the model they were written from and, if installed, CTranslate2."""

import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.interop.ctranslate2_models import (
    FF,
    HEADS,
    MODELS,
    SOURCE,
    TARGET,
    TOKENS,
    D,
    binary,
    first_binary,
    first_names,
    folder,
    logits,
    random_model,
    rebuild,
    scores,
    text,
    variables,
)

from weft.errors import InteropError, WeftError
from weft.interop.ctranslate2 import ctranslate2
from weft.models.config import EncoderDecoder
from weft.models.head_config import LMHead
from weft.nn.config import Attention

MARIAN = variables(random_model(MODELS["marian"]))


def with_variables(changes: dict[str, Any], version: int = 6) -> bytes:
    """The Marian model with other variables; None removes one."""
    arrays = MARIAN[0] | changes
    return binary({name: array for name, array in arrays.items() if array is not None}, MARIAN[1], version=version)


GOOD = with_variables({})


def translator(path: Path) -> Any:
    theirs = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    return theirs.Translator(str(path), device="cpu", compute_type="float32", intra_threads=1)


def their_scores(path: Path) -> torch.Tensor:
    """Log-likelihoods of the tokens of TARGET and eos, given SOURCE, by CTranslate2."""
    source, target = ([TOKENS[id] for id in ids] for ids in (SOURCE, TARGET[1:]))
    return torch.tensor(translator(path).score_batch([source], [target])[0].log_probs)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_logits_and_tokenizer(name: str, tmp_path: Path) -> None:
    model = random_model(MODELS[name])
    bundle = ctranslate2.read(folder(tmp_path, binary(*variables(model))))
    assert isinstance(bundle.model, EncoderDecoder)
    read = rebuild(bundle)
    torch.testing.assert_close(logits(read, TARGET, SOURCE), logits(model, TARGET, SOURCE), atol=1e-5, rtol=1e-5)
    assert type(bundle.model.position) is type(MODELS[name].position)
    assert ctranslate2.recognises(tmp_path)
    assert bundle.tokenizer is not None
    assert bundle.tokenizer.encode("w0 w6 unknown") == [3, 9, 0]
    assert (bundle.tokenizer.bos_id, bundle.tokenizer.eos_id, bundle.tokenizer.unk_id) == (1, 2, 0)


# ---- older files


def test_version_3(tmp_path: Path) -> None:
    """The type is the size of an element, the embeddings have no number, and each setting is stored once."""
    model = random_model(MODELS["marian"])
    arrays, aliases = variables(model)
    aliases["encoder/embeddings/weight"] = aliases.pop("encoder/embeddings_0/weight")
    for setting in ("num_heads", "pre_norm", "activation"):
        arrays[setting] = arrays.pop(f"encoder/{setting}")
        del arrays[f"decoder/{setting}"]
    (tmp_path / "shared_vocabulary.txt").write_text("\n".join(TOKENS) + "\n")
    path = folder(tmp_path, binary(arrays, aliases, version=3))
    (path / "shared_vocabulary.json").unlink()
    (path / "config.json").unlink()
    read = rebuild(ctranslate2.read(path / "model.bin"))
    torch.testing.assert_close(logits(read, TARGET, SOURCE), logits(model, TARGET, SOURCE), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["", "TransformerBase", "TransformerBig"])
@pytest.mark.parametrize("int16", [False, True])
def test_versions_1_and_2(kind: str, int16: bool, tmp_path: Path) -> None:
    """The number of heads follows from the kind; names are OpenNMT-tf's, and int16 has no scales."""
    heads = 16 if kind == "TransformerBig" else 8
    model = random_model(MODELS["opennmt"].replace(attention=Attention(heads=heads, bias="all")))
    arrays = first_names(*variables(model))
    if int16:
        arrays = {name: np.rint(a * 1000).astype(np.int16) if a.ndim == 2 else a for name, a in arrays.items()}
    (tmp_path / "model.bin").write_bytes(first_binary(arrays, kind))
    (tmp_path / "shared_vocabulary.txt").write_text("\n".join(TOKENS) + "\n")
    assert ctranslate2.recognises(tmp_path / "model.bin")
    bundle = ctranslate2.read(tmp_path / "model.bin")
    assert isinstance(bundle.model, EncoderDecoder) and bundle.model.attention.heads == heads
    assert bundle.origin.endswith("int16" if int16 else "float32")
    torch.testing.assert_close(scores(rebuild(bundle), TARGET), their_scores(tmp_path), atol=2e-5, rtol=1e-4)


def test_version_5_stores_tokens_in_variables(tmp_path: Path) -> None:
    """Later versions have them in config.json. A text is an array of its bytes."""
    changes: dict[str, Any] = {"bos_token": np.frombuffer(b"w0", np.int8), "eos_token": np.frombuffer(b"w1", np.int8)}
    changes |= {"with_source_eos": np.int8(1), "with_target_bos": np.int8(0), "with_source_bos": np.int8(0)}
    tokenizer = ctranslate2.read(folder(tmp_path, with_variables(changes, version=5))).tokenizer
    assert tokenizer is not None
    # with_target_bos is off: the decoder starts with eos, though config.json names bos
    assert [tokenizer.token(id or 0) for id in (tokenizer.bos_id, tokenizer.eos_id)] == ["w1", "w1"]
    changes["unk_token"] = np.frombuffer(b"\xff\xfe", np.int8)
    with pytest.raises(InteropError, match="'unk_token' is not UTF-8 text"):
        ctranslate2.read(folder(tmp_path, with_variables(changes, version=5)))


@pytest.mark.parametrize("scaled", [True, False, None])
def test_the_older_switch_of_the_embedding_scale(scaled: bool | None, tmp_path: Path) -> None:
    changes: dict[str, Any] = {f"{side}/scale_embeddings": None for side in ("encoder", "decoder")}
    if scaled is not None:
        changes["encoder/embeddings_0/multiply_by_sqrt_depth"] = np.int8(scaled)
    model = ctranslate2.read(folder(tmp_path, with_variables(changes))).model
    assert isinstance(model, EncoderDecoder) and model.embedding_scale is (scaled is not False)


# ---- variants of the format


@pytest.mark.parametrize("kind", ["int8", "int16", "float16"])
def test_quantised(kind: str, tmp_path: Path) -> None:
    model = random_model(MODELS["marian"])
    arrays, aliases = variables(model)
    for name, array in list(arrays.items()):
        if kind == "float16" and array.ndim:
            arrays[name] = array.astype(np.float16)
        elif kind == "int8" and array.ndim == 2 and "encodings" not in name:
            scale = 127 / np.abs(array).max(axis=1)
            arrays |= {name: np.rint(array * scale[:, None]).astype(np.int8), f"{name}_scale": scale}
        elif kind == "int16" and array.ndim == 2 and "encodings" not in name:
            scale = np.float32(1024 / np.abs(array).max())
            arrays |= {name: np.rint(array * scale).astype(np.int16), f"{name}_scale": scale}
    bundle = ctranslate2.read(folder(tmp_path, binary(arrays, aliases)))
    dtype = torch.float16 if kind == "float16" else torch.float32
    for name, tensor in model.state_dict().items():
        read = bundle.weights[name]()
        assert read.dtype == dtype
        torch.testing.assert_close(read.float(), tensor, atol=8e-3 if kind == "int8" else 2e-3, rtol=0.0)
    assert kind in bundle.origin


def test_int8_without_its_scale_is_refused(tmp_path: Path) -> None:
    weight = MARIAN[0]["decoder/embeddings/weight"].astype(np.int8)
    bundle = ctranslate2.read(folder(tmp_path, with_variables({"decoder/embeddings/weight": weight})))
    with pytest.raises(InteropError, match="its scale 'decoder/embeddings/weight_scale' is missing"):
        bundle.weights["embedding.weight"]()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_start_from_the_zero_embedding_becomes_a_token(tied: bool, bias: bool, tmp_path: Path) -> None:
    arrays, aliases = variables(random_model(MODELS["marian"].replace(head=LMHead(tied=tied, bias=bias))))
    arrays["decoder/start_from_zero_embedding"] = np.int8(1)
    bundle = ctranslate2.read(folder(tmp_path, binary(arrays, aliases), decoder_start_token="</s>"))
    assert isinstance(bundle.model, EncoderDecoder) and bundle.tokenizer is not None
    assert bundle.model.vocab_size == bundle.tokenizer.vocab_size == len(TOKENS) + 1
    assert bundle.tokenizer.bos_id == bundle.tokenizer.pad_id == len(TOKENS)
    assert not bundle.weights["embedding.weight"]()[-1].any()
    assert logits(rebuild(bundle), [len(TOKENS), 5], SOURCE)[:, -1].max() < -9000  # it is never generated


def test_positions_without_a_table_are_counted_from_one(tmp_path: Path) -> None:
    arrays, aliases = variables(random_model(MODELS["opennmt"]))
    arrays = {name: array for name, array in arrays.items() if "encodings" not in name}
    bundle = ctranslate2.read(folder(tmp_path, binary(arrays, aliases)))
    table = bundle.weights["decoder.position.weight"]()
    torch.testing.assert_close(table[0, 0], torch.tensor(1.0).sin())
    torch.testing.assert_close(table[4, -1], torch.tensor(5e-4).cos())


# ---- compared with CTranslate2


@pytest.mark.parametrize("name", [*sorted(MODELS), "zero embedding", "computed positions"])
def test_scores_and_translations_are_those_of_ctranslate2(name: str, tmp_path: Path) -> None:
    source = {"zero embedding": "marian", "computed positions": "opennmt"}.get(name, name)
    arrays, aliases = variables(random_model(MODELS[source]))
    if name == "zero embedding":
        arrays["decoder/start_from_zero_embedding"] = np.int8(1)
    if name == "computed positions":
        arrays = {key: array for key, array in arrays.items() if "encodings" not in key}
    bundle = ctranslate2.read(folder(tmp_path, binary(arrays, aliases)))
    assert bundle.tokenizer is not None
    ids, model = [bundle.tokenizer.bos_id or 0], rebuild(bundle)
    torch.testing.assert_close(scores(model, ids + TARGET[1:]), their_scores(tmp_path), atol=2e-5, rtol=1e-4)
    words = [TOKENS[id] for id in SOURCE]
    best = translator(tmp_path).translate_batch([words], beam_size=1, max_decoding_length=6)[0].hypotheses[0]
    while len(ids) < 7 and ids[-1] != 2:
        ids.append(int(logits(model, ids, SOURCE)[-1].argmax()))
    assert [TOKENS[id] for id in ids[1:] if id != 2] == best


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_marian_model_converted_by_ctranslate2(quantization: str | None, tmp_path: Path) -> None:
    theirs = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    marian = tmp_path / "marian"
    marian.mkdir()
    lines = {
        "source": ["the cat sat on the mat", "a dog and a cat", "the mat is red, the dog is not"],
        "target": ["die Katze saß auf der Matte", "ein Hund und eine Katze", "die Matte ist rot"],
    }
    pieces: list[str] = []
    for side, texts in lines.items():
        file = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=file, vocab_size=60, hard_vocab_limit=False, minloglevel=2
        )
        (marian / f"{side}.spm").write_bytes(file.getvalue())
        processor = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
        pieces += [processor.id_to_piece(id) for id in range(3, processor.get_piece_size())]
    vocabulary = ["</s>", "<unk>", *dict.fromkeys(pieces), "<pad>"]
    (marian / "vocab.json").write_text(json.dumps({token: id for id, token in enumerate(vocabulary)}))
    settings = {"tokenizer_class": "MarianTokenizer", "source_lang": "en", "target_lang": "de"}
    (marian / "tokenizer_config.json").write_text(json.dumps(settings))
    pad = len(vocabulary) - 1
    sizes = {"d_model": D, "encoder_layers": 1, "decoder_layers": 2, "max_position_embeddings": 40}
    sizes |= {f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")}
    sizes |= {"encoder_ffn_dim": FF, "decoder_ffn_dim": FF, "vocab_size": len(vocabulary)}
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
    assert bundle.tokenizer is not None and bundle.source_tokenizer is not None
    for line in [*lines["source"], "a K and z"]:
        assert bundle.source_tokenizer.encode(line) == tokenizer(line, add_special_tokens=False)["input_ids"]
    for line in lines["target"]:
        assert bundle.tokenizer.decode(bundle.tokenizer.encode(line)) == line
    source, target = tokenizer("the red cat")["input_ids"], [pad, 5, 9, 3]
    with torch.no_grad():
        expected = model(torch.tensor([source]), decoder_input_ids=torch.tensor([target])).logits[0, :, :-1]
    ours = logits(rebuild(bundle), target, source)[:, :-1]
    torch.testing.assert_close(ours, expected, atol=1e-5 if quantization is None else 0.2, rtol=1e-4)


# ---- broken files


def one_variable(*layout: Any) -> bytes:
    """A model.bin whose only variable, x, has this layout: the arguments of struct.pack."""
    return struct.pack("<I", 6) + text("T") + struct.pack("<II", 7, 1) + text("x") + struct.pack(*layout)


def both(setting: str, value: Any) -> dict[str, Any]:
    return {f"{side}/{setting}": value for side in ("encoder", "decoder")}


@pytest.mark.parametrize(
    ("data", "message"),
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
        (one_variable("<B4IBI", 4, *[9**9] * 4, 0, 4), "does not fill its 4 bytes"),
        (one_variable("<B", 255), "255 dimensions"),
        (one_variable("<BBI", 0, 77, 4), "type 77"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=message) as caught:
        ctranslate2.read(folder(tmp_path, data))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder/layer_0/ffn/linear_1/bias": None}, "'decoder/layer_0/ffn/linear_1/bias' .* is missing"),
        ({"decoder/odd": np.zeros((2, 2), np.float32)}, "'decoder/odd' .* has no place"),
        ({"decoder/strange": np.int8(1)}, "'decoder/strange' is a setting that weft does not know"),
        ({"encoder/layer_0/ffn/layer_norm/beta": np.zeros(3, np.float32)}, r"is \[3\]; the settings require"),
        (both("activation", np.int8(4)), "activation number 4"),
        ({"decoder/activation": np.int8(0)}, "activation is 2 in the encoder and 0 in the decoder"),
        (both("num_heads", np.int16(0)), "num_heads = 0"),
        ({"decoder/alibi": np.int8(1)}, "decoder/alibi is on"),
        ({"decoder/layer_0/self_attention/num_heads_kv": np.int32(3)}, "kv_heads = 3 does not divide"),
        ({"encoder/embeddings_1/weight": np.zeros((2, 2), np.float32)}, "several source embeddings"),
        (both("scale_embeddings", np.float32(3)), "multiplied by 3"),
    ],
)
def test_variables_that_weft_cannot_use_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=message) as caught:
        ctranslate2.read(folder(tmp_path, with_variables(changes)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (TOKENS[:-1], "target vocabulary has 22 tokens, but the embeddings have 23 rows"),
        ([*TOKENS[:-1], "w0"], "a token appears twice"),
        ({"w0": 1}, "expected a list of tokens"),
    ],
)
def test_broken_vocabularies_are_refused(tokens: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InteropError, match=message):
        ctranslate2.read(folder(tmp_path, GOOD, tokens))


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    folder(tmp_path, GOOD)
    (tmp_path / "source.spm").write_bytes(b"nothing")
    with pytest.raises(InteropError, match=r"source\.spm: .*SentencePiece"):
        ctranslate2.read(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(InteropError, match="not valid JSON"):
        ctranslate2.read(tmp_path)
    folder(tmp_path, GOOD)
    (tmp_path / "shared_vocabulary.json").unlink()
    with pytest.raises(InteropError, match="no source vocabulary; expected one of shared_vocabulary"):
        ctranslate2.read(tmp_path)
    assert not ctranslate2.recognises(tmp_path)


@pytest.mark.parametrize("key", ["unk_token", "eos_token", "bos_token", "decoder_start_token"])
@pytest.mark.parametrize("value", [7, ["<unk>"], {"content": "<unk>"}, True])
def test_a_token_that_is_not_a_string_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(InteropError, match=rf"config\.json: {key} = .*: expected a string$"):
        ctranslate2.read(folder(tmp_path / "m", GOOD, **{key: value}))


@pytest.mark.parametrize("name", ["config.json", "shared_vocabulary.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "1" * 10_000])
def test_deep_json_is_refused_in_one_line(name: str, content: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "m", GOOD)
    (path / name).write_text(content)
    with pytest.raises(InteropError, match=f"{name}: not valid JSON: ") as caught:
        ctranslate2.read(path)
    assert "\n" not in str(caught.value)
