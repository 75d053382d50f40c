"""F5: probabilities 1/4, 1/3, 1/4, 1/3 → mean negative log-likelihood 1.242 nats, perplexity 3.464.

python -c "from weft.evaluate.perplexity import Score; from math import log
s = Score(sum(map(log, (4, 3, 4, 3))), 4, 4); print(s.loss, s.perplexity)"
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.evaluate.perplexity import Score, ScoringOptions, token_scores
from weft.models.base import LanguageModel
from weft.models.config import Recurrent


class Slide(LanguageModel):
    """Gives token 0 the slide's probabilities 1/4, 1/3, 1/4, 1/3, and divides the rest evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Recurrent(vocab_size=5, d_model=1)

    def features(self, tokens: Tensor, **inputs: object) -> Tensor:
        return torch.arange(tokens.shape[1]).expand_as(tokens).unsqueeze(-1)

    def head(self, features: Tensor) -> Tensor:
        p = torch.where(features % 2 == 0, 1 / 4, 1 / 3)
        return torch.cat([p, ((1 - p) / 4).expand(*features.shape[:-1], 4)], dim=-1).log()


class Zeros:
    bytes = 4

    def __len__(self) -> int:
        return 5

    def read(self, start: int, length: int) -> NDArray[np.int64]:
        return np.zeros(length, dtype=np.int64)

    documents = read


def test_the_slides_formula_alone_and_through_the_evaluator() -> None:
    text: Any = Zeros()
    formula = Score(-sum(math.log(p) for p in (1 / 4, 1 / 3, 1 / 4, 1 / 3)), 4, 4)
    for result in (formula, Score.of(token_scores(Slide(), text, ScoringOptions(8)), text)):
        assert (result.tokens, round(result.loss, 3), round(result.perplexity, 3)) == (4, 1.242, 3.464)
        assert result.perplexity == pytest.approx(math.sqrt(12), rel=1e-6)
