"""Dropout depends on the row: dividing, splitting or padding a batch does not change what is dropped."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.spread import spread
from torch import Tensor

from weft.data.batch import Batch, Source
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.config import Bahdanau, Bengio, Decoder, Encoder, EncoderDecoder, Model, Recurrent
from weft.models.stack import Stack
from weft.nn.config import Attention, LayerNorm, Plain
from weft.nn.dropout import Dropout, RowRng, drop_values, position_keys, row_keys
from weft.nn.position_config import Relative, Rotary

KEYS = row_keys(12345, torch.arange(64))
RNG = RowRng(KEYS)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_the_fraction_is_right_and_the_mean_is_preserved(p: float) -> None:
    x = torch.ones(64, 40, 96)
    y = Dropout(p)(x, RNG)
    assert float((y == 0).float().mean()) == pytest.approx(p, abs=5 * (p * (1 - p) / x.numel()) ** 0.5)
    assert float(y.max()) == pytest.approx(1 / (1 - p))
    for axis in range(3):  # the fraction varies between rows, times and columns by chance only
        others = [other for other in range(3) if other != axis]
        kept = (y != 0).float().mean(others)
        assert float(kept.std()) < 1.5 * (p * (1 - p) / (x.numel() / x.shape[axis])) ** 0.5


def test_neighbours_rows_layers_and_steps_are_independent() -> None:
    def dropped(rng: RowRng, number: int) -> Tensor:
        part = Dropout(0.5)
        part.number = number
        return (part(torch.ones(64, 32, 64), rng) == 0).float() - 0.5

    one = dropped(RNG, 0)
    others = [dropped(RNG, 1), dropped(RNG, 2), dropped(RNG.for_repeat(1), 0)]
    others += [dropped(RowRng(row_keys(12346, torch.arange(64))), 0), *(one.roll(1, n) for n in range(3))]
    bound = 4.5 * 0.25 / one.numel() ** 0.5  # of the mean product of independent ±½
    for other in others:
        assert abs(float((one * other).mean())) < bound


def test_longer_rows_begin_like_shorter_ones() -> None:
    rng = RowRng(KEYS[:4])
    short, long = (Dropout(0.3)(torch.ones(4, 2, *size), rng) for size in ((5, 7), (9, 12)))
    assert torch.equal(short, long[:, :, :5, :7])
    keys = position_keys(rng, 0, torch.Size((4, 2, 3)), first=(0, 2))
    assert torch.equal(drop_values(torch.ones(4, 2, 3, 6), 0.3, keys, first=4), long[:, :, 2:5, 4:10])
    whole = Dropout(0.3)(torch.ones(4, 9, 12), rng)
    assert torch.equal(Dropout(0.3)(torch.ones(4, 3, 12), rng, begin=2), whole[:, 2:5])


def test_without_keys_torch_draws_and_evaluation_drops_nothing() -> None:
    torch.manual_seed(0)
    one, two = Dropout(0.5)(torch.ones(3, 4)), Dropout(0.5)(torch.ones(3, 4))
    torch.manual_seed(0)
    assert torch.equal(Dropout(0.5)(torch.ones(3, 4)), one) and not torch.equal(one, two)
    assert torch.equal(Dropout(0.5).eval()(torch.ones(3, 4), RowRng(KEYS[:3])), torch.ones(3, 4))


@pytest.mark.slow
def test_compiled_code_drops_the_same() -> None:
    part, inputs = Dropout(0.4), (torch.randn(6, 5, 16), RowRng(KEYS[:6]))
    assert torch.allclose(torch.compile(part, backend="eager")(*inputs), part(*inputs))


# ---- whole models

SIZES: dict[str, Any] = {"vocab_size": 20, "d_model": 16, "layers": 2, "dropout": 0.2}
PARTS = {"attention": Attention(heads=2, dropout=0.2), "feedforward": Plain(d_ff=32, dropout=0.1), "norm": LayerNorm()}
TRANSFORMER: dict[str, Any] = SIZES | PARTS
MODELS: dict[str, Model] = {
    "decoder": Decoder(**TRANSFORMER, position=Rotary()),
    "relative": Decoder(**TRANSFORMER, position=Relative()),
    "translator": EncoderDecoder(**TRANSFORMER, position=Rotary()),
    "lstm": Recurrent(**SIZES, cell="lstm"),
    "bengio": Bengio(vocab_size=20, d_model=16, dropout=0.2),
    "sigmoid": Recurrent(**SIZES, cell="elman", activation="sigmoid"),
    "bahdanau": Bahdanau(**SIZES),
}
WITH_SOURCE = ("translator", "bahdanau")
SHARED = Encoder(**TRANSFORMER, position=Rotary(), distinct_layers=1)


def example(name: str, documents: bool = False) -> tuple[LanguageModel, Batch]:
    torch.manual_seed(0)
    model = build(MODELS[name]).train()
    rng = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 20, (6, 11), generator=rng)
    source = None
    if name in WITH_SOURCE:
        lengths = torch.tensor([[9], [5], [8], [4], [2], [3]])
        source = Source(torch.randint(0, 20, (6, 9), generator=rng), torch.arange(9) < lengths)
    ids = (torch.arange(11) // 4).expand(6, -1) if documents else None
    return model, Batch(tokens, tokens, documents=ids, source=source, keys=KEYS[:6])


def gradients(model: LanguageModel, batches: list[Batch]) -> list[Tensor]:
    model.zero_grad()
    for batch in batches:
        model.read(batch).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def without_padding(batch: Batch) -> Batch:
    """Drop the columns of the source that are padding in all rows."""
    if batch.source is None:
        return batch
    longest = int(batch.source.mask.sum(1).max())
    return replace(batch, source=Source(batch.source.tokens[:, :longest], batch.source.mask[:, :longest]))


BOTH = [*((name, False) for name in MODELS), *((name, True) for name in MODELS if name not in WITH_SOURCE)]


@pytest.mark.parametrize(("name", "documents"), spread(BOTH, 6))
def test_micro_batches_give_the_gradient_of_the_whole(name: str, documents: bool) -> None:
    model, batch = example(name, documents)
    model.double()
    whole = gradients(model, [batch])
    for parts in (2, 3):
        divided = gradients(model, [without_padding(part) for part in batch.split(parts)])
        torch.testing.assert_close(divided, whole, rtol=1e-9, atol=1e-9)
    other_keys = gradients(model, [Batch(batch.tokens, batch.targets, source=batch.source, keys=KEYS[6:12])])
    assert not torch.allclose(other_keys[0], whole[0], rtol=1e-2)  # it does drop


def test_every_dropout_of_a_model_has_a_distinct_number() -> None:
    for settings in (*MODELS.values(), SHARED):
        parts = [part for part in build(settings).modules() if isinstance(part, Dropout) and part.p]
        assert len({part.number for part in parts}) == len(parts) > 1
    shared, dropped = build(SHARED).train(), []
    skip = shared.get_submodule("encoder.blocks.0.attention_skip.dropout")
    skip.register_forward_hook(lambda _module, _inputs, y: dropped.append(y == 0))
    shared.read(example("decoder")[1])
    assert len(dropped) == 2 and not torch.equal(*dropped)  # layers that share a block drop different elements


def test_recomputed_blocks_and_blocks_of_queries_drop_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = example("decoder", documents=True)
    plain, stack = gradients(model.double(), [batch]), model.get_submodule("decoder")
    assert isinstance(stack, Stack)
    stack.recompute = True
    torch.testing.assert_close(gradients(model, [batch]), plain, rtol=1e-9, atol=1e-9)
    stack.recompute = False
    monkeypatch.setattr("weft.nn.attention_paths.MAX_DENSE_ENTRIES", 16)
    monkeypatch.setattr("weft.nn.attention_paths.QUERY_BLOCK", 4)
    torch.testing.assert_close(gradients(model, [batch]), plain, rtol=1e-9, atol=1e-9)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_drops_what_a_cpu_drops(compiled: bool) -> None:
    x, part = torch.randn(6, 5, 33), Dropout(0.4)
    expected = part(x, RowRng(KEYS[:6]))
    on_gpu = x.cuda().requires_grad_()
    y = (torch.compile(part) if compiled else part)(on_gpu, RowRng(KEYS[:6].cuda()))
    y.sum().backward()
    torch.testing.assert_close(y.detach().cpu(), expected)
    assert on_gpu.grad is not None and torch.equal(on_gpu.grad.cpu() != 0, expected != 0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_micro_batches_on_a_gpu_give_the_gradient_of_the_whole(name: str) -> None:
    model, batch = example(name)
    model, batch = model.cuda(), batch.to("cuda")
    torch.testing.assert_close(gradients(model, batch.split(3)), gradients(model, [batch]), rtol=1e-2, atol=1e-3)
