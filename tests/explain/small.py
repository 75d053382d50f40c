"""Settings of a Transformer small enough to look into in no time."""

from typing import Any

from weft.nn.config import Attention, LayerNorm, Plain
from weft.nn.position_config import Learned


def small(vocab_size: int, **changes: Any) -> dict[str, Any]:
    """The 2017 block in small, as settings of any Transformer; `changes` take the place of its own."""
    own = {
        "vocab_size": vocab_size,
        "context": 64,
        "layers": 2,
        "d_model": 32,
        "attention": Attention(heads=4),
        "feedforward": Plain(d_ff=64),
        "norm": LayerNorm(),
        "position": Learned(),
    }
    return own | changes
