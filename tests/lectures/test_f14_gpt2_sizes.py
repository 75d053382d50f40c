"""F14: GPT-2's four sizes (lecture 4; Radford et al. 2019).

    weft presets
    python -c "from weft.costs.count import count; from weft.models.presets import preset; \\
               print(count(preset('gpt2')).parameters)"
"""

import pytest
import torch

from weft.costs.count import count
from weft.models.build import build
from weft.models.presets import preset

SIZES = {
    "gpt2": (768, 124_439_808),
    "gpt2-medium": (1024, 354_823_168),
    "gpt2-large": (1280, 774_030_080),
    "gpt2-xl": (1600, 1_557_611_200),
}


@pytest.mark.parametrize("name", SIZES)
def test_f14_parameters(name: str) -> None:
    d_model, parameters = SIZES[name]
    model = preset(name)
    assert (model.d_model, count(model).parameters) == (d_model, parameters)
    with torch.device("meta"):
        assert sum(p.numel() for p in build(model).parameters()) == parameters
