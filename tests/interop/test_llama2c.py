"""Files of llama2.c, written here by its description; logits are compared with transformers."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.later import Later
from torch import Tensor

from weft.errors import InteropError, WeftError
from weft.interop import llama2c
from weft.models.build import build
from weft.models.config import Decoder
from weft.models.head_config import LMHead
from weft.text.token_bytes import byte_tokens

transformers = Later("transformers")

D, FF, LAYERS, HEADS, KV, CONTEXT = 32, 48, 2, 4, 2, 16
PIECES = [" ", "t", "h", "e", "c", "a", "th", "the", " the", "at", "cat", " cat", " c", " t"]
SCORES = [-9.0, -9.0, -9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0, -5.0, -6.0, -7.0, -8.0, -4.0]
VOCAB = 259 + len(PIECES)


def reference_model(tied: bool) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=D,
            intermediate_size=FF,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV,
            max_position_embeddings=CONTEXT,
            rms_norm_eps=1e-5,
            tie_word_embeddings=tied,
        )
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows for adjacent rotary pairs, as in Meta's checkpoints."""
    return weight.reshape(heads, 2, -1, D).swapaxes(1, 2).reshape(weight.shape)


def model_bytes(theirs: Any, tied: bool, version: int = 0) -> bytes:
    layers = list(theirs.model.layers)
    table, last = [theirs.model.embed_tokens.weight], [theirs.model.norm.weight]
    attention = [
        *(interleaved(layer.self_attn.q_proj.weight, HEADS) for layer in layers),
        *(interleaved(layer.self_attn.k_proj.weight, KV) for layer in layers),
        *(layer.self_attn.v_proj.weight for layer in layers),
        *(layer.self_attn.o_proj.weight for layer in layers),
    ]
    feedforward = [getattr(layer.mlp, f"{x}_proj").weight for x in ("gate", "down", "up") for layer in layers]
    norms = [
        [layer.input_layernorm.weight for layer in layers],
        [layer.post_attention_layernorm.weight for layer in layers],
    ]
    sizes = [D, FF, LAYERS, HEADS, KV, VOCAB, CONTEXT]
    if version == 0:
        angles = [torch.zeros(CONTEXT, D // HEADS // 2)] * 2  # no longer read by anything
        tensors = [*table, *norms[0], *attention, *norms[1], *feedforward, *last, *angles]
        sizes[5] = VOCAB if tied else -VOCAB
        head = struct.pack("<7i", *sizes)
    else:
        tensors = [*norms[0], *norms[1], *last, *table, *attention, *feedforward]
        head = struct.pack("<Ii7iB", 0x616B3432, version, *sizes, tied).ljust(256, b"\0")
    tensors += [] if tied else [theirs.lm_head.weight]
    return head + b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors)


def vocabulary(spelled: Callable[[int], bytes] = lambda byte: f"<0x{byte:02X}>".encode()) -> bytes:
    specials = [b"<unk>", b"\n<s>\n", b"\n</s>\n"]
    tokens = [*specials, *map(spelled, range(256)), *(piece.encode() for piece in PIECES)]
    rows = zip(tokens, [0.0] * 259 + SCORES, strict=True)
    parts = [struct.pack("<fi", score, len(token)) + token for token, score in rows]
    return struct.pack("<i", max(map(len, tokens))) + b"".join(parts)


def reference_ids(text: str) -> list[int]:
    """Encode as llama2.c does: a space before the text, characters or else bytes, then merges, the best one first."""
    ids = {piece: id for id, piece in enumerate(PIECES, start=259)}
    pieces = dict(enumerate(PIECES, start=259))
    tokens: list[int] = []
    for character in f" {text}" if text else "":
        tokens += [ids[character]] if character in ids else [3 + byte for byte in character.encode()]
    while True:
        joined = [pieces.get(a, "?") + pieces.get(b, "?") for a, b in pairwise(tokens)]
        scored = [(SCORES[ids[piece] - 259], -index) for index, piece in enumerate(joined) if piece in ids]
        if not scored:
            return tokens
        index = -max(scored)[1]
        tokens[index : index + 2] = [ids[joined[index]]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.bin").write_bytes(vocabulary())
    (tmp_path / "m.bin").write_bytes(model_bytes(reference_model(True), True))
    return tmp_path


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_logits(tied: bool, version: int, folder: Path) -> None:
    theirs = reference_model(tied)
    (folder / "m.bin").write_bytes(model_bytes(theirs, tied, version))
    bundle = llama2c.read(folder / "m.bin")
    assert isinstance(bundle.model, Decoder)
    assert bundle.model.head == LMHead(tied=tied)
    assert bundle.model.context == CONTEXT
    ours = build(bundle.model).eval()
    ours.load_state_dict({name: read() for name, read in bundle.weights.items()})
    tokens = torch.randint(VOCAB, (2, 11))
    with torch.no_grad():
        assert (ours(tokens) - theirs(tokens).logits).abs().max() <= 1e-5


def test_the_tokenizer(folder: Path) -> None:
    tokenizer = llama2c.read(folder / "m.bin").tokenizer
    assert tokenizer is not None
    assert tokenizer.roles == {"unk": "<unk>", "bos": "<s>", "eos": "</s>"}
    assert [tokenizer.token(id) for id in tokenizer.encode("the cat", bos=True)] == ["<s>", "▁the", "▁cat"]
    for text in ("the cat", "théâtre 🙂\nthe", "a  b", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text


BYTE_FORMS = {  # older files have characters or bytes: most of them are pieces too, or begin a longer character
    "names": lambda byte: f"<0x{byte:02X}>".encode(),
    "characters": lambda byte: chr(byte).encode(),
    "bytes": lambda byte: bytes([byte]),
}


@pytest.mark.parametrize("form", BYTE_FORMS)
def test_every_id_of_an_older_vocabulary_is_a_token(form: str, folder: Path) -> None:
    (folder / "tokenizer.bin").write_bytes(vocabulary(BYTE_FORMS[form]))
    tokenizer = llama2c.read(folder / "m.bin").tokenizer
    assert tokenizer is not None
    tokens = [tokenizer.token(id) for id in range(VOCAB)]
    assert tokens == ["<unk>", "<s>", "</s>", *byte_tokens(), *(piece.replace(" ", "▁") for piece in PIECES)]
    spelled = [tokenizer.token_bytes(id) for id in range(3, VOCAB)]
    assert spelled == [*(bytes([byte]) for byte in range(256)), *(piece.encode() for piece in PIECES)]
    for text in ("the cat", " the", "   the  cat ", " ", "théâtre 🙂\nthe", "\x00\x7f\x80ÿ", "tea", "", "<0x41>"):
        assert tokenizer.encode(text) == reference_ids(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_vocabulary_is_found_by_its_size_or_given_by_path(folder: Path) -> None:
    (folder / "tokenizer.bin").rename(folder / f"tok{VOCAB}.bin")
    assert llama2c.read(folder / "m.bin").tokenizer is not None
    (folder / f"tok{VOCAB}.bin").rename(folder / "other.bin")
    with pytest.raises(InteropError, match=f"its vocabulary is missing; put tok{VOCAB}.bin or tokenizer.bin beside it"):
        llama2c.read(folder / "m.bin")
    named = llama2c.read(folder / "m.bin", folder / "other.bin").tokenizer
    assert named is not None
    named.save(folder / "saved")
    loaded = llama2c.read(folder / "m.bin", folder / "saved").tokenizer
    assert loaded is not None
    assert loaded.to_json() == named.to_json()


def change(data: bytes, offset: int, value: int) -> bytes:
    return data[:offset] + struct.pack("<i", value) + data[offset + 4 :]


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda b: b"", "not a llama2.c model"),
        (lambda b: b[:-4], "truncated: its header implies"),
        (lambda b: b + b"\0\0\0\0", "too long: its header implies"),
        (lambda b: change(b, 0, 0), "dim = 0"),
        (lambda b: change(b, 8, 2**30), "n_layers = 1073741824"),
        (lambda b: change(b, 8, 2**20), "1048576 layers do not fit into"),
        (lambda b: change(b, 12, 3), "kv_heads = 2 does not divide heads = 3"),
        (lambda b: b"GGUF" + b[4:], "dim = 1179993927"),
        (lambda b: struct.pack("<Ii", 0x616B3432, 2) + b[8:], "version 2 of llama2.c's format"),
    ],
)
def test_a_damaged_model_is_refused_in_one_line(corrupt: Any, message: str, folder: Path) -> None:
    path = folder / "m.bin"
    path.write_bytes(corrupt(path.read_bytes()))
    with pytest.raises(WeftError, match=message) as caught:
        llama2c.read(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda b: b"", "0 tokens where the model has"),
        (lambda b: b[:-20], "tokens where the model has|not a llama2.c vocabulary"),
        (lambda b: b + struct.pack("<fi", 0.0, 1) + b"x", "more tokens than the model's"),
        (lambda b: change(b, 8, 2**30), "token 0 of 1073741824 bytes"),
        (lambda b: b.replace(b"<unk>", b"<xyz>"), "its first token is '<xyz>'"),
        (lambda b: b.replace(b"the", b"cat"), "tokens 266 and 269 are both 'cat'"),
        (lambda b: b.replace(b"the", b"t\xffe"), r"token 266, b't.xffe', is not UTF-8"),
    ],
)
def test_a_damaged_vocabulary_is_refused_in_one_line(corrupt: Any, message: str, folder: Path) -> None:
    path = folder / "tokenizer.bin"
    path.write_bytes(corrupt(path.read_bytes()))
    with pytest.raises(InteropError, match=message) as caught:
        llama2c.read(folder / "m.bin")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_reported() -> None:
    with pytest.raises(InteropError, match="no such file"):
        llama2c.read(Path("nowhere.bin"))
