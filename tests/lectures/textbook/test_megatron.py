"""lectures/megatron.py: two processes compute what weft's layers compute on one, and send what the lecture counts."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lectures.textbook import parity
from tests.lectures.textbook.lecture import load, run
from tests.lectures.textbook.parity import split
from torch import Tensor

from weft.nn.attention import SelfAttention
from weft.nn.config import Attention, Plain
from weft.nn.feedforward import build
from weft.nn.mask import AttentionMask, Mask
from weft.nn.position import Position

megatron = load("megatron")
pytestmark = pytest.mark.timeout(300)  # two processes start, which takes long on a busy machine
D_MODEL, D_FF, HEADS, TIME = 16, 24, 4, 5
Found = dict[str, Any]


def weft_layers() -> dict[str, tuple[torch.nn.Module, dict[str, Tensor]]]:
    """Both layers, and their weights by their names in the file."""
    torch.manual_seed(0)
    ffn = build(Plain(d_ff=D_FF, activation="gelu"), D_MODEL)
    attention = SelfAttention(Attention(heads=HEADS, bias="all"), D_MODEL, D_MODEL // HEADS)
    for weight in (*ffn.parameters(), *attention.parameters()):
        torch.nn.init.normal_(weight, std=0.3)
    ffn, attention = ffn.double(), attention.double()
    return {"ffn": (ffn, of_ffn(ffn.state_dict())), "attention": (attention, of_attention(attention.state_dict()))}


def of_ffn(weights: parity.Tensors) -> dict[str, Tensor]:
    return {
        **parity.linear(weights, "A", "up"),
        "B.weight": weights["down.weight"],
        "b": weights["down.bias"],
    }


def of_attention(weights: parity.Tensors) -> dict[str, Tensor]:
    found = split(weights, "_", ("W_q", "W_k", "W_v"), "qkv", [D_MODEL] * 3)
    named = {name.removeprefix("_."): weight for name, weight in found.items()}
    return {**named, "W_o.weight": weights["out.weight"], "b": weights["out.bias"]}


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    layers = weft_layers()
    return {
        "x": torch.randn(2, TIME, D_MODEL, dtype=torch.float64),
        "upstream": torch.randn(2, TIME, D_MODEL, dtype=torch.float64),
        "ffn sizes": (D_MODEL, D_FF),
        "attention sizes": (D_MODEL, HEADS),
        **{f"{name} weights": weights for name, (_, weights) in layers.items()},
    }


@pytest.fixture(scope="module")
def found(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each of two processes has found, on Gloo."""
    folder = tmp_path_factory.mktemp("megatron")
    torch.save(given, folder / "given.pt")
    script = Path(__file__).with_name("megatron_rank.py")
    words = [[sys.executable, script, str(folder), str(rank), "2"] for rank in range(2)]
    started = [subprocess.Popen(each, stderr=subprocess.PIPE, text=True) for each in words]
    for process in started:
        _, err = process.communicate(timeout=250)
        assert process.returncode == 0, err
    return [torch.load(folder / f"found-{rank}-2.pt") for rank in range(2)]


@pytest.mark.parametrize("name", ["ffn", "attention"])
def test_two_processes_compute_what_wefts_one_does(name: str, given: dict[str, Any], found: list[Found]) -> None:
    layer, _ = weft_layers()[name]
    x = given["x"].clone().requires_grad_()
    places = torch.arange(TIME)[None]
    mask = [] if name == "ffn" else [AttentionMask(Mask(causal=True), Position(), places, keys=places)]
    z = layer(x, *mask)
    (z * given["upstream"]).sum().backward()
    rename = {"ffn": of_ffn, "attention": of_attention}[name]
    gradients = rename({key: weight.grad for key, weight in layer.named_parameters() if weight.grad is not None})
    for rank in range(2):
        mine = found[rank][name]
        torch.testing.assert_close(mine["z"], z.detach(), rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(mine["x"], x.grad, rtol=1e-5, atol=1e-9)
        assert mine["gradients"].keys() == gradients.keys()
        for key, gradient in mine["gradients"].items():
            expected = megatron.part(f"layer.{key}", gradients[key], rank, 2)
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ["ffn", "attention"])
def test_one_all_reduce_in_each_pass(name: str, found: list[Found]) -> None:
    """And no other collective."""
    for rank in range(2):
        assert found[rank][name]["collectives"] == [["all_reduce"], ["all_reduce"]]
        assert found[rank]["meetings"] == {"forward": 2, "backward": 2}  # of both layers


def test_each_process_holds_half_of_every_matrix() -> None:
    for name, (_, weights) in weft_layers().items():
        for key, weight in weights.items():
            halves = [megatron.part(f"{name}.{key}", weight, rank, 2) for rank in range(2)]
            whole = key == "b"  # what is added to the sum, once
            assert all(half.numel() == weight.numel() // (1 if whole else 2) for half in halves)
            columns = key.split(".")[0] in megatron.COLUMNS
            rejoined = halves[0] if whole else torch.cat(halves, dim=0 if columns else 1)
            assert torch.equal(rejoined, weight)


def test_a_wrong_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("too short")
    for name in ("absent.txt", "short.txt"):
        assert megatron.main([str(tmp_path / name)]) == 2
        out, err = capsys.readouterr()
        assert not out and len(err.splitlines()) == 1 and err.startswith(str(tmp_path / name))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_docstrings_figure() -> None:
    code, out, err = run("megatron")
    assert code == 0, err
    told = parity.numbers(
        r"each reach a loss of ([\d.]+), and one with all of them reaches ([\d.]+)\.", megatron.__doc__
    )
    one, two = (parity.numbers(rf"{name}: [\s\S]*?step 200 loss ([\d.]+)", out)[0] for name in ("process", "processes"))
    assert [two, one] == pytest.approx(told, abs=0.05) and one == pytest.approx(two, abs=0.01)
    assert out.count("2 forward, 2 backward") == 2
