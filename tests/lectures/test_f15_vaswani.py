"""F15: the base Transformer of 2017 (lecture 5; Vaswani et al. 2017, table 3).

    weft plan vaswani-base

The paper says 65 M parameters. One table of 37,000 words for source, target and logits gives 63.1 M: 18.9 M of
embeddings, 18.9 M of projections, 25.2 M of feed-forward layers and 0.03 M of norms. What is missing to 65 M is the
vocabulary, which the paper gives as "about 37000": 40,800 words would be 65 M.
"""

import pytest

from weft.costs.count import count
from weft.models.config import EncoderDecoder
from weft.models.head_config import LMHead
from weft.models.presets import preset
from weft.nn.config import LayerNorm, Plain
from weft.nn.position_config import Sinusoidal


def test_f15_the_fields() -> None:
    model = preset("vaswani-base")
    assert isinstance(model, EncoderDecoder) and isinstance(model.head, LMHead)
    assert (model.layers, model.encoder_layers or model.layers) == (6, 6)
    assert (model.d_model, model.attention.heads, model.d_head) == (512, 8, 64)
    assert isinstance(model.feedforward, Plain) and isinstance(model.norm, LayerNorm)
    assert isinstance(model.position, Sinusoidal)
    assert (model.feedforward.d_ff, model.feedforward.activation) == (2048, "relu")
    assert (model.placement, model.dropout) == ("post", 0.1)
    assert (model.vocab_size, model.source_vocab_size, model.head.tied) == (37000, None, True)


def test_f15_about_65_million_parameters() -> None:
    parameters = count(preset("vaswani-base")).parameters
    assert parameters == 63_082_496
    assert parameters == pytest.approx(65e6, rel=0.05)
    assert count(preset("vaswani-base").replace(vocab_size=40_800)).parameters == pytest.approx(65e6, rel=0.002)
    assert count(preset("vaswani-big")).parameters == pytest.approx(213e6, rel=0.05)
