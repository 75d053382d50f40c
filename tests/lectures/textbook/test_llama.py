"""lectures/llama.py is weft's LLaMA: the same logits, loss, gradients and cache."""

from functools import partial

import pytest
import torch
from tests.lectures.textbook import parity
from tests.lectures.textbook.lecture import load
from tests.lectures.textbook.parity import Tensors, linear, norm, split
from tests.pairwise import pairwise
from torch import Tensor

from weft.data.batch import Batch
from weft.models.config import Decoder
from weft.models.head_config import LMHead
from weft.models.presets import llama as preset
from weft.nn.config import RMSNorm
from weft.nn.position_config import Rotary
from weft.objectives.tokens import token_loss
from weft.recipe.objective import NextToken

llama = load("llama")
VOCAB = 23


def adjacent(matrix: Tensor, d_k: int) -> Tensor:
    """Reorder the rows of W^Q or W^K from pairs (x_i, x_{i+d/2}) to adjacent pairs."""
    return matrix.unflatten(0, (-1, 2, d_k // 2)).transpose(1, 2).flatten(0, 2)


def rename(settings: Decoder, weights: Tensors) -> dict[str, Tensor]:
    d_k, groups = settings.d_head, settings.attention.groups
    heights = [settings.d_model, groups * d_k, groups * d_k]
    found = {**linear(weights, "embedding", "embedding"), **norm(weights, "norm", "decoder.norm")}
    found["W.weight"] = weights["output.weight"] if "output.weight" in weights else weights["embedding.weight"]
    for n in range(settings.layers):
        ours, theirs = f"decoder.blocks.{n}", f"layers.{n}"
        found |= split(weights, f"{theirs}.attention", ("W_q", "W_k", "W_v"), f"{ours}.attention.qkv", heights)
        found |= linear(weights, f"{theirs}.attention.W_o", f"{ours}.attention.out")
        d_ff = settings.feedforward.d_ff
        found |= split(weights, f"{theirs}.ffn", ("W_g", "W_u"), f"{ours}.feedforward.gate_up", [d_ff] * 2)
        found |= linear(weights, f"{theirs}.ffn.W_d", f"{ours}.feedforward.down")
        found |= norm(weights, f"{theirs}.norm1", f"{ours}.attention_skip.norm")
        found |= norm(weights, f"{theirs}.norm2", f"{ours}.feedforward_skip.norm")
        if isinstance(settings.position, Rotary) and settings.position.pairs == "halves":
            for name in ("W_q", "W_k"):
                key = f"{theirs}.attention.{name}.weight"
                found[key] = adjacent(found[key], d_k)
    return found


def sizes(settings: Decoder) -> object:
    assert isinstance(settings.position, Rotary) and isinstance(settings.norm, RMSNorm)
    attention, head = settings.attention, settings.head
    assert isinstance(head, LMHead)
    shape = settings.layers, settings.d_model, attention.heads, attention.groups, settings.feedforward.d_ff
    return llama.Sizes(settings.vocab_size, *shape, head.tied, settings.position.base, settings.norm.eps)


@pytest.mark.parametrize(
    ("layers", "heads", "tied", "rows", "pairs"),
    pairwise([1, 3], [(4, None), (4, 2), (6, 1)], [True, False], [(1, 1), (2, 9), (3, 33)], ["halves", "adjacent"]),
)
def test_logits_loss_and_gradients(
    layers: int, heads: tuple[int, int | None], tied: bool, rows: tuple[int, int], pairs: str
) -> None:
    settings = preset(layers, 24, heads[0], d_ff=20, context=32, kv_heads=heads[1], tied=tied).replace(
        vocab_size=VOCAB, norm=RMSNorm(eps=1e-3), position={"kind": "rotary", "base": 500.0, "pairs": pairs}
    )
    ours, theirs = parity.random_weights(settings), llama.LLaMA(sizes(settings))
    theirs.load_state_dict(rename(settings, ours.state_dict()))
    tokens = torch.randint(VOCAB, (rows[0], rows[1] + 1))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens[:, :-1]), ours(tokens[:, :-1]), rtol=1e-5, atol=1e-5)
    given = Batch(tokens[:, :-1], tokens[:, 1:])
    weft = lambda features: token_loss(ours, features, given, settings=NextToken())  # noqa: E731
    losses = weft, lambda: llama.loss(theirs, tokens)
    parity.assert_same(ours, theirs, partial(rename, settings), given, losses)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("parts", [[1] * 12, [5, 1, 4, 2]])
def test_the_cache_gives_the_logits_of_a_whole_pass(parts: list[int], kv_heads: int) -> None:
    torch.manual_seed(0)
    model, tokens = llama.LLaMA(llama.Sizes(VOCAB, 2, 16, 4, kv_heads, 32)), torch.randint(VOCAB, (3, 12))
    caches: list[list[Tensor]] = [[], []]
    with torch.no_grad():
        stepped = torch.cat([model(part, caches) for part in tokens.split(parts, dim=1)], dim=1)
        torch.testing.assert_close(stepped, model(tokens), rtol=1e-5, atol=1e-5)
    assert all(kept.shape == (3, kv_heads, 12, 4) for cache in caches for kept in cache)


def test_products_depend_only_on_distances() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 8, dtype=torch.float64)
    positions = [(torch.tensor([m]), torch.tensor([m - 3])) for m in (3, 4, 50)]
    products = [llama.rotate(q, m, 10000.0) @ llama.rotate(k, n, 10000.0).mT for m, n in positions]
    torch.testing.assert_close(products[1:], products[:1] * 2, rtol=1e-5, atol=1e-8)
