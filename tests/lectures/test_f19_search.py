"""F19: greedy search is not optimal, beam search finds a better path, and ancestral sampling is exact.

python -m pytest tests/lectures/test_f19_search.py
"""

import math
from collections import Counter

import torch
from tests.later import Later

from weft.decode.beam import beam_search
from weft.decode.config import Beam, PowerLength, Sampling
from weft.decode.generate import generate
from weft.models.base import LanguageModel, State
from weft.models.config import Recurrent

stats = Later("scipy.stats")

# p(first word), and p(second word | first word): after the likeliest first word, no second word is likely
FIRST = torch.tensor([0.0, 0.5, 0.4, 0.1])
SECOND = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.3, 0.25, 0.25, 0.2], [0.9, 0.05, 0.03, 0.02], [0.1, 0.2, 0.3, 0.4]])


class TwoWords(LanguageModel):
    """Predicts from the previous word only; word 0 starts the text."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Recurrent(vocab_size=4, d_model=1)

    def start(self, batch: int, max_len: int, source: object = None) -> State:
        return State(batch, max_len, torch.device("cpu"))

    def advance(self, tokens: torch.Tensor, state: State, lengths: torch.Tensor | None = None) -> torch.Tensor:
        is_first = (state.lengths == 0).unsqueeze(1).expand(tokens.shape)
        state.advance(tokens.shape[1], lengths)
        return torch.stack([tokens, is_first.long()], dim=-1)

    def head(self, features: torch.Tensor) -> torch.Tensor:
        word, is_first = features.unbind(-1)
        return torch.where(is_first.bool().unsqueeze(-1), FIRST, SECOND[word]).log()


MODEL = TwoWords().eval()


def test_greedy_misses_the_best_path_and_beam_search_finds_it() -> None:
    paths: dict[tuple[int, ...], float] = {(a, b): float(FIRST[a] * SECOND[a, b]) for a in range(4) for b in range(4)}
    best = max(paths, key=lambda path: paths[path])
    greedy = tuple(t.id for t in generate(MODEL, [[0]], Sampling(temperature=0.0, max_tokens=2)))
    assert (best, greedy) == ((2, 0), (1, 0)) and paths[greedy] < paths[best]
    settings = Beam(beams=2, max_tokens=2, length_penalty=PowerLength(alpha=0.0))
    found = beam_search(MODEL, [[0]], settings)[0][0]
    assert found.ids == best
    assert math.isclose(found.logprob, math.log(0.36), rel_tol=1e-6)


def test_ancestral_sampling_is_exact() -> None:
    """10⁵ generated words have the model's probabilities after the previous word."""
    texts, words = 10_000, 10
    pairs = Counter[tuple[int, int]]()
    before = [0] * texts
    for token in generate(MODEL, [[0]] * texts, Sampling(max_tokens=1 + words)):
        if before[token.row]:  # 0 only before the first word, as FIRST has no word 0
            pairs[before[token.row] - 1, token.id] += 1
        before[token.row] = token.id + 1
    counts = torch.tensor([[float(pairs[first, second]) for second in range(4)] for first in range(4)])
    assert int(counts.sum()) == texts * words
    expected = counts.sum(1, keepdim=True) * SECOND
    # each of the four rows has four cells with a fixed sum, so three degrees of freedom
    found = stats.chisquare(counts.double().flatten(), expected.double().flatten(), ddof=3, sum_check=False)
    assert found.pvalue > 0.001
