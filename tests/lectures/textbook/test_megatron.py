"""lectures/megatron.py: two processes compute weft's unsplit layers, with the lecture's number of all-reduces."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lectures.textbook import parity
from tests.lectures.textbook.lecture import gradients, load
from tests.lectures.textbook.parity import split
from torch import Tensor

from weft.nn.attention import SelfAttention
from weft.nn.config import Attention, Plain
from weft.nn.feedforward import build
from weft.nn.mask import AttentionMask, Mask
from weft.nn.position import Position

megatron = load("megatron")
pytestmark = pytest.mark.timeout(300)  # starting two processes takes long on a busy machine
D_MODEL, D_FF, HEADS, TIME = 16, 24, 4, 5
Found = dict[str, Any]


def weft_layers() -> dict[str, tuple[torch.nn.Module, dict[str, Tensor]]]:
    """Both layers, and their weights under the names of the file."""
    torch.manual_seed(0)
    ffn = build(Plain(d_ff=D_FF, activation="gelu"), D_MODEL)
    attention = SelfAttention(Attention(heads=HEADS, bias="all"), D_MODEL, D_MODEL // HEADS)
    for weight in (*ffn.parameters(), *attention.parameters()):
        torch.nn.init.normal_(weight, std=0.3)
    ffn, attention = ffn.double(), attention.double()
    return {"ffn": (ffn, of_ffn(ffn.state_dict())), "attention": (attention, of_attention(attention.state_dict()))}


def of_ffn(weights: parity.Tensors) -> dict[str, Tensor]:
    return {**parity.linear(weights, "A", "up"), "B.weight": weights["down.weight"], "b": weights["down.bias"]}


def of_attention(weights: parity.Tensors) -> dict[str, Tensor]:
    found = split(weights, "_", ("W_q", "W_k", "W_v"), "qkv", [D_MODEL] * 3)
    named = {name.removeprefix("_."): weight for name, weight in found.items()}
    return {**named, "W_o.weight": weights["out.weight"], "b": weights["out.bias"]}


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    weights = {f"{name} weights": weights for name, (_, weights) in weft_layers().items()}
    x, upstream = torch.randn(2, 2, TIME, D_MODEL, dtype=torch.float64)
    return weights | {"x": x, "upstream": upstream, "ffn sizes": (D_MODEL, D_FF), "attention sizes": (D_MODEL, HEADS)}


@pytest.fixture(scope="module")
def found(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """Results of two processes, on Gloo."""
    folder = tmp_path_factory.mktemp("megatron")
    torch.save(given, folder / "given.pt")
    script = Path(__file__).with_name("megatron_rank.py")
    commands = [[sys.executable, str(script), str(folder), str(rank), "2"] for rank in range(2)]
    for process in [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]:
        _, err = process.communicate(timeout=250)
        assert process.returncode == 0, err
    return [torch.load(folder / f"found-{rank}-2.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ffn", "attention"])
def test_two_processes_compute_wefts_layer(name: str, given: dict[str, Any], found: list[Found]) -> None:
    layer, _ = weft_layers()[name]
    x = given["x"].clone().requires_grad_()
    positions = torch.arange(TIME)[None]
    mask = [] if name == "ffn" else [AttentionMask(Mask(causal=True), Position(), positions, keys=positions)]
    z = layer(x, *mask)
    (z * given["upstream"]).sum().backward()
    rename = {"ffn": of_ffn, "attention": of_attention}[name]
    whole = rename(gradients(layer))
    for rank in range(2):
        mine = found[rank][name]
        torch.testing.assert_close(mine["z"], z.detach(), rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(mine["x"], x.grad, rtol=1e-5, atol=1e-9)
        assert mine["gradients"].keys() == whole.keys()
        for key, gradient in mine["gradients"].items():
            expected = megatron.part(f"layer.{key}", whole[key], rank, 2)
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.slow
def test_one_all_reduce_in_each_pass(found: list[Found]) -> None:
    """There is no other collective."""
    for mine in found:
        assert mine["ffn"]["collectives"] == mine["attention"]["collectives"] == [["all_reduce"], ["all_reduce"]]
        assert mine["all-reduces"] == {"forward": 2, "backward": 2}  # of both layers


def test_each_process_holds_half_of_every_matrix() -> None:
    for name, (_, weights) in weft_layers().items():
        for key, weight in weights.items():
            halves = [megatron.part(f"{name}.{key}", weight, rank, 2) for rank in range(2)]
            replicated = key == "b"  # added once, to the sum
            assert all(half.numel() == weight.numel() // (1 if replicated else 2) for half in halves)
            columns = key.split(".")[0] in megatron.COLUMNS
            rejoined = halves[0] if replicated else torch.cat(halves, dim=0 if columns else 1)
            assert torch.equal(rejoined, weight)
