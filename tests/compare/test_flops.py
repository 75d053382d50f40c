"""The FLOPs of training equal what torch counts, forward and backward, for every family."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from weft.compare.sizes import resize
from weft.costs.count import count
from weft.models.build import build
from weft.models.presets import preset


@pytest.mark.parametrize("name", ["transformer", "transformer++", "gpt-tiny", "llama-tiny", "elman", "lstm", "gru"])
def test_training_flops_equal_torchs_count(name: str) -> None:
    model, rows, length = resize(preset(name), 64).replace(vocab_size=256), 2, 32
    net = build(model)
    tokens = torch.randint(0, 256, (rows, length))
    with (
        sdpa_kernel(SDPBackend.MATH),  # torch counts only this kernel's products
        torch.backends.mkldnn.flags(enabled=False),  # nor those of the fused LSTM
        FlopCounterMode(display=False) as counter,
    ):
        logits = net(tokens)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    assert count(model, length).training() * rows * length == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_an_ngram_model_has_no_flops() -> None:
    assert count(preset("ngram-5")).training() == 0
