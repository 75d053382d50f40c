"""F20: with the key–value cache nothing is computed twice, and the logits stay the same.

python -m pytest tests/lectures/test_f20_cache.py
"""

import pytest
import torch
from tests.models.contract import PaddedSource

from weft.models.build import build
from weft.models.config import Bahdanau, Bengio, Model, NGram, Recurrent
from weft.models.ngram import NGram as NGramModel
from weft.models.presets import gpt, llama, vaswani

VOCAB, TIME = 31, 12
FAMILIES: dict[str, Model] = {
    "ngram": NGram(vocab_size=VOCAB, order=3),
    "elman": Recurrent(vocab_size=VOCAB, cell="elman", d_model=16, layers=2),
    "lstm": Recurrent(vocab_size=VOCAB, cell="lstm", d_model=16, layers=2),
    "bengio": Bengio(vocab_size=VOCAB, d_model=16, direct=True),
    "gru": Recurrent(vocab_size=VOCAB, cell="gru", d_model=16),
    "bahdanau": Bahdanau(vocab_size=VOCAB, d_model=16),
    "vaswani": vaswani(2, 24, 4, d_ff=32, dropout=0.0, vocab_size=VOCAB),
    "gpt": gpt(2, 24, 4, context=32, vocab_size=VOCAB),
    "llama": llama(2, 24, 4, d_ff=32, context=32, vocab_size=VOCAB, kv_heads=2),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_position_of_every_family(name: str) -> None:
    torch.manual_seed(0)
    model = build(FAMILIES[name]).eval()
    if isinstance(model, NGramModel):
        model.fit(torch.randint(VOCAB, (500,)).numpy())
    source = PaddedSource(torch.randint(VOCAB, (2, 6)), torch.ones(2, 6, dtype=torch.bool))
    seq2seq = name in ("bahdanau", "vaswani")
    tokens = torch.randint(VOCAB, (2, TIME))
    with torch.no_grad():
        whole = model(tokens, source=source) if seq2seq else model(tokens)
        state = model.start(2, TIME, source if seq2seq else None)
        stepped = torch.cat([model.step(tokens[:, t : t + 1], state) for t in range(TIME)], dim=1)
    torch.testing.assert_close(stepped, whole, atol=1e-5, rtol=1e-5)


def test_each_key_is_computed_once() -> None:
    """The projections read every token exactly once, for any number of steps that attend to it."""
    torch.manual_seed(0)
    model = build(llama(2, 24, 4, d_ff=32, context=32, vocab_size=VOCAB)).eval()
    seen: list[int] = []
    projection = model.get_submodule("decoder.blocks.0.attention.qkv")
    projection.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].shape[1]))
    state = model.start(1, TIME)
    for _ in range(TIME):
        model.step(torch.zeros(1, 1, dtype=torch.long), state)
    assert sum(seen) == TIME
