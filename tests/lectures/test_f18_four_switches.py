"""F18: Vaswani against LLaMA is four switches, and they can be mixed (lecture 2).

diff <(weft config show transformer) <(weft config show transformer++)
weft plan transformer model.placement=pre
"""

from itertools import product
from typing import Any

import pytest
import torch

from weft.models.build import build
from weft.models.presets import preset

SWITCHES = ("placement", "norm", "feedforward", "position")


def test_f18_the_presets_differ_in_exactly_four_switches() -> None:
    old, new = preset("transformer"), preset("transformer++")
    assert {name for name in type(old).model_fields if getattr(old, name) != getattr(new, name)} == set(SWITCHES)
    assert (old.placement, old.norm.kind, old.feedforward.activation, old.position.kind) == (
        "post",
        "layer",
        "relu",
        "sinusoidal",
    )
    assert (new.placement, new.norm.kind, new.feedforward.activation, new.position.kind) == (
        "pre",
        "rms",
        "silu",
        "rotary",
    )


@pytest.mark.parametrize(
    "chosen", list(product((False, True), repeat=4)), ids=lambda c: "".join("+" if x else "-" for x in c)
)
def test_f18_any_mixture_runs(chosen: tuple[bool, ...]) -> None:
    old, new = preset("transformer"), preset("transformer++")
    small: dict[str, Any] = {"layers": 2, "d_model": 32, "vocab_size": 50, "context": 16}
    mixed = old.replace(
        **small, **{name: getattr(new if taken else old, name) for name, taken in zip(SWITCHES, chosen, strict=True)}
    )
    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (2, 16))
    logits = build(mixed)(tokens)
    assert logits.shape == (2, 16, 50)
    assert logits.isfinite().all()
    logits.square().mean().backward()
