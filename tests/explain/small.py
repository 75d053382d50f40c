"""Small models to look into, and the data of a page."""

import json
import re
from typing import Any, ClassVar

import torch

from weft.explain.reading import Reading
from weft.models.build import build
from weft.models.config import Bahdanau, EncoderDecoder
from weft.models.presets import preset
from weft.nn.config import Attention, LayerNorm, Plain
from weft.nn.position_config import Learned


def small(vocab_size: int, **changes: Any) -> dict[str, Any]:
    """Settings of a small Transformer with the 2017 block, for any of the Transformer's config types."""
    settings = {
        "vocab_size": vocab_size,
        "context": 64,
        "layers": 2,
        "d_model": 32,
        "attention": Attention(heads=4),
        "feedforward": Plain(d_ff=64),
        "norm": LayerNorm(),
        "position": Learned(),
    }
    return settings | changes


def sharp(config: Any, factor: float = 3.0, noise: float = 0.0) -> Any:
    """A seeded model whose matrices are scaled, so that its predictions differ from each other."""
    torch.manual_seed(0)
    model = build(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor if parameter.ndim > 1 else 1.0)
            if noise:
                parameter.add_(noise * torch.randn_like(parameter))
    return model


def preset_model(name: str, **changes: Any) -> Any:
    """A seeded preset with some settings changed."""
    torch.manual_seed(0)
    return build(preset(name).replace(**changes))


class IdTokenizer:
    """The part of a tokenizer that a picture of ids needs."""

    special_tokens: ClassVar[dict[str, int]] = {}
    mask_id = 4


def read_ids(model: Any, ids: tuple[int, ...]) -> Reading:
    """A reading of these ids, also as the source of a model that reads one."""
    source = ids if isinstance(model.config, EncoderDecoder | Bahdanau) else None
    return Reading(model, IdTokenizer(), ids, source=source)  # type: ignore[arg-type]


def page_data(html: str) -> Any:
    """The JSON data of the first picture in a page."""
    match = re.search(r'<script type="application/json" class="data">(.*?)</script>', html, re.DOTALL)
    assert match
    return json.loads(match[1])
