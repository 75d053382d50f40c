"""Rows divided over processes: the same loss and gradients as one process's, for every mask, position and dropout."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.later import Later
from tests.parallel.test_ranks import note, noted, together

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
from weft.nn.init import empty_weights
from weft.nn.mask import AttentionMask, Mask, select_ranges, slice_ranges
from weft.nn.position import Position
from weft.nn.scaled_dot_product import QKV
from weft.objectives.masked import masked_loss
from weft.objectives.tokens import token_loss
from weft.parallel import mesh
from weft.parallel.context import check_context, divided, ranges_of
from weft.parallel.ranks import Ranks
from weft.recipe.objective import NextToken
from weft.training.objective import Loss

apply, debug = Later("weft.parallel.apply"), Later("torch.distributed.tensor.debug")
WORDS, ROWS = 37, 4


# ---- models and batches


def _decoder(position: position_config.PositionConfig, window: int | None = None, dropout: float = 0.1) -> Decoder:
    attention = config.Attention(heads=4, kv_heads=2, window=window, dropout=dropout, qk_norm=config.RMSNorm())
    sizes = {"vocab_size": WORDS, "d_model": 16, "layers": 2, "context": 32, "attention": attention}
    return preset("gpt-tiny").replace(**sizes, position=position, dropout=dropout)


def _encoder() -> Encoder:
    attention = config.Attention(heads=2, dropout=0.1)
    sizes = {"vocab_size": WORDS, "d_model": 16, "layers": 2, "context": 16, "attention": attention}
    return preset("bert-tiny").replace(**sizes, dropout=0.1)


def _rows(time: int) -> Batch:
    rng = torch.Generator().manual_seed(time)
    tokens, targets = torch.randint(0, WORDS, (2, ROWS, time), generator=rng)
    return Batch(tokens, targets, keys=row_keys(3, torch.arange(ROWS)))


def _documents(time: int) -> Batch:
    """Rows of several documents each, whose positions begin again."""
    rng = torch.Generator().manual_seed(7)
    documents = (torch.rand(ROWS, time, generator=rng) < 0.2).cumsum(1)
    positions = torch.from_numpy(restarting_positions(documents.numpy()))
    counts = torch.rand(ROWS, time, generator=rng) < 0.7
    return replace(_rows(time), documents=documents, positions=positions, loss_mask=counts)


def _masked(time: int) -> Batch:
    """Rows of different lengths, two sentences each, a few words of which are masked: none where one process reads."""
    real = torch.arange(time) < torch.tensor([time, time - 2, time // 2, 5])[:, None]
    counts = torch.zeros(ROWS, time, dtype=torch.bool)
    counts[:, 0], counts[0, -1] = True, True
    return replace(_rows(time), mask=real, loss_mask=counts, segments=(torch.arange(time) > 4).long().expand(ROWS, -1))


Case = tuple[dict[str, Any], Any, Batch]
CASES: dict[str, Case] = {
    "learned": ({"context": 4}, _decoder(position_config.Learned()), _rows(16)),
    "rotary, documents, window": (
        {"context": 2, "tensor": 2, "sequence": True},
        _decoder(position_config.Rotary(), window=6),
        _documents(16),
    ),
    "masked words": ({"context": 2, "shard": 2}, _encoder(), _masked(13)),
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
    return token_loss(NextToken(), model, features, batch)


# ---- four processes


def _compare(ranks: Ranks, folder: Path, cases: dict[str, Case]) -> None:
    found = {}
    for name, (sizes, settings, batch) in cases.items():
        found[name] = _one_case(ranks, Layout(**sizes), settings, batch)
    note(folder, ranks, **found)
    ranks.wait()


def _one_case(ranks: Ranks, layout: Layout, settings: Any, batch: Batch) -> dict[str, Any]:
    torch.manual_seed(0)
    whole = build(settings)
    here = mesh.build(layout, ranks, torch.device("cpu"))
    with empty_weights():
        model = build(settings)
    spread = apply.lay_out(model, here, "fp32", False)
    spread.root.to_empty(device="cpu")
    spread.fill(whole.named_parameters())
    for stack in (module for module in model.modules() if isinstance(module, Stack)):
        stack.recompute = layout.sequence  # blocks that run again in the backward pass gather again
    expected, _, extras = _loss(whole.train(), batch)
    expected.backward()

    own = batch.split(here.readers.ranks)[here.readers.rank]
    part = divided(own, here)
    model.train()
    # it takes time, and what is sent beside FSDP2's traffic is plain in the first case alone
    traffic = debug.CommDebugMode()
    with traffic if layout.context == 4 else nullcontext():
        loss, _, mine = spread.forward(lambda model: _loss(model, part))
        loss.backward()
    spread.collect()
    sums = [loss.detach(), mine["nll"]]
    here.counters.sum_(sums)
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    apart = [0.0]
    for name, local in spread.local.items():
        for piece in spread.geometries[name].pieces if local.grad is not None else ():
            apart.append(float((piece.of(local.grad) - piece.cut(gradients[name])).abs().max()))
    with torch.no_grad():  # whole rows, as an evaluation reads them, with other weights than one that was broken off
        whole.eval()
        model.eval()
        with pytest.raises(SystemExit):
            spread.within(lambda model: sys.exit(str(model.read(own))))
        spread.fill((name, parameter.mul_(0.5)) for name, parameter in whole.named_parameters())
        features, seen = whole.read(own), spread.within(lambda model: model.read(own))
    counts = {str(kind).rsplit(".", 1)[-1]: count for kind, count in traffic.get_comm_counts().items()}
    return {
        "loss": abs(float(sums[0] - expected.detach())) + abs(float(sums[1] - extras["nll"])),
        "gradients": max(apart),
        "missing": [name for name, local in spread.local.items()
                    if local.numel() and (local.grad is None) != (gradients[name] is None)],
        "whole rows": float((features - seen).abs().max()),
        "sent": [counts.get("all_gather_into_tensor", 0), counts.get("reduce_scatter_tensor", 0)],
        "read": part.read,
        "count": part.count,
    }  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("context")
    assert together(_compare, folder, CASES, count=4) == [0, 0, 0, 0]
    return noted(folder, 4)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(case: str, results: list[dict[str, Any]]) -> None:
    _same([found[case] for found in results], *CASES[case])


@pytest.mark.slow
def test_every_position_and_layout(tmp_path: Path) -> None:
    assert together(_compare, tmp_path, MORE, count=4) == [0, 0, 0, 0]
    for name, case in MORE.items():
        _same([found[name] for found in noted(tmp_path, 4)], *case)


def _same(ours: list[dict[str, Any]], sizes: dict[str, Any], settings: Any, batch: Batch) -> None:
    for one in ours:
        assert one["loss"] < 1e-3, one  # of a sum of a few hundred
        assert one["gradients"] < 1e-5, one
        assert one["missing"] == []
        assert one["whole rows"] < 1e-5
    copies = sizes.get("tensor", 1)
    assert sum(one["read"] for one in ours) == copies * batch.read
    assert sum(one["count"] for one in ours) == copies * batch.count


def test_a_layer_gathers_once_and_sums_once(results: list[dict[str, Any]]) -> None:
    for one in results:
        assert one["learned"]["sent"] == [2, 2]  # two layers


def test_a_process_may_have_no_target(results: list[dict[str, Any]]) -> None:
    assert 0 in [one["masked words"]["count"] for one in results]


# ---- one process


def test_parts_make_up_the_row_and_work_is_even() -> None:
    for ranks in (2, 3, 4):
        length = 2 * ranks * 5
        runs = [ranges_of(length, rank, ranks) for rank in range(ranks)]
        assert sorted(place for own in runs for run in own for place in run) == list(range(length))
        work = {sum(place + 1 for run in own for place in run) for own in runs}  # keys that a causal mask shows
        assert len(work) == 1
        assert runs[-1] == (range(length // 2 - 5, length // 2 + 5),)  # what touches is one run


def test_tokens_of_runs() -> None:
    runs = range(3, 6), range(10, 14)
    places = [3, 4, 5, 10, 11, 12, 13]
    for start in range(8):
        for stop in range(start, 8):
            assert [place for run in slice_ranges(runs, start, stop) for place in run] == places[start:stop]
    assert select_ranges(torch.arange(20)[None], runs).tolist() == [places]
    assert select_ranges(torch.arange(20)[None], ()).tolist() == [list(range(20))]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("limit", [None, "real", "documents"])
def test_a_mask_of_runs_is_a_part_of_the_whole(causal: bool, window: int | None, limit: str | None) -> None:
    time, runs = 24, (range(4, 9), range(15, 22))
    documents = (torch.arange(time) // 7).expand(2, -1)
    rest: dict[str, Any] = {
        None: {},
        "real": {"real": torch.arange(time) < torch.tensor([[time], [17]])},
        "documents": {"documents": (documents, documents)},
    }[limit]
    here = rest | ({"documents": (select_ranges(documents, runs), documents)} if limit == "documents" else {})
    whole = Mask(causal, window, **rest).dense(slice(0, time), slice(0, time), torch.device("cpu"))
    mask = Mask(causal, window, **here, ranges=runs)
    expected = select_ranges(whole[:, 0].expand(-1, time, -1), runs)[:, None]
    found = mask.dense(slice(0, 12), slice(0, time), torch.device("cpu"))
    assert torch.equal(found.expand_as(expected), expected)
    for start, stop in ((0, 3), (2, 9), (6, 12)):
        keys = mask.key_range(slice(start, stop), time)
        assert not expected[:, :, start:stop, : keys.start].any()
        assert not expected[:, :, start:stop, keys.stop :].any()


def test_dropout_follows_the_places_of_a_row() -> None:
    runs, keys = (range(2, 5), range(9, 12)), row_keys(1, torch.arange(2))
    whole, part = RowRng(keys), RowRng(keys, runs)
    rows = position_keys(whole, 4, torch.Size((2, 16)))
    heads = position_keys(whole, 4, torch.Size((2, 3, 16)), first=(1,))
    some = position_keys(part, 4, torch.Size((2, 6)))
    later = position_keys(part, 4, torch.Size((2, 3)), first=(2,))  # tokens 2 … 4 of these
    some_heads = position_keys(part, 4, torch.Size((2, 3, 6)), first=(1,))
    alike = position_keys(part, 4, torch.Size((2,)))
    assert torch.equal(some, select_ranges(rows, runs))
    assert torch.equal(later, rows[:, [4, 9, 10]])
    assert torch.equal(some_heads, select_ranges(heads.mT, runs).mT)
    assert torch.equal(alike, position_keys(whole, 4, torch.Size((2,))))


def _mesh(rank: int, **sizes: Any) -> mesh.Mesh:
    layout = Layout(replicate=1, **sizes)
    return mesh.Mesh(layout, context=Ranks(rank, layout.context))


def test_a_batch_is_divided() -> None:
    batch = _documents(12)
    one, two = (divided(batch, _mesh(rank, context=2)) for rank in range(2))
    assert one.ranges == (range(3), range(9, 12)) and two.ranges == (range(3, 9),)
    for name in ("tokens", "targets", "loss_mask"):
        first, second = getattr(one, name), getattr(two, name)
        assert torch.equal(torch.cat([first[:, :3], second, first[:, 3:]], 1), getattr(batch, name))
    assert torch.equal(one.documents, batch.documents) and torch.equal(one.positions, batch.positions)
    assert one.count + two.count == batch.count
    assert divided(batch, mesh.SINGLE) is batch


def test_rows_with_a_mask_are_padded() -> None:
    batch = _masked(13)
    parts = [divided(batch, _mesh(rank, context=2)) for rank in range(2)]
    for part in parts:
        assert part.tokens.shape == part.targets.shape == part.segments.shape == (ROWS, 8)
        assert part.mask.shape == (ROWS, 16) and not part.mask[:, 13:].any()
        assert part.positions.tolist() == [list(range(16))]
    assert sum(part.read for part in parts) == batch.read
    assert sum(part.count for part in parts) == batch.count
    everywhere = divided(replace(batch, loss_mask=None), _mesh(0, context=2))
    assert everywhere.count == ROWS * 5  # 3 of its places are padding now: they count for nothing


def test_what_cannot_be_divided_is_refused() -> None:
    gpt, bert = preset("gpt-tiny"), preset("bert-tiny")
    layout = Layout(context=4)
    check_context(layout, gpt, "next-token", 64)
    check_context(layout, bert, "masked", 64)
    check_context(Layout(), preset("vaswani-tiny"), "pairs", 7)
    refused = [
        (layout, preset("vaswani-tiny"), "pairs", 64, "the rows of a 'encoder-decoder' model"),
        (layout, bert, "classify", 64, "objective 'classify' looks at whole rows"),
        (layout, bert, "masked+next", 64, "objective 'masked+next' looks at whole rows"),
        (layout, gpt, "next-token", 60, "batch.length = 60: with parallel.context = 4 rows need a multiple of 8"),
        (layout, gpt, "next-token", 60, "choose 56 or 64"),
        (layout, gpt, "next-token", 5, "choose 8"),
        (Layout(context=2, tensor=3, sequence=True), gpt, "next-token", 16, "a multiple of 12 tokens; choose 12 or 24"),
    ]  # fmt: skip
    for *given, line in refused:
        with pytest.raises(ConfigError) as error:
            check_context(*given)
        assert line in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"batch\.length = 10: with parallel\.context = 2"):
        divided(_rows(10), _mesh(0, context=2))


# ---- a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("limit", ["causal", "window", "documents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_see_whole_rows(limit: str, dtype: torch.dtype) -> None:
    """Queries of some runs give what those of the whole row give, and the parts' gradients add up."""
    rows, time, ranks = 2, 2048, 2
    documents = (torch.rand(rows, time, device="cuda") < 0.002).cumsum(1)
    given = [torch.randn(rows, heads, time, 64, device="cuda", dtype=dtype) for heads in (4, 2, 2)]
    upstream = torch.randn_like(given[0])
    positions = torch.arange(time, device="cuda")[None]

    def passes(dtype: torch.dtype, parts: list[Any]) -> list[torch.Tensor]:
        q, k, v = (tensor.clone().to(dtype).requires_grad_() for tensor in given)
        outs = torch.empty_like(q)
        for runs in parts:
            there = {"documents": (select_ranges(documents, runs), documents)} if limit == "documents" else {}
            mask = Mask(causal=True, window=300 if limit == "window" else None, **there, ranges=runs)
            where = AttentionMask(mask, Position(), select_ranges(positions, runs), keys=positions)
            mine = QKV(select_ranges(q.transpose(1, 2), runs).transpose(1, 2), k, v)
            out = fast_attention(mine, 0.125, where)
            out.backward(select_ranges(upstream.to(dtype).transpose(1, 2), runs).transpose(1, 2))
            places = torch.cat([torch.arange(run.start, run.stop) for run in runs or (range(time),)])
            outs.data[:, :, places] = out.detach()
        return [outs.detach(), *(tensor.grad for tensor in (q, k, v) if tensor.grad is not None)]

    exact = passes(torch.float32, [()])
    found = passes(dtype, [ranges_of(time, rank, ranks) for rank in range(ranks)])
    assert len(exact) == len(found) == 4
    for ours, expected in zip(found, exact, strict=True):
        assert (ours.float() - expected).norm() <= (0.01 if dtype == torch.bfloat16 else 1e-3) * expected.norm()
