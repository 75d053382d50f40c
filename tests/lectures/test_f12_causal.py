"""F12: with the causal mask no position sees a later one; without it a language model leaks its answers.

python -m pytest tests/lectures/test_f12_causal.py
"""

from typing import Any

import pytest
import torch
from tests.models.contract import PaddedSource, check_causal
from torch.nn import functional as F

from weft.models.build import build
from weft.models.config import Bahdanau, Bengio, Recurrent
from weft.models.presets import bert, gpt, llama, preset, vaswani

VOCAB = 31
MODELS: dict[str, Any] = {
    "gpt": gpt(2, 24, 4, context=32, vocab_size=VOCAB),
    "llama": llama(2, 24, 4, d_ff=32, context=32, vocab_size=VOCAB, kv_heads=2),
    "transformer": preset("transformer").replace(vocab_size=VOCAB, layers=2),
    "transformer++": preset("transformer++").replace(vocab_size=VOCAB, layers=2),
    "bengio": Bengio(vocab_size=VOCAB, d_model=16),
    "elman": Recurrent(vocab_size=VOCAB, cell="elman", d_model=16),
    "lstm": Recurrent(vocab_size=VOCAB, cell="lstm", d_model=16, layers=2),
    "gru": Recurrent(vocab_size=VOCAB, cell="gru", d_model=16),
    "vaswani": vaswani(2, 24, 4, d_ff=32, dropout=0.0, vocab_size=VOCAB),
    "bahdanau": Bahdanau(vocab_size=VOCAB, d_model=16),
}


@pytest.mark.parametrize("name", MODELS)
def test_no_position_sees_a_later_one(name: str) -> None:
    torch.manual_seed(0)
    source = PaddedSource(torch.randint(VOCAB, (2, 5)), torch.ones(2, 5, dtype=torch.bool))
    check_causal(build(MODELS[name]), VOCAB, source if name in ("vaswani", "bahdanau") else None)


def loss_after_training(masked: bool) -> float:
    """Loss of a small model on random text, whose next token cannot be predicted without looking ahead."""
    torch.manual_seed(0)
    like_gpt = {"dropout": 0.0, "init": {"kind": "normal"}, "placement": "pre", "head": {"kind": "lm"}}
    unmasked = bert(2, 32, 4, vocab_size=16, context=16).replace(**like_gpt)
    model = build(gpt(2, 32, 4, context=16, vocab_size=16) if masked else unmasked)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        tokens = torch.randint(16, (32, 9))
        loss = F.cross_entropy(model(tokens[:, :-1])[:, :-1].flatten(0, 1), tokens[:, 1:-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def test_without_the_mask_the_model_cheats() -> None:
    """The best possible loss is ln 16 = 2.77; the unmasked model is far below it."""
    assert loss_after_training(masked=True) > 2.7
    assert loss_after_training(masked=False) < 1.0
