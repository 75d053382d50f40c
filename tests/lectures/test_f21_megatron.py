"""F21: splitting A by columns and B by rows needs one all-reduce; A by rows needs one before the nonlinearity.

python -m pytest tests/lectures/test_f21_megatron.py
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.later import Later
from torch import distributed

from weft.cli.main import run
from weft.errors import ModelError

parallel, ranks = Later("weft.explain.parallel.parallel"), Later("weft.explain.parallel.ranks")

TOKENS, D_MODEL, D_FF = 6, 16, 48
MEGATRON = ("columns", "rows")
Capture = pytest.CaptureFixture[str]


def sizes() -> Any:
    return parallel.BlockSizes(d_model=D_MODEL, d_ff=D_FF, heads=2, tokens=TOKENS)


@pytest.fixture(scope="module")
def blocks() -> list[Any]:
    return parallel.measure(sizes(), 2)


def split(block: Any, *way: str, sequence: bool = False) -> Any:
    return next(each for each in block.splits if each.scheme == parallel.SplitScheme(*way, sequence=sequence))


def kinds(places: tuple[tuple[Any, ...], ...]) -> list[str]:
    """Collectives before A, before f, before B, and at the end."""
    return [" ".join(each.kind for each in place) for place in places]


def test_columns_then_rows_need_one_all_reduce(blocks: list[Any]) -> None:
    for block in blocks:
        best = block.splits[0]
        assert best.scheme == parallel.SplitScheme(*MEGATRON)
        assert kinds(best.forward) == ["", "", "", "all-reduce"]
        assert kinds(best.backward) == ["all-reduce", "", "", ""]


@pytest.mark.slow
def test_dropout_follows_the_sum(blocks: list[Any]) -> None:
    """Every split reproduces the unsplit block with one dropout mask, and needs no further collective for it."""
    assert parallel.DROPOUT > 0
    assert all(max(split.differences) < 1e-13 for block in blocks for split in block.splits)
    picture = Later("weft.explain.parallel.picture").parallel_splits(sizes(), 2)
    assert "Z = Dropout(YB)" in picture.sections()[0].about


def test_rows_first_need_one_before_the_nonlinearity(blocks: list[Any]) -> None:
    for block in blocks:
        assert kinds(split(block, "rows", "columns").forward) == ["", "all-reduce", "", "all-gather"]
        assert kinds(split(block, "rows", "rows").forward) == ["", "reduce-scatter", "", "all-reduce"]
        assert block.partial_sum_error > 0.05  # f of the parts is no part of f of the sum


def test_sequence_parallelism_sends_as_much_in_two_halves(blocks: list[Any]) -> None:
    for block in blocks:
        plain, sequence = split(block, *MEGATRON), split(block, *MEGATRON, sequence=True)
        assert kinds(sequence.forward) == ["all-gather", "", "", "reduce-scatter"]
        assert kinds(sequence.backward) == ["reduce-scatter", "", "", "all-gather"]
        assert sequence.sent(2) == plain.sent(2)
        assert plain.activations - sequence.activations == TOKENS * D_MODEL / 2  # the norm's input
        assert not plain.deferred and kinds((sequence.deferred,)) == ["all-reduce all-reduce all-reduce"]


def test_every_split_computes_the_same(blocks: list[Any]) -> None:
    for block in blocks:
        assert len({each.scheme for each in block.splits}) == 9
        assert max(max(each.differences) for each in block.splits) < 1e-12


def test_traffic_flops_and_weights_of_a_process(blocks: list[Any]) -> None:
    """2(n − 1)/n of the result is sent, three products are computed for each matrix, half of every matrix is held."""
    tokens, d_model, d_ff = TOKENS, D_MODEL, D_FF
    mlp, attention = (split(block, *MEGATRON) for block in blocks)
    assert mlp.sent(2) == attention.sent(2) == (tokens * d_model, tokens * d_model)
    assert mlp.flops == 3 * 2 * (2 * tokens * d_model * d_ff) / 2
    scores = 2 * 2 * tokens * tokens * d_model
    assert attention.flops == 3 * (2 * tokens * d_model * 4 * d_model + scores) / 2
    assert mlp.weights == d_model * d_ff + d_ff // 2 + 3 * d_model  # norm and last bias are replicated
    whole = blocks[0].splits[-1]
    assert whole.scheme == parallel.SplitScheme(None, None) and whole.flops == 2 * mlp.flops and whole.sent(2) == (0, 0)
    assert whole.weights == 2 * d_model * d_ff + d_ff + 3 * d_model
    rows_first = split(blocks[0], "rows", "columns")
    assert rows_first.sent(2)[0] == tokens * d_ff + tokens * d_model / 2  # an all-reduce, d_ff wide, and an all-gather


@pytest.mark.parametrize(
    ("kind", "sent"), [("all-reduce", 150), ("all-gather", 300), ("reduce-scatter", 75), ("all-to-all", 75)]
)
def test_a_ring_of_four(kind: str, sent: float) -> None:
    assert ranks.Collective(kind, 100).sent(4) == sent


@pytest.mark.slow
def test_the_command(blocks: list[Any], capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = mock.Mock(return_value=blocks)
    monkeypatch.setattr("weft.explain.parallel.picture.measure", measure)
    words = ["explain", "parallel", "d_model=16", "d_ff=48", "heads=2", "tokens=6"]
    assert run(words) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines.count(["columns", "→", "rows", "all-reduce", "all-reduce"]) == 2
    assert run([*words, "--ranks", "2", "--out", str(tmp_path / "page.html")]) == 0
    assert measure.mock_calls == [mock.call(sizes(), 2)] * 2
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 18 and "&lt;svg" not in page and "1. QKV by columns, O by rows (Megatron)" in page
    passes = [places for block in blocks for each in block.splits for places in (each.forward, each.backward)]
    assert page.count(">reduce-scatter</text>") == sum(kinds(places).count("reduce-scatter") for places in passes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "--ranks 0: a matrix is split over at least 2 processes"),
        (["--ranks", "8"], "--ranks 8: heads=4 isn't a multiple of 8; these sizes can be split over 2 or 4"),
        (["--ranks", "4", "d_ff=510"], "--ranks 4: d_ff=510 isn't a multiple of 4; these sizes can be split over 2"),
        (["heads=3"], "heads=3: they don't divide d_model=128"),
        (["d_modle=64"], "did you mean 'd_model'?"),
        (["--only", "costs"], "--only: not an option of weft explain parallel"),
        (["--shapes"], "--shapes: not an option of weft explain parallel"),
        (["--out", "a.dot"], "a.dot: expected a file name ending in .html, .svg, .png or .pdf"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["explain", "parallel", *words]) == 2
    out, err = capsys.readouterr()
    assert not out and message in err and len(err.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_ranks_belong_to_parallel_alone(capsys: Capture) -> None:
    assert run(["explain", "gpt2", "--ranks", "2"]) == 2
    assert "--ranks 2: only for weft explain parallel" in capsys.readouterr().err


def test_an_existing_process_group_is_left_alone(tmp_path: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with pytest.raises(ModelError, match="without torchrun"), ranks.simulated(2):
            pass
        assert distributed.is_initialized()
    finally:
        distributed.destroy_process_group()


def test_nothing_is_left_behind(blocks: list[Any]) -> None:
    assert not distributed.is_initialized()
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), ranks.simulated(2):
        raise RuntimeError
    assert not distributed.is_initialized() and torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_four_processes() -> None:
    for block in parallel.measure(parallel.BlockSizes(), 4):
        best, whole = block.splits[0], block.splits[-1]
        assert best.scheme == parallel.SplitScheme(*MEGATRON) and best.flops * 4 == whole.flops
        assert max(max(each.differences) for each in block.splits) < 1e-12
