"""Broken GGUF files are refused in one line, without much memory."""

import random
import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.interop.gguf_models import FAMILIES, SHORT, TINY, write

from weft.errors import WeftError
from weft.interop.gguf import gguf as weft_gguf

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a complete file."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write(path, TINY)
    return path.read_bytes()


def refusal(path: Path, data: bytes) -> str:
    """Return the one line with which a file of these bytes is refused."""
    path.write_bytes(data)
    with pytest.raises(WeftError) as caught:
        weft_gguf.read(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def overwritten(data: bytes, offset: int, new: bytes) -> bytes:
    return data[:offset] + new + data[offset + len(new) :]


def after(data: bytes, name: bytes) -> int:
    """Offset of the end of a name, at its first occurrence."""
    return data.index(name) + len(name)


def renamed(data: bytes, old: bytes, new: bytes) -> bytes:
    assert len(old) == len(new)
    assert data.count(old) == 1
    return data.replace(old, new)


def test_a_truncated_file_is_refused(content: bytes, tmp_path: Path) -> None:
    step = len(content) // 60
    for size in [0, 3, 4, 7, 8, 15, 23, 24, *range(30, len(content), step), len(content) - 64]:
        refusal(tmp_path / "m.gguf", content[:size])


def test_random_damage_gives_one_line_or_a_model(content: bytes, tmp_path: Path) -> None:
    rng = random.Random(0)
    header = content.index(b"blk.0.ffn_down") + 64
    path = tmp_path / "m.gguf"
    messages: list[str] = []
    for _ in range(80):
        data = bytearray(content)
        for _ in range(rng.choice([1, 2, 8])):
            offset = rng.choice([rng.randrange(header), rng.randrange(64)])
            data[offset] = rng.choice([0, 1, 0x7F, 0xFF, rng.randrange(256)])
        path.write_bytes(data)
        try:
            weft_gguf.read(path)
        except WeftError as error:
            messages.append(str(error))
    assert len(messages) > 20
    assert not any("\n" in message for message in messages)


def test_huge_sizes_take_no_memory(content: bytes, tmp_path: Path) -> None:
    tokens = after(content, b"tokenizer.ggml.tokens") + 8
    name = content.index(b"token_embd.weight") - 8
    dimensions = after(content, b"token_embd.weight") + 4
    tracemalloc.start()
    for offset in (8, 16, 24, tokens, name, dimensions):
        refusal(tmp_path / "m.gguf", overwritten(content, offset, struct.pack("<Q", 2**62)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * len(content) + 2**22


def integer(key: bytes, value: int) -> Any:
    """A change of the file: another value of a key of type uint32."""
    return lambda data: overwritten(data, after(data, key) + 4, struct.pack("<I", value))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"GGML" + data[4:], "not a GGUF file: it begins with b'GGML'"),
        (lambda data: b"", "not a GGUF file"),
        (lambda data: overwritten(data, 4, struct.pack("<I", 9)), "version 9"),
        (lambda data: overwritten(data, 4, struct.pack(">I", 3)), "big-endian"),
        (lambda data: renamed(data, b"blk.0.attn_q.w", b"blk.0.attn_x.w"), "'blk.0.attn_q.weight' .* is missing"),
        (
            lambda data: renamed(data, b"\x0d\0\0\0\0\0\0\0output.weight", b"\x0d\0\0\0\0\0\0\0other.weight_"),
            "'other.weight_' .* no place",
        ),
        (lambda data: renamed(data, b"llama.embedding_length", b"llama.embedding_lengtx"), "embedding_length is miss"),
        (lambda data: renamed(data, b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba"), "'mamba': .*llama"),
        (lambda data: renamed(data, b"gpt-2", b"gpt-9"), "tokenizer.ggml.pre = 'gpt-9'"),
        (
            lambda data: overwritten(data, after(data, b"token_embd.weight") + 20, struct.pack("<I", 40)),
            "'token_embd.weight' is of ggml type 40.*Q4_K",
        ),
        (
            integer(b"llama.feed_forward_length", 31),
            r"'blk.0.ffn_gate.weight' is \[32, 32\]; the settings require \[31, 32\]",
        ),
        (integer(b"llama.block_count", 2**20), "llama.block_count = 1048576: the file has only 12 tensors"),
        (integer(b"llama.vocab_size", 299), "vocab_size has 299 entries, but 'token_embd.weight' has 300 rows"),
    ],
)
def test_the_message_names_the_error(change: Any, message: str, content: bytes, tmp_path: Path) -> None:
    line = refusal(tmp_path / "m.gguf", change(content))
    assert re.search(message, line), line


SHORT_FACTORS = b"rope_factors_short.weight"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "gemma3",
            lambda data: data,
            "sliding_window_pattern = [True, False]: expected a whole number, or true or false for each of 7",
        ),
        (
            "llama-3.1",
            lambda data: data.replace(struct.pack("<f", 5e5), struct.pack("<f", -5e5)),
            "base = -500000.0: expected a number greater than 0",
        ),
        (
            "phi3-long",
            lambda data: renamed(data, b"factors_short", b"factors_shore"),
            "it has a tensor 'rope_factors_long.weight', but no 'rope_factors_short.weight'",
        ),
        (
            "phi3-long",
            lambda data: overwritten(data, after(data, SHORT_FACTORS) + 4, struct.pack("<Q", 7)),
            "needs 8 factors in short and in long",
        ),
        (
            "phi3-long",
            lambda data: renamed(data, struct.pack("<f", SHORT[-1]), struct.pack("<f", float("nan"))),
            "position.scaling",
        ),
        (
            "mixtral",
            lambda data: renamed(data, b"blk.0.ffn_gate_exps.w", b"blk.0.ffn_gate_expt.w"),
            "'blk.0.ffn_gate_exps.weight' [5, 96, 64] is missing",
        ),
        (
            "mixtral",
            lambda data: renamed(data, b"blk.1.ffn_down_exps.w", b"blk.1.ffn_down_expt.w"),
            "'blk.1.ffn_down_exps.weight' [5, 64, 96] is missing",
        ),
        (
            "olmoe",
            lambda data: renamed(data, b"blk.1.ffn_gate_inp.w", b"blk.1.ffn_gate_inq.w"),
            "'blk.1.ffn_gate_inp.weight' [5, 64] is missing",
        ),
        (
            "mixtral",
            integer(b"llama.expert_used_count", 6),
            "llama.expert_used_count = 6: a token can choose at most llama.expert_count = 5",
        ),
        (
            "qwen3moe",
            integer(b"qwen3moe.expert_used_count", 6),
            "qwen3moe.expert_used_count = 6: a token can choose at most qwen3moe.expert_count = 5",
        ),
        (
            "qwen3moe",
            integer(b"qwen3moe.expert_count", 2**28),
            "'blk.0.ffn_gate_exps.weight' is [5, 96, 64]; the settings require [268435456, 96, 64]",
        ),
        ("qwen2moe", integer(b"qwen2moe.expert_count", 0), "expert_count = 0: expected a whole number above 0"),
        (
            "olmoe",
            integer(b"olmoe.feed_forward_length", 2**28),
            "'blk.0.ffn_gate_exps.weight' is [5, 96, 64]; the settings require [5, 268435456, 64]",
        ),
        (
            "glm4moe",
            integer(b"glm4moe.leading_dense_block_count", 3),
            "glm4moe.leading_dense_block_count = 3: expected a whole number below 3",
        ),
        ("minimax-m2", integer(b"minimax-m2.expert_gating_func", 1), "expert_gating_func = 1: weft has only 2"),
        (
            "gpt-oss",
            integer(b"gpt-oss.rope.scaling.original_context_length", 0),
            "original_context_length = 0: expected",
        ),
        (
            "olmoe",
            integer(b"olmoe.attention.head_count_kv", 2),
            "head_count_kv = 2: weft has only the value of attention.heads",
        ),
        (
            "falcon",
            lambda data: renamed(data, b"\x06\0\0\0\0\0\0\0falcon", b"\x06\0\0\0\0\0\0\0phimoe"),
            "'phimoe': llama.cpp computes other norms, expert weights and positions than this model was trained with",
        ),
        ("deepseek2", integer(b"deepseek2.expert_used_count", 7), "can choose at most deepseek2.expert_count = 6"),
        ("deepseek2", integer(b"deepseek2.expert_gating_func", 3), "expert_gating_func = 3: weft has 1 and 2"),
        ("deepseek2", integer(b"deepseek2.expert_group_count", 4), "groups = 4 does not divide experts = 6"),
        ("deepseek2", integer(b"deepseek2.attention.head_count_kv", 4), "head_count_kv = 4: weft has only 1"),
        ("deepseek2", integer(b"deepseek2.attention.key_length", 32), "key_length = 32: weft has only 28"),
        ("deepseek2", integer(b"deepseek2.rope.dimension_count", 32), "key_length = 28: weft has only 52"),
        (
            "deepseek2",
            lambda data: renamed(data, b"blk.2.attn_k_b.w", b"blk.2.attn_k_c.w"),
            "'blk.2.attn_k_b.weight' [4, 20, 24] is missing",
        ),
        (
            "ernie4_5-moe",
            integer(b"ernie4_5-moe.interleave_moe_layer_step", 9),
            "'blk.6.ffn_gate_exps.weight' [6, 32, 64] is missing",
        ),
        (
            "ernie4_5-moe",
            integer(b"ernie4_5-moe.expert_count", 5),
            "'blk.3.ffn_gate_exps.weight' is [6, 32, 64]; the settings require [5, 32, 64]",
        ),
        (
            "ernie4_5-moe",
            integer(b"ernie4_5-moe.attention.head_count", 2**27),
            "'blk.0.attn_output.weight' is [64, 64]; the settings require [64, 2147483648]",
        ),
        (
            "llama4",
            lambda data: renamed(data, b"blk.1.ffn_down_exps.w", b"blk.1.ffn_down_expt.w"),
            "'blk.1.ffn_down_exps.weight' [6, 64, 32] is missing",
        ),
        ("llama4", integer(b"llama4.expert_used_count", 7), "can choose at most llama4.expert_count = 6"),
    ],
)
def test_invalid_sizes_windows_and_factors_are_refused(name: str, change: Any, message: str, tmp_path: Path) -> None:
    pattern = {"gguf": {"keys": {"gemma3.attention.sliding_window_pattern": [9, [True, False], 7]}}}
    write(tmp_path / "m.gguf", FAMILIES[name], notes=pattern if name == "gemma3" else None)
    assert message in refusal(tmp_path / "m.gguf", change((tmp_path / "m.gguf").read_bytes()))
