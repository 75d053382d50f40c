"""F18: Vaswani and LLaMA differ in four switches, which can be set independently (lecture 2).

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
    kinds = [(c.placement, c.norm.kind, c.feedforward.activation, c.position.kind) for c in (old, new)]
    assert kinds == [("post", "layer", "relu", "sinusoidal"), ("pre", "rms", "silu", "rotary")]


@pytest.mark.parametrize(
    "chosen", list(product((False, True), repeat=4)), ids=lambda c: "".join("+" if x else "-" for x in c)
)
def test_f18_any_combination_runs(chosen: tuple[bool, ...]) -> None:
    old, new = preset("transformer"), preset("transformer++")
    changes: dict[str, Any] = {"layers": 2, "d_model": 32, "vocab_size": 50, "context": 16}
    changes |= {name: getattr(new if on else old, name) for name, on in zip(SWITCHES, chosen, strict=True)}
    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (2, 16))
    logits = build(old.replace(**changes))(tokens)
    assert logits.shape == (2, 16, 50) and logits.isfinite().all()
    logits.square().mean().backward()
