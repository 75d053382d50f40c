"""Read models of llama2.c: a short header, then all weights as fp32, grouped by kind.

Versions 0 (without a magic number) and 1 are read; version 2, of 8-bit blocks, is refused. The vocabulary is a separate
file: a score and the text of each token, with spaces for SentencePiece's ▁.
"""

import struct
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from weft.config import validate
from weft.errors import InteropError
from weft.interop.bundle import ModelBundle, load_tokenizer
from weft.interop.settings import nested
from weft.interop.tokenizer_json import SPACE, BPEVocabulary, merges_by_score, sentencepiece
from weft.interop.weight_map import SAME, adjacent_pairs, conversions, tensor, their_shapes, to_ours
from weft.models.config import Decoder
from weft.storage.untrusted import Cursor, map_file
from weft.text.token_bytes import BYTE_TOKEN, byte_tokens
from weft.text.tokenizer import Tokenizer

MAGIC = 0x616B3432
MAX_SIZE = 2**20  # of any width or count; a header with a larger one is damaged or malicious
MAX_TOKEN_BYTES = 2**10  # length of a token
UNK, BOS, EOS = "<unk>", "<s>", "</s>"  # ids 0, 1 and 2

# sizes in a header, in this order → weft's settings
SIZES = {
    "dim": "d_model", "hidden_dim": "feedforward.d_ff", "n_layers": "layers", "n_heads": "attention.heads",
    "n_kv_heads": "attention.kv_heads", "vocab_size": "vocab_size", "seq_len": "context",
}  # fmt: skip
FIXED = {"feedforward.kind": "gated", "norm.kind": "rms", "position.kind": "rotary", "head.kind": "lm"}
ATTENTION = ("wq.{layer}", "wk.{layer}", "wv.{layer}", "wo.{layer}")
FEEDFORWARD = ("w1.{layer}", "w2.{layer}", "w3.{layer}")
ANGLES = "freq_cis"  # of rotary positions; present in version 0 only, and unused
ORDERS = {  # arrays in each version of the file; all layers of one array follow each other
    0: ("tok_embeddings", "attention_norm.{layer}", *ATTENTION, "ffn_norm.{layer}", *FEEDFORWARD, "norm", ANGLES),
    1: ("attention_norm.{layer}", "ffn_norm.{layer}", "norm", "tok_embeddings", *ATTENTION, *FEEDFORWARD),
}


def read(path: Path, tokenizer: Path | None = None) -> ModelBundle:
    """Read a llama2.c model. Its vocabulary is at `tokenizer`, or beside it in tokenizer.bin or tok<size>.bin."""
    data = map_file(path)
    model, version, end = _read_header(path, data)
    ours, pairs = "decoder.blocks.{layer}", adjacent_pairs(model.d_head)
    rules = [
        tensor("embedding.weight", "tok_embeddings"),
        tensor("output.weight", "output"),
        tensor("decoder.norm.weight", "norm"),
        tensor(f"{ours}.attention_skip.norm.weight", "attention_norm.{layer}"),
        tensor(f"{ours}.attention.qkv.weight", *ATTENTION[:3], layout=(pairs, pairs, SAME)),
        tensor(f"{ours}.attention.out.weight", "wo.{layer}"),
        tensor(f"{ours}.feedforward_skip.norm.weight", "ffn_norm.{layer}"),
        tensor(f"{ours}.feedforward.gate_up.weight", "w1.{layer}", "w3.{layer}"),
        tensor(f"{ours}.feedforward.down.weight", "w2.{layer}"),
    ]
    table = conversions(rules, model)
    shapes = {**their_shapes(table), ANGLES: (2, model.context, model.d_head // 2)}
    offsets: dict[str, int] = {}
    for array in (*ORDERS[version], *(() if getattr(model.head, "tied", True) else ("output",))):
        for layer in range(model.layers if "{layer}" in array else 1):
            name = array.replace("{layer}", str(layer))
            offsets[name] = end
            end += 4 * prod(shapes[name])
    if end != len(data):
        what = "truncated" if len(data) < end else "too long"
        raise InteropError(f"{path}: {what}: its header implies {end:,} bytes, and it has {len(data):,}")

    def read_array(name: str) -> Tensor:
        raw = data[offsets[name] : offsets[name] + 4 * prod(shapes[name])]
        return torch.frombuffer(bytearray(raw), dtype=torch.float32).reshape(shapes[name])

    stored = {name: shapes[name] for name in offsets if name != ANGLES}
    weights = to_ours(table, stored, read_array, location=str(path))
    names = (f"tok{model.vocab_size}.bin", "tokenizer.bin")
    vocabulary = tokenizer or next((path.with_name(name) for name in names if path.with_name(name).is_file()), None)
    if vocabulary is None:
        advice = f"put {' or '.join(names)} beside it, or name it with --tokenizer"
        raise InteropError(f"{path}: its vocabulary is missing; {advice}")
    return ModelBundle(
        model=model,
        weights=weights,
        tokenizer=read_tokenizer(vocabulary, model.vocab_size),
        origin=f"{path.name} (llama2.c, version {version})",
    )


def _read_header(path: Path, data: memoryview) -> tuple[Decoder, int, int]:
    """Return the model, the version of the file, and the offset of its weights."""
    if len(data) < 256:
        raise InteropError(f"{path}: not a llama2.c model: {len(data)} bytes are too few")
    version, start, shared = 0, 28, None
    if struct.unpack_from("<I", data)[0] == MAGIC:
        version = struct.unpack_from("<i", data, 4)[0]
        if version != 1:
            raise InteropError(f"{path}: version {version} of llama2.c's format; weft reads 0 and 1, which hold fp32")
        *values, shared = struct.unpack_from("<7iB", data, 8)
        start = 256
    else:
        values = list(struct.unpack_from("<7i", data))
    sizes = dict(zip(SIZES, values, strict=True))
    tied = bool(shared) if shared is not None else sizes["vocab_size"] > 0
    sizes["vocab_size"] = abs(sizes["vocab_size"])
    for name, size in sizes.items():
        if not 0 < size <= MAX_SIZE:
            raise InteropError(f"{path}: not a llama2.c model: {name} = {size}; expected 1 to {MAX_SIZE:,}")
    layers = sizes["n_layers"]
    if layers * 4 * sizes["dim"] > len(data):  # checked before the layers are built
        raise InteropError(f"{path}: truncated or damaged: {layers} layers do not fit into {len(data):,} bytes")
    model = {**FIXED, "head.tied": tied, **{SIZES[name]: size for name, size in sizes.items()}}
    return validate(Decoder, nested(model), f"{path}: not a llama2.c model"), version, start


def read_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """Read a SentencePiece vocabulary of `vocab_size` tokens from a llama2.c tokenizer file, or a tokenizer.json."""
    if path.is_dir() or path.suffix == ".json":
        return load_tokenizer(path, vocab_size, (vocab_size,))
    tokens, scores = _read_tokens(path, map_file(path), vocab_size)
    texts = [id > 2 and not BYTE_TOKEN.fullmatch(token) for id, token in enumerate(tokens)]
    special = {UNK: True, BOS: True, EOS: True}
    vocabulary = BPEVocabulary(tokens, merges_by_score(tokens, scores, texts), special, begin=BOS)
    try:
        return Tokenizer.from_json(sentencepiece(vocabulary, UNK), {"unk": UNK, "bos": BOS, "eos": EOS})
    except ValueError as error:
        raise InteropError(f"{path}: {error}") from None


def _read_tokens(path: Path, data: memoryview, vocab_size: int) -> tuple[list[str], list[float]]:
    cursor = Cursor(path, data)
    raws: list[bytes] = []
    scores: list[float] = []
    cursor.take(min(4, cursor.left), "the longest token's length")
    for id in range(vocab_size):
        if cursor.left < 8:
            raise InteropError(f"{path}: {id} tokens where the model has {vocab_size}: truncated, or another model's")
        score, length = cursor.number("f", "a score"), cursor.number("i", "a length")
        if not 0 <= length <= min(MAX_TOKEN_BYTES, cursor.left) or score != score:
            raise InteropError(f"{path}: not a llama2.c vocabulary: token {id} of {length} bytes")
        raws.append(bytes(cursor.take(length, "a token")))
        scores.append(score)
    if cursor.left:
        raise InteropError(f"{path}: more tokens than the model's {vocab_size}: another model's vocabulary")
    if vocab_size < 3 or raws[0].strip() != UNK.encode():
        first = raws[0].decode("utf-8", "replace")
        raise InteropError(f"{path}: not a llama2.c vocabulary: its first token is {first!r}, not {UNK!r}")
    return [UNK, BOS, EOS, *_decode_tokens(path, raws)[3:]], scores


def _decode_tokens(path: Path, raws: Sequence[bytes]) -> list[str]:
    """Decode the tokens; each text must be unique.

    In older files, the byte tokens `<0x00>` … `<0xFF>` are the characters with these numbers, or the bytes themselves,
    and many of them equal pieces of one letter.
    """
    byte_names = {3 + byte: token for byte, token in enumerate(byte_tokens())}
    forms = {id: (token.encode(), chr(id - 3).encode(), bytes([id - 3])) for id, token in byte_names.items()}
    if len(raws) < 3 + 256 or any(raws[id] not in form for id, form in forms.items()):
        byte_names = {}
    tokens: dict[str, int] = {}
    for id, raw in enumerate(raws):
        try:
            token = byte_names.get(id) or raw.decode("utf-8").replace(" ", SPACE)
        except UnicodeDecodeError:
            raise InteropError(f"{path}: not a llama2.c vocabulary: token {id}, {raw!r:.60}, is not UTF-8") from None
        if token in tokens:
            both = f"tokens {tokens[token]} and {id} are both {token!r:.60}"
            raise InteropError(f"{path}: {both}; each needs a different text")
        tokens[token] = id
    return list(tokens)
