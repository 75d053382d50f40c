"""Dtypes and quantised blocks of GGUF files."""

import struct
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.interop.gguf_models import FAMILIES, HEADS, encodings, logits, random_weights, write
from torch import Tensor

from weft.api.export_model import export_model
from weft.api.import_model import import_model
from weft.interop.bundle import ModelBundle
from weft.interop.gguf import gguf as weft_gguf
from weft.interop.gguf import q4_k
from weft.interop.gguf.file import ENCODINGS, Entry, LazyTensor, TensorEncoding, dequantize, open_file, write_file
from weft.models.presets import llama
from weft.nn.config import Experts

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
pytestmark = pytest.mark.usefixtures("seeded")


# ---- dtypes


def test_norms_of_each_head_are_fp32(tmp_path: Path) -> None:
    """They are matrices, but llama.cpp requires fp32 for every norm."""
    write(tmp_path / "m.gguf", FAMILIES["stablelm-12b"], dtype="f16")
    kinds = encodings(tmp_path / "m.gguf")
    assert kinds["blk.0.attn_q_norm.weight"] == kinds["blk.0.attn_norm.weight"] == "F32"
    assert kinds["blk.0.attn_q.weight"] == "F16"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_kept_if_vectors_are_exact(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = random_weights(FAMILIES["llama"], dtype)
    write(tmp_path / "m.gguf", FAMILIES["llama"], weights)
    assert encodings(tmp_path / "m.gguf")["blk.0.attn_norm.weight"] == "F32"
    bundle = weft_gguf.read(tmp_path / "m.gguf")
    assert all(torch.equal(bundle.weights[name](), read()) for name, read in weights.items())
    assert {read().dtype for read in bundle.weights.values()} == {dtype}


def test_all_weights_are_read_as_fp32_if_half_precision_would_round_vectors(tmp_path: Path) -> None:
    weights = random_weights(FAMILIES["llama"])
    write(tmp_path / "m.gguf", FAMILIES["llama"], weights, dtype="f16")
    bundle = weft_gguf.read(tmp_path / "m.gguf")
    assert {read().dtype for read in bundle.weights.values()} == {torch.float32}
    assert torch.equal(bundle.weights["embedding.weight"](), weights["embedding.weight"]().half().float())


def test_q8_0(tmp_path: Path) -> None:
    weights = random_weights(FAMILIES["llama"])
    write(tmp_path / "m.gguf", FAMILIES["llama"], weights, dtype="q8_0")
    assert open_file(tmp_path / "m.gguf").get("general.file_type") == 7
    kinds = encodings(tmp_path / "m.gguf")
    assert (kinds["token_embd.weight"], kinds["output_norm.weight"]) == ("Q8_0", "F32")
    bundle = weft_gguf.read(tmp_path / "m.gguf")
    table, rounded = weights["embedding.weight"](), bundle.weights["embedding.weight"]()
    steps = table.unflatten(-1, (-1, 32)).abs().amax(-1) / 127
    assert ((table - rounded).unflatten(-1, (-1, 32)).abs() <= steps[..., None] * 0.57).all()
    weft_gguf.write(bundle, tmp_path / "n.gguf", "q8_0")
    copy = weft_gguf.read(tmp_path / "n.gguf")
    assert all(torch.equal(bundle.weights[name](), copy.weights[name]()) for name in weights)


@pytest.mark.parametrize("name", ["mixtral", "qwen2moe"])
def test_experts_are_quantised_and_routers_are_not(name: str, tmp_path: Path) -> None:
    model = FAMILIES[name]  # all experts are chosen: rounding changes a choice now and then
    assert isinstance(model.feedforward, Experts)
    model = model.replace(feedforward=model.feedforward.replace(chosen=model.feedforward.experts))
    weights = random_weights(model)
    write(tmp_path / "m.gguf", model, weights, dtype="q8_0")
    kinds = {kind.partition("ffn_")[2]: encoding for kind, encoding in encodings(tmp_path / "m.gguf").items()}
    names = ("gate_exps.weight", "up_exps.weight", "down_exps.weight", "gate_inp.weight")
    assert [kinds[kind] for kind in names] == ["Q8_0", "Q8_0", "Q8_0", "F32"]
    assert kinds.get("gate_inp_shexp.weight", "F32") == "F32"
    bundle = weft_gguf.read(tmp_path / "m.gguf")
    assert bundle.model == model
    for suffix in ("router.weight", "experts.gate_up", "experts.down"):
        exact, read = (kind[f"decoder.blocks.1.feedforward.{suffix}"]() for kind in (weights, bundle.weights))
        assert (exact - read).abs().max() <= (0.0 if "router" in suffix else exact.abs().max() / 127 * 0.57)
    tokens = torch.randint(300, (2, 9))
    exact, read = logits(ModelBundle(model, weights, None, ""), tokens), logits(bundle, tokens)
    assert (exact - read).norm() <= 0.05 * exact.norm()
    weft_gguf.write(bundle, tmp_path / "n.gguf")  # the blocks of each matrix are those of the imported file
    former, again = open_file(tmp_path / "m.gguf"), open_file(tmp_path / "n.gguf")
    assert all(former.raw(kind) == again.raw(kind) for kind in former.tensors)


def test_the_gate_of_a_shared_expert_may_be_a_matrix(tmp_path: Path) -> None:
    """The converter of llama.cpp wrote it as a matrix of one row."""
    weights = random_weights(FAMILIES["qwen2moe"])
    write(tmp_path / "m.gguf", FAMILIES["qwen2moe"], weights)
    contents, tensors = open_file(tmp_path / "m.gguf"), []
    for name, entry in contents.tensors.items():
        shape = (1, *entry.shape) if name.endswith("_shexp.weight") and len(entry.shape) == 1 else entry.shape
        tensors.append(LazyTensor(name, shape, None, partial(contents.tensor(name).view, shape)))
    assert sum(lazy.shape == (1, 64) for lazy in tensors) == 2
    write_file(tmp_path / "n.gguf", contents.keys, tensors, advance=lambda count: None)
    read = weft_gguf.read(tmp_path / "n.gguf").weights
    assert all(torch.equal(read[name](), weight()) for name, weight in weights.items())


def test_q4_k_and_q4_0(tmp_path: Path) -> None:
    """Embeddings and LM head are Q8_0. Q4_K has the smaller error."""
    model, errors = llama(1, 256, 4, d_ff=512, context=16, vocab_size=300), {}
    weights = random_weights(model)
    for dtype, file_type, kind in (("q4_k", 15, "Q4_K_M"), ("q4_0", 2, "Q4_0")):
        path = tmp_path / f"{dtype}.gguf"
        write(path, model, weights, dtype=dtype)
        assert open_file(path).get("general.file_type") == file_type
        kinds = encodings(path)
        assert {kinds[name] for name in ("token_embd.weight", "output.weight")} == {"Q8_0"}
        assert kinds["blk.0.ffn_down.weight"] == kinds["blk.0.attn_q.weight"] == dtype.upper()
        name = "decoder.blocks.0.feedforward.down.weight"
        bundle = weft_gguf.read(path)
        rounded, original = bundle.weights[name](), weights[name]()
        errors[dtype] = ((rounded - original).norm() / original.norm()).item()
        assert bundle.origin == f"{dtype}.gguf (GGUF, llama, {kind})"
        weft_gguf.write(bundle, tmp_path / "again.gguf")
        assert open_file(tmp_path / "again.gguf").get("general.file_type") == file_type
        weft_gguf.write(bundle, tmp_path / "wide.gguf", "f16")
        assert open_file(tmp_path / "wide.gguf").get("general.file_type") == 1
    assert errors["q4_k"] < 0.08 < errors["q4_0"] < 0.1


def test_the_file_type_is_that_of_the_layers(tmp_path: Path) -> None:
    """Even if the embeddings, in Q8_0, are the larger part."""
    model = llama(1, 256, 4, d_ff=512, context=16, vocab_size=6000)
    write(tmp_path / "m.gguf", model, dtype="q4_k")
    assert open_file(tmp_path / "m.gguf").get("general.file_type") == 15
    assert weft_gguf.read(tmp_path / "m.gguf").origin == "m.gguf (GGUF, llama, Q4_K_M)"


@pytest.mark.parametrize(
    ("d_model", "d_ff", "dtype", "down", "up"), [(48, 64, "q8_0", "Q8_0", "F16"), (96, 256, "q4_k", "Q4_K", "Q5_0")]
)
def test_rows_that_do_not_divide_into_blocks_have_another_encoding(
    d_model: int, d_ff: int, dtype: str, down: str, up: str, tmp_path: Path
) -> None:
    write(tmp_path / "m.gguf", llama(1, d_model, 4, d_ff=d_ff, context=16, vocab_size=300), dtype=dtype)
    kinds = encodings(tmp_path / "m.gguf")
    assert (kinds["blk.0.ffn_down.weight"], kinds["blk.0.ffn_up.weight"]) == (down, up)


# ---- quantised blocks


@pytest.mark.parametrize("shift", [-3.0, 0.0, 3.0])
def test_the_error_of_q4_k_is_bounded(shift: float) -> None:
    """By half a step of the group, plus the error of the rounded scales."""
    groups = torch.rand(64, 8, 32) * torch.logspace(-3, 0, 64)[:, None, None] * 0.5 + shift
    blocks = q4_k.quantize(groups.reshape(16, -1))
    rounded = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType.Q4_K)).view_as(groups)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1)
    bound = (high - low) / 15 * 0.6 + groups.abs().amax((1, 2))[:, None] / 63
    assert ((rounded - groups).abs().amax(-1) <= bound).all()
    assert torch.equal(q4_k.quantize(torch.zeros(2, 256)), torch.zeros(2, 144, dtype=torch.uint8))


def random_blocks(encoding: TensorEncoding, rows: int, width: int) -> Any:
    """Random bytes, (rows, blocks, bytes), with finite scales."""
    rng = np.random.default_rng(encoding.number)
    raw = rng.integers(0, 256, (rows, width // encoding.block, encoding.bytes), dtype=np.uint8)
    if encoding.name == "MXFP4":
        raw[..., 0] = rng.integers(110, 140, raw.shape[:-1])
        return raw
    scales = {"Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "Q6_K": [208], "Q3_K": [108], "Q2_K": [80, 82]}
    for offset in scales.get(encoding.name, [0, 2]):
        values = rng.normal(size=(rows, width // encoding.block)).astype(np.float16)
        raw[..., offset : offset + 2] = values.view(np.uint8).reshape(*values.shape, 2)
    return raw


def five_bits(raw: Any, name: str) -> Tensor:
    """Dequantise Q5_0 or Q5_1 by definition: four bits in half a byte, the fifth in a word of 32."""
    values = []
    for block in raw.reshape(-1, raw.shape[-1]).tolist():
        data = bytes(block)
        (scale,), offset = struct.unpack_from("<e", data), 2
        minimum = None
        if name == "Q5_1":
            (minimum,), offset = struct.unpack_from("<e", data, 2), 4
        (high,) = struct.unpack_from("<I", data, offset)
        low = data[offset + 4 :]
        for i in range(32):
            q = (low[i % 16] >> 4 * (i // 16) & 15) | (high >> i & 1) << 4
            values.append((q - 16) * scale if minimum is None else q * scale + minimum)
    return torch.tensor(values)


def e2m1(raw: Any) -> Tensor:
    """Dequantise MXFP4 by definition: a power of two times numbers of a sign, two exponent bits and one of mantissa."""
    values = []
    for scale, *data in raw.reshape(-1, raw.shape[-1]).tolist():
        for code in (*(byte & 15 for byte in data), *(byte >> 4 for byte in data)):
            exponent, mantissa = code >> 1 & 3, (code & 1) / 2
            size = (1 + mantissa) * 2 ** (exponent - 1) if exponent else mantissa
            values.append((-1) ** (code >> 3) * size * 2.0 ** (scale - 127))
    return torch.tensor(values)


@pytest.mark.parametrize("encoding", [e for e in ENCODINGS.values() if e.block > 1], ids=lambda e: e.name)
def test_blocks_are_dequantised_as_by_transformers(encoding: TensorEncoding) -> None:
    rows, width = 7, 512
    raw = random_blocks(encoding, rows, width)
    entry = Entry((rows, width), encoding, start=0, bytes=raw.nbytes)
    ours = dequantize(memoryview(raw.tobytes()), entry, chunk=1024)  # two rows in one call
    if encoding.name in ("Q5_0", "Q5_1"):  # transformers does not read them
        expected = five_bits(raw, encoding.name)
    elif encoding.name == "MXFP4":
        expected = e2m1(raw)
    else:
        from transformers.integrations.gguf.dequant import dequantize as reference

        expected = reference(torch.from_numpy(raw.reshape(-1, encoding.bytes)), encoding.number)
    assert (ours.flatten() - expected.flatten()).abs().max() <= 1e-5 * expected.abs().max()


def stored_tensors(path: Path) -> dict[str, tuple[str, bytes]]:
    """Encodings and bytes of a file's tensors, read by the package gguf."""
    return {tensor.name: (tensor.tensor_type.name, tensor.data.tobytes()) for tensor in gguf.GGUFReader(path).tensors}


def test_imported_blocks_are_exported_unchanged(tmp_path: Path) -> None:
    """Also through a run folder; only changed tensors are encoded again."""
    write(tmp_path / "plain.gguf", llama(2, 256, HEADS, d_ff=256, context=32, vocab_size=300))
    plain = gguf.GGUFReader(tmp_path / "plain.gguf")
    matrices = [tensor.name for tensor in plain.tensors if len(tensor.shape) == 2]
    others = [encoding for encoding in ENCODINGS.values() if encoding.name != "F32"]
    kinds = dict(zip(matrices, others * 2, strict=False))
    assert set(kinds.values()) == set(others)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, (type_, value, of) in open_file(tmp_path / "plain.gguf").keys.items():
        if key not in ("general.architecture", "general.file_type"):
            writer.add_key_value(key, value, gguf.GGUFValueType(type_), gguf.GGUFValueType(of))
    for tensor in plain.tensors:
        kind = kinds.get(tensor.name)
        if kind is None:
            writer.add_tensor(tensor.name, tensor.data)
        elif kind.block > 1:
            raw = random_blocks(kind, *tensor.data.shape).reshape(len(tensor.data), -1)
            writer.add_tensor(tensor.name, raw, raw_dtype=gguf.GGMLQuantizationType(kind.number))
        else:
            half = torch.from_numpy(tensor.data.copy()).to(torch.float16 if kind.name == "F16" else torch.bfloat16)
            values = half.view(torch.uint8).numpy() if kind.name == "BF16" else half.numpy()
            writer.add_tensor(tensor.name, values, raw_dtype=gguf.GGMLQuantizationType(kind.number))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    original = stored_tensors(tmp_path / "m.gguf")
    assert {name: original[name][0] for name in kinds} == {name: kind.name for name, kind in kinds.items()}

    import_model(tmp_path / "m.gguf", tmp_path / "run")
    export_model(tmp_path / "run", "gguf", tmp_path / "out.gguf")
    assert stored_tensors(tmp_path / "out.gguf") == original

    bundle = weft_gguf.read(tmp_path / "m.gguf")
    changed = bundle.weights["decoder.blocks.0.attention.qkv.weight"]().clone()
    changed[0, 0] += 1  # of the queries
    weights = {**bundle.weights, "decoder.blocks.0.attention.qkv.weight": lambda: changed}
    weft_gguf.write(replace(bundle, weights=weights), tmp_path / "changed.gguf")
    tensors = stored_tensors(tmp_path / "changed.gguf")
    assert [name for name in original if tensors[name] != original[name]] == ["blk.0.attn_q.weight"]
    assert tensors["blk.0.attn_q.weight"][0] == "F32"

    weft_gguf.write(bundle, tmp_path / "q8_0.gguf", "q8_0")
    tensors = stored_tensors(tmp_path / "q8_0.gguf")
    assert {tensors[name][0] for name in kinds} == {"Q8_0"}
    already = [name for name, kind in kinds.items() if kind.name == "Q8_0"]
    assert [tensors[name] for name in already] == [original[name] for name in already]
