"""Rules for tensor names: applied in both directions; missing and misshapen tensors are reported."""

import pytest
import torch
from torch import Tensor

from weft.errors import InteropError
from weft.interop.bundle import lazy_weights
from weft.interop.weight_map import (
    ONE_ROW,
    SAME,
    TRANSPOSED,
    NameRule,
    TensorLayout,
    adjacent_pairs,
    conversions,
    module,
    shapes,
    tensor,
    their_shapes,
    to_ours,
    to_theirs,
)
from weft.models.config import Decoder
from weft.models.presets import gpt, llama
from weft.nn.position import Position, build
from weft.nn.position_config import Rotary, Sizes

D_HEAD = 6


LAYOUTS = {"same": SAME, "transposed": TRANSPOSED, "one row": ONE_ROW, "adjacent pairs": adjacent_pairs(D_HEAD)}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("size", [(12, 5), (12,)], ids=["matrix", "vector"])
def test_layouts_undo_each_other(name: str, size: tuple[int, ...]) -> None:
    layout: TensorLayout = LAYOUTS[name]
    if layout == ONE_ROW and len(size) == 2:
        size = size[:1]
    ours = torch.randn(size)
    theirs = layout.to_theirs(ours)
    assert tuple(theirs.shape) == layout.shape(size)
    assert torch.equal(layout.to_ours(theirs), ours)


def test_adjacent_pairs_rotate_as_halves_do() -> None:
    """Attention scores are equal if the rows of the projection are reordered for adjacent pairs."""
    torch.manual_seed(0)
    sizes = Sizes(d_model=8, heads=2, d_head=D_HEAD, context=16, causal=True, layers=1)
    halves, neighbours = build(Rotary(pairs="halves"), sizes), build(Rotary(pairs="adjacent"), sizes)
    angles = halves.angles(torch.arange(5)[None], 5, torch.float32)
    assert angles is not None
    weight, x, layout = torch.randn(2 * D_HEAD, 8), torch.randn(1, 5, 8), adjacent_pairs(D_HEAD)

    def scores(position: Position, rows: Tensor) -> Tensor:
        q = (x @ rows.mT).unflatten(-1, (2, D_HEAD)).transpose(1, 2)
        rotated = position.rotate(q, angles)
        return rotated @ rotated.mT

    assert torch.allclose(scores(halves, weight), scores(neighbours, layout.to_theirs(weight)), atol=1e-5)


BLOCK = "decoder.blocks.{layer}"
TABLE = (
    tensor("embedding.weight", "table"),
    tensor("output.weight", "out"),
    *module(f"{BLOCK}.attention.qkv", *(f"{part}.{{layer}}" for part in "qkv")),
    *module(f"{BLOCK}.attention.out", "o.{layer}", layout=TRANSPOSED),
    tensor(f"{BLOCK}.attention_skip.norm.weight", "n1.{layer}"),
    tensor(f"{BLOCK}.feedforward_skip.norm.weight", "n2.{layer}"),
    *module(f"{BLOCK}.feedforward.gate_up", "gate.{layer}", "up.{layer}"),
    *module(f"{BLOCK}.feedforward.down", "down.{layer}"),
    tensor("decoder.norm.weight", "norm"),
)


def small_model(tied: bool = True) -> Decoder:
    return llama(2, 8, 4, d_ff=10, context=16, vocab_size=11, kv_heads=2, tied=tied)


def test_a_round_trip_changes_nothing() -> None:
    model = small_model()
    weights = {name: torch.randn(size) for name, size in shapes(model).items()}
    table = conversions(TABLE, model)
    theirs = {name: make() for name, make in to_theirs(table, lazy_weights(weights.__getitem__, weights)).items()}
    assert theirs["q.0.weight"].shape == (8, 8)
    assert theirs["k.1.weight"].shape == (4, 8)
    assert "out" not in theirs  # the model's config decides which rules apply
    assert torch.equal(theirs["o.1.weight"], weights["decoder.blocks.1.attention.out.weight"].mT)
    sizes = {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    ours = to_ours(table, sizes, theirs.__getitem__, location="here")
    assert ours.keys() == weights.keys()
    assert all(torch.equal(make(), weights[name]) for name, make in ours.items())


def test_tensors_are_read_lazily() -> None:
    model = small_model()
    table = conversions(TABLE, model)
    sizes = their_shapes(table)
    names: list[str] = []

    def read(name: str) -> Tensor:
        names.append(name)
        return torch.zeros(sizes[name])

    ours = to_ours(table, sizes, read, location="here")
    assert names == []
    ours["decoder.blocks.1.attention.qkv.weight"]()
    assert names == ["q.1.weight", "k.1.weight", "v.1.weight"]


def test_an_untied_model_needs_its_output_table() -> None:
    assert "out" in their_shapes(conversions(TABLE, small_model(tied=False)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k.1.weight": None}, r"here: 'k\.1\.weight' \[4, 8\] is missing$"),
        ({"norm": None, "n1.0": None}, r"is missing \(and 1 more\)$"),
        ({"k.1.weight": (8, 8)}, r"'k\.1\.weight' is \[8, 8\]; the settings require \[4, 8\]$"),
        ({"stray": (3,)}, r"'stray' \[3\] has no place in this model$"),
    ],
    ids=["missing", "two missing", "wrong shape", "left over"],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, tuple[int, ...] | None], message: str) -> None:
    table = conversions(TABLE, small_model())
    sizes = {name: size for name, size in (their_shapes(table) | change).items() if size is not None}
    with pytest.raises(InteropError, match=message):
        to_ours(table, sizes, lambda name: torch.zeros(sizes[name]), location="here")


def test_a_tensor_that_no_rule_names_is_refused() -> None:
    rules: tuple[NameRule, ...] = tuple(rule for rule in TABLE if rule.ours != "decoder.norm.weight")
    with pytest.raises(InteropError, match=r"decoder\.norm\.weight \[8\]: this format has no place for it"):
        conversions(rules, small_model())
    with pytest.raises(InteropError, match=r"decoder\.position\.weight .*: this format has no place for it"):
        conversions(TABLE, gpt(1, 8, 2, context=16, vocab_size=11))
