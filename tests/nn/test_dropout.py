"""Dropout follows the row: how rows are shared out, divided or padded changes nothing of what is dropped."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from weft.data.batch import Batch, Source
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.config import Bahdanau, Decoder, Encoder, EncoderDecoder, Recurrent
from weft.models.transformer import Stack
from weft.nn.config import Attention, LayerNorm, Plain
from weft.nn.dropout import Dropout, RowRng, dropped, place_keys, row_keys
from weft.nn.position_config import Relative, Rotary

KEYS = row_keys(12345, torch.arange(64))
RNG = RowRng(KEYS)


def test_the_share_is_right_and_the_mean_stays() -> None:
    x = torch.ones(64, 40, 96)
    for p in (0.1, 0.5, 0.93):
        y = Dropout(p)(x, RNG)
        assert float((y == 0).float().mean()) == pytest.approx(p, abs=5 * (p * (1 - p) / x.numel()) ** 0.5)
        assert float(y.max()) == pytest.approx(1 / (1 - p))
        for axis in range(3):  # no row, time or column is luckier than chance allows
            others = [other for other in range(3) if other != axis]
            kept = (y != 0).float().mean(others)
            assert float(kept.std()) < 1.5 * (p * (1 - p) / (x.numel() / x.shape[axis])) ** 0.5


def test_neighbours_rows_layers_and_steps_are_independent() -> None:
    def lost(rng: RowRng, number: int) -> Tensor:
        part = Dropout(0.5)
        part.number = number
        return (part(torch.ones(64, 32, 64), rng) == 0).float() - 0.5

    one = lost(RNG, 0)
    others = [
        lost(RNG, 1),
        lost(RNG, 2),
        lost(RNG.repeated(1), 0),
        lost(RowRng(row_keys(12346, torch.arange(64))), 0),
        *[one.roll(1, n) for n in range(3)],
    ]
    bound = 4.5 * 0.25 / one.numel() ** 0.5  # of a mean product of independent halves
    for other in others:
        assert abs(float((one * other).mean())) < bound


def test_longer_rows_begin_as_shorter_ones_do() -> None:
    rng = RowRng(KEYS[:4])
    short, long = (Dropout(0.3)(torch.ones(4, 2, *size), rng) for size in ((5, 7), (9, 12)))
    assert torch.equal(short, long[:, :, :5, :7])
    keys = place_keys(rng, 0, torch.Size((4, 2, 3)), (0, 2))  # a strip of it
    assert torch.equal(dropped(torch.ones(4, 2, 3, 6), 0.3, keys, 4), long[:, :, 2:5, 4:10])
    whole = Dropout(0.3)(torch.ones(4, 9, 12), rng)
    assert torch.equal(Dropout(0.3)(torch.ones(4, 3, 12), rng, begin=2), whole[:, 2:5])


def test_outside_a_step_torch_draws_and_evaluation_drops_nothing() -> None:
    torch.manual_seed(0)
    one, two = Dropout(0.5)(torch.ones(3, 4)), Dropout(0.5)(torch.ones(3, 4))
    torch.manual_seed(0)
    assert torch.equal(Dropout(0.5)(torch.ones(3, 4)), one) and not torch.equal(one, two)
    assert torch.equal(Dropout(0.5).eval()(torch.ones(3, 4), RowRng(KEYS[:3])), torch.ones(3, 4))


def test_compiled_it_drops_the_same() -> None:
    part = Dropout(0.4)
    given = torch.randn(6, 5, 16), RowRng(KEYS[:6])
    assert torch.allclose(torch.compile(part, backend="eager")(*given), part(*given))


# ---- whole models


DROP = {"dropout": 0.2}
ATTENTION = Attention(heads=2, dropout=0.2)
FEEDFORWARD = Plain(d_ff=32, dropout=0.1)
SIZES: dict[str, Any] = {"vocab_size": 20, "d_model": 16, "layers": 2}
TRANSFORMER: dict[str, Any] = {**SIZES, **DROP, "attention": ATTENTION, "feedforward": FEEDFORWARD, "norm": LayerNorm()}
MODELS = {
    "decoder": Decoder(**TRANSFORMER, position=Rotary()),
    "relative": Decoder(**TRANSFORMER, position=Relative()),
    "translator": EncoderDecoder(**TRANSFORMER, position=Rotary()),
    "lstm": Recurrent(**SIZES, **DROP, cell="lstm"),
    "sigmoid": Recurrent(**SIZES, **DROP, cell="elman", activation="sigmoid"),
    "bahdanau": Bahdanau(**SIZES, **DROP),
}


SHARED = Encoder(**TRANSFORMER, position=Rotary(), distinct_layers=1)


def example(name: str, documents: bool) -> Batch:
    rng = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 20, (6, 11), generator=rng)
    source = None
    if name in ("translator", "bahdanau"):
        lengths = torch.tensor([[9], [5], [8], [4], [2], [3]])
        source = Source(torch.randint(0, 20, (6, 9), generator=rng), torch.arange(9) < lengths)
    numbers = torch.tensor(np.arange(11) // 4).expand(6, -1) if documents else None
    return Batch(tokens, tokens, documents=numbers, source=source, keys=KEYS[:6])


def gradients(model: LanguageModel, parts: list[Batch]) -> list[Tensor]:
    model.zero_grad()
    for part in parts:
        model.read(part).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def shortened(batch: Batch) -> Batch:
    """The same rows of sources without the padding that none of them needs."""
    if batch.source is None:
        return batch
    longest = int(batch.source.mask.sum(1).max())
    source = Source(batch.source.tokens[:, :longest], batch.source.mask[:, :longest])
    return Batch(batch.tokens, batch.targets, documents=batch.documents, source=source, keys=batch.keys)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_rows_in_parts_give_the_gradient_of_the_whole(name: str, documents: bool) -> None:
    if documents and name in ("translator", "bahdanau"):
        pytest.skip("a translator reads one text a row")
    torch.manual_seed(0)
    model = build(MODELS[name]).double().train()
    assert isinstance(model, LanguageModel)
    batch = example(name, documents)
    whole = gradients(model, [batch])
    for parts in (2, 3):
        divided = gradients(model, [shortened(part) for part in batch.split(parts)])
        for one, other in zip(whole, divided, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-9)
    other_keys = gradients(model, [Batch(batch.tokens, batch.targets, source=batch.source, keys=KEYS[6:12])])
    assert not torch.allclose(other_keys[0], whole[0], rtol=1e-2)  # it does drop


def test_every_dropout_of_a_model_has_a_number_of_its_own() -> None:
    for settings in (*MODELS.values(), SHARED):
        parts = [part for part in build(settings).modules() if isinstance(part, Dropout)]
        assert len({part.number for part in parts}) == len(parts) > 2
    shared = build(SHARED).train()
    batch, seen = example("decoder", False), []
    shared.encoder.blocks[0].attention_skip.dropout.register_forward_hook(lambda _m, _i, y: seen.append(y == 0))
    shared.read(batch)
    assert len(seen) == 2 and not torch.equal(*seen)  # what layers share drops other numbers in each of them


def test_blocks_that_run_again_drop_the_same() -> None:
    torch.manual_seed(0)
    model = build(MODELS["decoder"]).train()
    assert isinstance(model, LanguageModel)
    batch = example("decoder", False)
    plain = gradients(model, [batch])
    for module in model.modules():
        if isinstance(module, Stack):
            module.recompute = True
    for one, other in zip(plain, gradients(model, [batch]), strict=True):
        torch.testing.assert_close(other, one)


def test_strips_of_queries_drop_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = build(MODELS["decoder"]).double().train()
    assert isinstance(model, LanguageModel)
    batch = example("decoder", True)
    plain = gradients(model, [batch])
    monkeypatch.setattr("weft.nn.attention_paths.MAX_DENSE_ENTRIES", 16)
    monkeypatch.setattr("weft.nn.attention_paths.QUERY_BLOCK", 4)
    for one, other in zip(plain, gradients(model, [batch]), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-9)


# ---- on a GPU


@pytest.mark.gpu
def test_a_gpu_drops_what_a_cpu_drops_eager_and_compiled() -> None:
    x, part = torch.randn(6, 5, 33), Dropout(0.4)
    expected = part(x, RowRng(KEYS[:6]))
    for f in (part, torch.compile(part)):
        there = x.cuda().requires_grad_()
        y = f(there, RowRng(KEYS[:6].cuda()))
        y.sum().backward()
        torch.testing.assert_close(y.detach().cpu(), expected)
        assert there.grad is not None
        assert torch.equal(there.grad.cpu() != 0, expected != 0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu_rows_in_parts_give_the_gradient_of_the_whole(name: str) -> None:
    torch.manual_seed(0)
    model = build(MODELS[name]).cuda().train()
    assert isinstance(model, LanguageModel)
    batch = example(name, False).to("cuda")
    whole = gradients(model, [batch])
    for one, other in zip(whole, gradients(model, batch.split(3)), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-2, atol=1e-3)
