"""The KV cache: multiplications with and without it, and what is drawn."""

import pytest

from weft.costs.count import count
from weft.errors import ModelError
from weft.explain.cache import LOOKS, cache_steps
from weft.models.presets import preset


def test_multiplications_are_those_of_the_forward_pass() -> None:
    model = preset("gpt-tiny")
    products = cache_steps(model).products
    parts = {part.name: part.flops // 2 for part in count(model, 5).components}
    assert 5 * products.token == parts["MHA projections"] + parts["FFN"]
    assert 25 * products.pair == parts["attention"] and 5 * products.head == parts["logits"]
    # without a cache, step t reads t tokens; with it, one token and t keys
    assert products.step(3, cached=False) == 3 * products.token + 6 * products.pair + products.head
    assert products.step(3, cached=True) == products.token + 3 * products.pair + products.head
    assert products.step(1, cached=True) == products.step(1, cached=False)


def test_every_step_is_drawn() -> None:
    picture = cache_steps(preset("llama-tiny"), 4)
    axes = picture.figure().axes
    assert len(axes) == 4
    colours = [tuple(patch.get_facecolor()) for patch in axes[2].patches]
    assert colours.count(tuple(LOOKS["read"]["facecolor"])) == 4  # keys and values of two earlier tokens
    assert len(colours) == 2 * (3 * 3 + 6)
    text = picture.text()
    assert text is not None and text.splitlines()[-1].startswith("all")


def test_models_without_a_cache_are_refused() -> None:
    with pytest.raises(ModelError, match="no KV cache"):
        cache_steps(preset("elman"))
    with pytest.raises(ModelError, match="steps 0"):
        cache_steps(preset("gpt-tiny"), 0)
