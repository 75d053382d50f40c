"""F27: the gradient at layer 0 relative to the top of 24 untrained layers (lecture 2).

    weft explain transformer --only gradients

Without skip connections the gradient vanishes. Norms can preserve its size, but then all tokens have become alike, and
the part that distinguishes tokens vanishes.
"""

import pytest

from weft.explain.gradients import NAMES, GradientFlow, Placement, gradient_flow

Flows = dict[tuple[str, bool], GradientFlow]


@pytest.fixture(scope="module")
def found() -> Flows:
    return {(place, skips): gradient_flow(place, skips) for place in NAMES for skips in (True, False)}


def test_f27_24_layers_from_bottom_to_top(found: Flows) -> None:
    for flow in found.values():
        assert len(flow.full) == len(flow.token_specific) == 25
        assert (flow.full[-1], flow.token_specific[-1]) == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize("place", NAMES)
def test_f27_without_skips_it_vanishes(found: Flows, place: Placement) -> None:
    assert found[place, False].token_specific[0] < 1e-3
    assert found[place, False].token_specific[0] < 1e-3 * found[place, True].token_specific[0]
    if place == "none":  # without norms, all of it vanishes
        assert found["none", False].full[0] < 1e-4


@pytest.mark.parametrize("place", ["pre", "post"])
def test_f27_with_skips_and_norms_it_is_preserved(found: Flows, place: Placement) -> None:
    assert 0.1 < found[place, True].token_specific[0] < 100
    assert 0.1 < found[place, True].full[0] < 100


def test_f27_pre_norm_preserves_it_in_every_layer(found: Flows) -> None:
    """Above the first layers pre-norm preserves the gradient; post-norm attenuates it in between."""
    assert all(0.5 < pull < 3 for pull in found["pre", True].token_specific[4:])
    assert min(found["post", True].token_specific) < 0.2
    assert found["none", True].full[0] > 1e3  # skips without norms: each layer adds to the gradient
