"""Models of llama2.c: a short header, then every weight as fp32, all layers of a kind behind each other.

Two versions of the file exist, without and with a magic number; the third, of 8-bit blocks, is refused. The vocabulary
lies in a file of its own beside it: a score and the bytes of each token, SentencePiece's spaces written as spaces.
"""

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from weft.errors import InteropError
from weft.interop.bundle import ModelBundle
from weft.interop.tokenizer_json import SPACE, merges_by_score, sentencepiece
from weft.interop.weight_map import SAME, AdjacentPairs, Rule, conversions, rule, to_ours
from weft.models.config import Decoder
from weft.models.presets import llama
from weft.text.surface import BYTE_TOKEN
from weft.text.tokenizer import Tokenizer

MAGIC = 0x616B3432
LARGEST = 2**20  # of any width or count: beyond, a header is damaged or means harm
LONGEST = 2**10  # bytes of a token
UNK, BOS, EOS = "<unk>", "<s>", "</s>"  # ids 0, 1 and 2


@dataclass(frozen=True)
class _Header:
    tied: bool
    version: int
    start: int  # the first weight's byte
    d_model: int
    d_ff: int
    layers: int
    heads: int
    kv_heads: int
    vocab_size: int
    context: int

    @property
    def d_head(self) -> int:
        return self.d_model // self.heads

    def arrays(self) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        """Every array in the order of the file: name, shape of a layer's part, whether there is one a layer."""
        d, ff, keys = self.d_model, self.d_ff, self.d_head * self.kv_heads
        table = ("tok_embeddings", (self.vocab_size, d), False)
        norms = ("attention_norm", (d,), True), ("ffn_norm", (d,), True)
        last = ("norm", (d,), False)
        attention = ("wq", (d, d), True), ("wk", (keys, d), True), ("wv", (keys, d), True), ("wo", (d, d), True)
        feedforward = ("w1", (ff, d), True), ("w2", (d, ff), True), ("w3", (ff, d), True)
        angles = (self.context, self.d_head // 2)
        if self.version == 0:
            yield from (table, norms[0], *attention, norms[1], *feedforward, last)
            yield from (("freq_cis_real", angles, False), ("freq_cis_imag", angles, False))
        else:
            yield from (*norms, last, table, *attention, *feedforward)
        if not self.tied:
            yield "output", (self.vocab_size, d), False


def recognises(path: Path) -> bool:
    """Whether a path looks like a llama2.c model; the pickles of transformers are .bin files too."""
    return path.suffix == ".bin" and not path.name.startswith("pytorch_model")


def read(path: Path, tokenizer: Path | None = None) -> ModelBundle:
    """The model in a llama2.c file. Its vocabulary is the file given, or tokenizer.bin or tok<size>.bin beside it."""
    data = _mapped(path)
    header = _header(path, data)
    places: dict[str, int] = {}
    found: dict[str, tuple[int, ...]] = {}
    end = header.start
    for name, shape, layered in header.arrays():
        for layer in range(header.layers if layered else 1):
            full = f"{name}.{layer}" if layered else name
            places[full], found[full] = end, shape
            end += 4 * prod(shape)
    if end != len(data):
        what = "cut short" if len(data) < end else "too long"
        raise InteropError(f"{path}: {what}: its header asks for {end:,} bytes, and it has {len(data):,}")

    def tensor(name: str) -> Tensor:
        raw = data[places[name] : places[name] + 4 * prod(found[name])]
        return torch.frombuffer(bytearray(raw), dtype=torch.float32).reshape(found[name])

    model = llama(
        header.layers,
        header.d_model,
        header.heads,
        header.d_ff,
        header.context,
        header.vocab_size,
        kv_heads=None if header.kv_heads == header.heads else header.kv_heads,
        tied=header.tied,
    )
    stored = {name: shape for name, shape in found.items() if not name.startswith("freq_cis")}
    return ModelBundle(
        model=model,
        weights=to_ours(conversions(_rules(model), model), stored, tensor, str(path)),
        tokenizer=read_tokenizer(tokenizer or _vocabulary_of(path, header.vocab_size), header.vocab_size),
        origin=f"{path.name} (llama2.c, version {header.version})",
    )


def _mapped(path: Path) -> memoryview:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else memoryview(b"")
    except FileNotFoundError:
        raise InteropError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise InteropError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _header(path: Path, data: memoryview) -> _Header:
    if len(data) < 256:
        raise InteropError(f"{path}: not a llama2.c model: {len(data)} bytes are too few")
    version, start, shared = 0, 28, None
    if struct.unpack_from("<I", data)[0] == MAGIC:
        version = struct.unpack_from("<i", data, 4)[0]
        if version != 1:
            raise InteropError(f"{path}: version {version} of llama2.c's format; known are 0 and 1, which hold fp32")
        *sizes, shared = struct.unpack_from("<7iB", data, 8)
        start = 256
    else:
        sizes = list(struct.unpack_from("<7i", data))
    tied = bool(shared) if shared is not None else sizes[5] > 0
    sizes[5] = abs(sizes[5])
    names = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
    for name, size in zip(names, sizes, strict=True):
        if not 0 < size <= LARGEST:
            raise InteropError(f"{path}: not a llama2.c model: {name} = {size}; expected 1 to {LARGEST:,}")
    header = _Header(tied, version, start, *sizes)
    if header.d_model % header.heads or header.d_head % 2 or header.heads % header.kv_heads:
        raise InteropError(
            f"{path}: not a llama2.c model: dim = {sizes[0]}, n_heads = {sizes[3]} and n_kv_heads = {sizes[4]} "
            "do not divide each other into even heads"
        )
    if header.layers * 4 * header.d_model > len(data):
        raise InteropError(f"{path}: cut short or damaged: {header.layers} layers cannot lie in {len(data):,} bytes")
    return header


def _rules(model: Decoder) -> list[Rule]:
    block = "decoder.blocks.{layer}"
    turned = AdjacentPairs(model.d_head)
    return [
        rule("embedding.weight", "tok_embeddings"),
        rule("output.weight", "output"),
        rule("decoder.norm.weight", "norm"),
        rule(f"{block}.attention_skip.norm.weight", "attention_norm.{layer}"),
        rule(f"{block}.attention.qkv.weight", *(f"w{x}.{{layer}}" for x in "qkv"), forms=(turned, turned, SAME)),
        rule(f"{block}.attention.out.weight", "wo.{layer}"),
        rule(f"{block}.feedforward_skip.norm.weight", "ffn_norm.{layer}"),
        rule(f"{block}.feedforward.gate_up.weight", "w1.{layer}", "w3.{layer}"),
        rule(f"{block}.feedforward.down.weight", "w2.{layer}"),
    ]


# ---- the vocabulary


def _vocabulary_of(path: Path, vocab_size: int) -> Path:
    names = (f"tok{vocab_size}.bin", "tokenizer.bin")
    found = next((path.with_name(name) for name in names if path.with_name(name).is_file()), None)
    if found is None:
        raise InteropError(
            f"{path}: its vocabulary is missing; put {names[0]} or {names[1]} beside it, or name it with --tokenizer"
        )
    return found


def read_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """The SentencePiece vocabulary of `vocab_size` tokens in a llama2.c tokenizer file, or a tokenizer.json of it."""
    if path.is_dir() or path.suffix == ".json":
        tokenizer = Tokenizer.load(path)
        if tokenizer.vocab_size != vocab_size:
            raise InteropError(f"{path}: {tokenizer.vocab_size} tokens, but the model's vocab_size is {vocab_size}")
        return tokenizer
    tokens, scores = _tokens(path, _mapped(path), vocab_size)
    special = {tokens[0]: True, tokens[1]: True, tokens[2]: True}
    pieces = [id > 2 and not BYTE_TOKEN.fullmatch(token) for id, token in enumerate(tokens)]
    text = sentencepiece(tokens, merges_by_score(tokens, scores, pieces), special, UNK, begin=BOS)
    try:
        return Tokenizer.from_json(text, {"unk": UNK, "bos": BOS, "eos": EOS})
    except ValueError as error:
        raise InteropError(f"{path}: {error}") from None


def _tokens(path: Path, data: memoryview, vocab_size: int) -> tuple[list[str], list[float]]:
    tokens: list[str] = []
    scores: list[float] = []
    place = 4
    for id in range(vocab_size):
        if place + 8 > len(data):
            raise InteropError(f"{path}: {id} tokens where the model has {vocab_size}: cut short, or another model's")
        score, length = struct.unpack_from("<fi", data, place)
        place += 8
        if not 0 <= length <= min(LONGEST, len(data) - place) or score != score:
            raise InteropError(f"{path}: not a llama2.c vocabulary: token {id} of {length} bytes")
        tokens.append(bytes(data[place : place + length]).decode("utf-8", "replace").replace(" ", SPACE))
        scores.append(score)
        place += length
    if place != len(data):
        raise InteropError(f"{path}: more tokens than the model's {vocab_size}: another model's vocabulary")
    if vocab_size < 3 or not tokens[0].strip() == UNK:
        raise InteropError(f"{path}: not a llama2.c vocabulary: its first token is {tokens[0]!r}, not {UNK!r}")
    return [UNK, BOS, EOS, *tokens[3:]], scores
