"""Context parallelism: the loss and gradients of one process, for every mask, position and dropout."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.later import Later
from tests.parallel.test_layouts import gradient_errors, shard_model
from tests.parallel.test_ranks import in_processes, note, noted
from tests.training.small import CPU, next_token_loss

from weft.data.batch import Batch, restarting_positions
from weft.errors import ConfigError
from weft.layout import Layout
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.config import Decoder, Encoder
from weft.models.presets import preset
from weft.models.stack import Stack
from weft.nn import config, position_config
from weft.nn.attention_paths import fast_attention
from weft.nn.dropout import RowRng, position_keys, row_keys
from weft.nn.mask import AttentionMask, Mask, select_ranges, slice_ranges
from weft.nn.position import Position
from weft.nn.scaled_dot_product import QKV
from weft.objectives.masked import masked_loss
from weft.parallel import mesh
from weft.parallel.context import check_context, shard_rows, token_ranges
from weft.parallel.ranks import Ranks
from weft.training.objective import Loss

debug = Later("torch.distributed.tensor.debug")
VOCAB, ROWS = 37, 4


# ---- models and batches


def _decoder(position: position_config.PositionConfig, window: int | None = None, dropout: float = 0.1) -> Decoder:
    attention = config.Attention(heads=4, kv_heads=2, window=window, dropout=dropout, qk_norm=config.RMSNorm())
    sizes = {"vocab_size": VOCAB, "d_model": 16, "layers": 2, "context": 32, "attention": attention}
    return preset("gpt-tiny").replace(**sizes, position=position, dropout=dropout)


def _encoder() -> Encoder:
    attention = config.Attention(heads=2, dropout=0.1)
    sizes = {"vocab_size": VOCAB, "d_model": 16, "layers": 2, "context": 16, "attention": attention}
    return preset("bert-tiny").replace(**sizes, dropout=0.1)


def _rows(time: int) -> Batch:
    rng = torch.Generator().manual_seed(time)
    tokens, targets = torch.randint(0, VOCAB, (2, ROWS, time), generator=rng)
    return Batch(tokens, targets, keys=row_keys(3, torch.arange(ROWS)))


def _documents(time: int) -> Batch:
    """Return rows of several documents, whose positions restart."""
    rng = torch.Generator().manual_seed(7)
    documents = (torch.rand(ROWS, time, generator=rng) < 0.2).cumsum(1)
    positions = torch.from_numpy(restarting_positions(documents.numpy()))
    counts = torch.rand(ROWS, time, generator=rng) < 0.7
    return replace(_rows(time), documents=documents, positions=positions, loss_mask=counts)


def _masked(time: int) -> Batch:
    """Return rows of different lengths, of two sentences, with a few masked tokens: none for one of the processes."""
    real = torch.arange(time) < torch.tensor([time, time - 2, time // 2, 5])[:, None]
    counts = torch.zeros(ROWS, time, dtype=torch.bool)
    counts[:, 0], counts[0, -1] = True, True
    return replace(_rows(time), mask=real, loss_mask=counts, segments=(torch.arange(time) > 4).long().expand(ROWS, -1))


Case = tuple[dict[str, Any], Any, Batch]
TOKENS = {"context": 2, "tensor": 2, "sequence": True}
CASES: dict[str, Case] = {
    "learned": ({"context": 4}, _decoder(position_config.Learned()), _rows(16)),
    "rotary, documents, window": (TOKENS, _decoder(position_config.Rotary(), window=6), _documents(16)),
    "masked": ({"context": 2, "shard": 2}, _encoder(), _masked(13)),
}
MORE: dict[str, Case] = {
    "learned, replicas": ({"context": 2}, _decoder(position_config.Learned()), _rows(12)),
    "t5": ({"context": 2, "tensor": 2}, _decoder(position_config.T5Bias()), _documents(16)),
    "alibi": ({"context": 4}, _decoder(position_config.ALiBi(), window=5), _documents(8)),
    "relative": ({"context": 2, "tensor": 2}, _decoder(position_config.Relative(max_distance=3)), _rows(16)),
    "sinusoidal, no dropout": ({"context": 4}, _decoder(position_config.Sinusoidal(), dropout=0.0), _rows(24)),
}


def _loss(model: LanguageModel, batch: Batch) -> Loss:
    features = model.read(batch)
    if batch.mask is not None:
        return masked_loss(model, features, batch)
    return next_token_loss(model, features, batch)


# ---- four processes


def _compare(ranks: Ranks, folder: Path, cases: dict[str, Case]) -> None:
    errors = {name: _one_case(ranks, Layout(**sizes), *case) for name, (sizes, *case) in cases.items()}
    note(folder, ranks, **errors)
    ranks.barrier()


def _one_case(ranks: Ranks, layout: Layout, settings: Any, batch: Batch) -> dict[str, Any]:
    torch.manual_seed(0)
    full = build(settings)
    over = mesh.build(layout, ranks, CPU)
    parallel = shard_model(settings, over, full)
    for stack in (module for module in parallel.model.modules() if isinstance(module, Stack)):
        stack.recompute = layout.sequence  # recomputed blocks gather again in the backward pass
    expected, _, extras = _loss(full.train(), batch)
    expected.backward()

    rows = batch.split(over.readers.ranks)[over.readers.rank]
    part = shard_rows(rows, over)
    parallel.model.train()
    # counted in the first case alone: it is slow, and FSDP2 adds other messages
    traffic = debug.CommDebugMode()
    with traffic if layout.context == 4 else nullcontext():
        loss, _, local = parallel.forward(lambda model: _loss(model, part))
        loss.backward()
    parallel.finish_gradients()
    sums = [loss.detach(), local["nll"]]
    over.counters.sum_(sums)
    errors = gradient_errors(parallel, full, relative=False)
    with torch.no_grad():  # whole rows, as in an evaluation, with other weights than those of a pass that failed
        full.eval()
        parallel.model.eval()
        with pytest.raises(SystemExit):
            parallel.with_full_weights(lambda model: sys.exit(str(model.read(rows))))
        parallel.fill((name, parameter.mul_(0.5)) for name, parameter in full.named_parameters())
        features, evaluated = full.read(rows), parallel.with_full_weights(lambda model: model.read(rows))
    counts = {str(kind).rsplit(".", 1)[-1]: count for kind, count in traffic.get_comm_counts().items()}
    return {
        "loss": abs(float(sums[0] - expected.detach())) + abs(float(sums[1] - extras["nll"])),
        "gradients": max([0.0, *errors.values()]),
        "whole rows": float((features - evaluated).abs().max()),
        "sent": [counts.get("all_gather_into_tensor", 0), counts.get("reduce_scatter_tensor", 0)],
        "read": part.read,
        "count": part.count,
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("context")
    assert in_processes(_compare, folder, CASES, count=4) == [0, 0, 0, 0]
    return noted(folder, 4)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(case: str, results: list[dict[str, Any]]) -> None:
    _check([result[case] for result in results], CASES[case])


@pytest.mark.slow
def test_every_position_and_layout(tmp_path: Path) -> None:
    assert in_processes(_compare, tmp_path, MORE, count=4) == [0, 0, 0, 0]
    for name, case in MORE.items():
        _check([result[name] for result in noted(tmp_path, 4)], case)


def _check(results: list[dict[str, Any]], case: Case) -> None:
    sizes, _, batch = case
    for result in results:
        assert result["loss"] < 1e-3, result  # of a sum of a few hundred
        assert result["gradients"] < 1e-5, result
        assert result["whole rows"] < 1e-5
    copies = sizes.get("tensor", 1)
    assert sum(result["read"] for result in results) == copies * batch.read
    assert sum(result["count"] for result in results) == copies * batch.count


@pytest.mark.slow
def test_a_layer_gathers_once_and_sums_once(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["learned"]["sent"] == [2, 2]  # two layers


@pytest.mark.slow
def test_a_process_may_have_no_target(results: list[dict[str, Any]]) -> None:
    assert 0 in [result["masked"]["count"] for result in results]


# ---- one process


def test_token_ranges_cover_the_row_with_equal_work() -> None:
    for ranks in (2, 3, 4):
        length = 2 * ranks * 5
        ranges = [token_ranges(length, rank, ranks) for rank in range(ranks)]
        positions = [[position for part in local for position in part] for local in ranges]
        assert sorted(chain(*positions)) == list(range(length))
        assert len({sum(local) for local in positions}) == 1  # so a causal mask shows equally many keys
        assert ranges[-1] == (range(length // 2 - 5, length // 2 + 5),)  # adjacent ranges are joined


def test_tokens_of_ranges() -> None:
    ranges = range(3, 6), range(10, 14)
    positions = [3, 4, 5, 10, 11, 12, 13]
    for start in range(8):
        for stop in range(start, 8):
            assert [*chain(*slice_ranges(ranges, start, stop))] == positions[start:stop]
    assert select_ranges(torch.arange(20)[None], ranges).tolist() == [positions]
    assert select_ranges(torch.arange(20)[None], ()).tolist() == [list(range(20))]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("limit", [None, "real", "documents"])
def test_a_mask_of_ranges_is_part_of_the_full_mask(causal: bool, window: int | None, limit: str | None) -> None:
    time, ranges = 24, (range(4, 9), range(15, 22))
    documents = (torch.arange(time) // 7).expand(2, -1)
    every: dict[str | None, dict[str, Any]] = {
        None: {},
        "real": {"real": torch.arange(time) < torch.tensor([[time], [17]])},
        "documents": {"documents": (documents, documents)},
    }
    limits = every[limit]
    local = limits | ({"documents": (select_ranges(documents, ranges), documents)} if limit == "documents" else {})
    full = Mask(causal, window, **limits).dense(slice(0, time), slice(0, time), CPU)
    mask = Mask(causal, window, **local, ranges=ranges)
    expected = select_ranges(full[:, 0].expand(-1, time, -1), ranges)[:, None]
    assert torch.equal(mask.dense(slice(0, 12), slice(0, time), CPU).expand_as(expected), expected)
    for start, stop in ((0, 3), (2, 9), (6, 12)):
        keys = mask.key_range(slice(start, stop), time)
        assert not expected[:, :, start:stop, : keys.start].any()
        assert not expected[:, :, start:stop, keys.stop :].any()


def test_dropout_follows_the_positions_of_a_row() -> None:
    ranges, keys = (range(2, 5), range(9, 12)), row_keys(1, torch.arange(2))
    full, part = RowRng(keys), RowRng(keys, ranges)
    rows = position_keys(full, 4, torch.Size((2, 16)))
    heads = position_keys(full, 4, torch.Size((2, 3, 16)), first=(1,))
    assert torch.equal(position_keys(part, 4, torch.Size((2, 6))), select_ranges(rows, ranges))
    second = position_keys(part, 4, torch.Size((2, 3)), first=(2,))
    assert torch.equal(second, rows[:, [4, 9, 10]])  # tokens 2 … 4 of these
    assert torch.equal(position_keys(part, 4, torch.Size((2, 3, 6)), first=(1,)), select_ranges(heads.mT, ranges).mT)
    assert torch.equal(position_keys(part, 4, torch.Size((2,))), position_keys(full, 4, torch.Size((2,))))


def _mesh(rank: int, **sizes: Any) -> mesh.Mesh:
    layout = Layout(replicate=1, **sizes)
    return mesh.Mesh(layout, context=Ranks(rank, layout.context))


def test_a_batch_is_divided() -> None:
    batch = _documents(12)
    one, two = (shard_rows(batch, _mesh(rank, context=2)) for rank in range(2))
    assert one.ranges == (range(3), range(9, 12)) and two.ranges == (range(3, 9),)
    for name in ("tokens", "targets", "loss_mask"):
        first, second = getattr(one, name), getattr(two, name)
        assert torch.equal(torch.cat([first[:, :3], second, first[:, 3:]], 1), getattr(batch, name))
    for name in ("documents", "positions"):
        assert torch.equal(getattr(one, name), getattr(batch, name))
    assert one.count + two.count == batch.count
    assert shard_rows(batch, mesh.SINGLE) is batch


def test_rows_with_a_mask_are_padded() -> None:
    batch = _masked(13)
    parts = [shard_rows(batch, _mesh(rank, context=2)) for rank in range(2)]
    for part in parts:
        assert part.segments is not None and part.mask is not None and part.positions is not None
        assert part.tokens.shape == part.targets.shape == part.segments.shape == (ROWS, 8)
        assert part.mask.shape == (ROWS, 16) and not part.mask[:, 13:].any()
        assert part.positions.tolist() == [list(range(16))]
    assert sum(part.read for part in parts) == batch.read
    assert sum(part.count for part in parts) == batch.count
    everywhere = shard_rows(replace(batch, loss_mask=None), _mesh(0, context=2))
    assert everywhere.count == ROWS * 5  # its 3 positions of padding do not count


def test_indivisible_rows_are_refused() -> None:
    gpt, bert = preset("gpt-tiny"), preset("bert-tiny")
    layout = Layout(context=4)
    check_context(layout, gpt, "next-token", length=64)
    check_context(layout, bert, "masked", length=64)
    check_context(Layout(), preset("vaswani-tiny"), "pairs", length=7)
    refused: list[tuple[Layout, Any, str, int, str]] = [
        (layout, preset("vaswani-tiny"), "pairs", 64, "the rows of a 'encoder-decoder' model"),
        (layout, bert, "classify", 64, "objective 'classify' looks at whole rows"),
        (layout, bert, "masked+next", 64, "objective 'masked+next' looks at whole rows"),
        (layout, gpt, "next-token", 60, "batch.length = 60: with parallel.context = 4 rows need a multiple of 8"),
        (layout, gpt, "next-token", 60, "choose 56 or 64"),
        (layout, gpt, "next-token", 5, "choose 8"),
        (Layout(context=2, tensor=3, sequence=True), gpt, "next-token", 16, "a multiple of 12 tokens; choose 12 or 24"),
    ]  # fmt: skip
    for sizes, model, objective, length, line in refused:
        with pytest.raises(ConfigError) as error:
            check_context(sizes, model, objective, length=length)
        assert line in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"batch\.length = 10: with parallel\.context = 2"):
        shard_rows(_rows(10), _mesh(0, context=2))


# ---- a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("limit", ["causal", "window", "documents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_see_whole_rows(limit: str, dtype: torch.dtype) -> None:
    """Queries of ranges give the outputs of the whole row, and the gradients of the parts add up."""
    rows, time, ranks = 2, 2048, 2
    documents = (torch.rand(rows, time, device="cuda") < 0.002).cumsum(1)
    inputs = [torch.randn(rows, heads, time, 64, device="cuda", dtype=dtype) for heads in (4, 2, 2)]
    upstream = torch.randn_like(inputs[0])
    positions = torch.arange(time, device="cuda")[None]

    def passes(dtype: torch.dtype, parts: list[Any]) -> list[torch.Tensor]:
        q, k, v = (tensor.clone().to(dtype).requires_grad_() for tensor in inputs)
        outs = torch.empty_like(q)
        for ranges in parts:
            apart: dict[str, Any] = {}
            if limit == "documents":
                apart = {"documents": (select_ranges(documents, ranges), documents)}
            mask = Mask(causal=True, window=300 if limit == "window" else None, **apart, ranges=ranges)
            attention_mask = AttentionMask(mask, Position(), select_ranges(positions, ranges), keys=positions)
            local = QKV(select_ranges(q.transpose(1, 2), ranges).transpose(1, 2), k, v)
            out = fast_attention(local, 0.125, attention_mask)
            out.backward(select_ranges(upstream.to(dtype).transpose(1, 2), ranges).transpose(1, 2))
            tokens = torch.cat([torch.arange(part.start, part.stop) for part in ranges or (range(time),)])
            outs.data[:, :, tokens] = out.detach()
        return [outs.detach(), *(tensor.grad for tensor in (q, k, v) if tensor.grad is not None)]

    exact = passes(torch.float32, [()])
    ours = passes(dtype, [token_ranges(time, rank, ranks) for rank in range(ranks)])
    assert len(exact) == len(ours) == 4
    for tensor, expected in zip(ours, exact, strict=True):
        assert (tensor.float() - expected).norm() <= (0.01 if dtype == torch.bfloat16 else 1e-3) * expected.norm()
