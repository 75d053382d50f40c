"""F12: with the causal mask no position sees a later one; without it a language model leaks its answers.

python -m pytest tests/lectures/test_f12_causal.py
"""

import pytest
import torch
from tests.models.contract import PaddedSource, check_causal
from torch.nn import functional as F

from weft.models.build import build
from weft.models.config import Bahdanau, Recurrent
from weft.models.presets import bert, gpt, llama, preset, vaswani

VOCAB = 31
DECODERS = {
    "gpt": gpt(2, 24, 4, context=32, vocab_size=VOCAB),
    "llama": llama(2, 24, 4, d_ff=32, context=32, vocab_size=VOCAB, kv_heads=2),
    "transformer": preset("transformer").replace(vocab_size=VOCAB, layers=2),
    "transformer++": preset("transformer++").replace(vocab_size=VOCAB, layers=2),
    "elman": Recurrent(vocab_size=VOCAB, cell="elman", d_model=16),
    "lstm": Recurrent(vocab_size=VOCAB, cell="lstm", d_model=16, layers=2),
    "gru": Recurrent(vocab_size=VOCAB, cell="gru", d_model=16),
}


@pytest.mark.parametrize("settings", DECODERS.values(), ids=DECODERS)
def test_no_position_sees_a_later_one(settings: object) -> None:
    torch.manual_seed(0)
    check_causal(build(settings), VOCAB)  # type: ignore[attr-defined]


SEQ2SEQ = {
    "vaswani": vaswani(2, 24, 4, d_ff=32, dropout=0.0, vocab_size=VOCAB),
    "bahdanau": Bahdanau(vocab_size=VOCAB, d_model=16),
}


@pytest.mark.parametrize("settings", SEQ2SEQ.values(), ids=SEQ2SEQ)
def test_nor_does_a_decoder_with_a_source(settings: object) -> None:
    torch.manual_seed(0)
    source = PaddedSource(torch.randint(VOCAB, (2, 5)), torch.ones(2, 5, dtype=torch.bool))
    check_causal(build(settings), VOCAB, source)  # type: ignore[attr-defined]


def loss_after_training(masked: bool) -> float:
    """A small model asked for the next token of random text, which nobody can know without looking ahead."""
    torch.manual_seed(0)
    common = {"vocab_size": 16, "layers": 2, "dropout": 0.0, "init": {"kind": "normal"}}
    model = (
        build(gpt(2, 32, 4, context=16, vocab_size=16))
        if masked
        else build(bert(2, 32, 4, vocab_size=16, context=16).replace(**common, placement="pre", head={"kind": "lm"}))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        tokens = torch.randint(16, (32, 9))
        loss = F.cross_entropy(model(tokens[:, :-1])[:, :-1].flatten(0, 1), tokens[:, 1:-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def test_without_the_mask_it_cheats() -> None:
    """ln 16 = 2.77 is the best that is possible honestly; the unmasked model falls far below it."""
    assert loss_after_training(masked=True) > 2.7
    assert loss_after_training(masked=False) < 1.0
