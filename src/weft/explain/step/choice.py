"""From logits to a token: temperature, the cut, and what they leave to choose from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.decode import sampling
from weft.decode.config import Sampling
from weft.explain.step.stage import Way, rounded, shown

MAX_CANDIDATES = 40  # that are told, the likeliest


@dataclass(frozen=True)
class Choice:
    """What the next token is chosen from: the likeliest `ids`, their names, and the numbers of each on its way."""

    sampling: Sampling
    ids: list[int]
    pieces: list[str]
    logits: Tensor  # (vocab_size,), and so the others
    scaled: Tensor
    left: Tensor  # the same without what is cut off, which is −∞

    @property
    def probability(self) -> Tensor:
        return self.scaled.softmax(-1)

    @property
    def final(self) -> Tensor:
        return self.left.softmax(-1)

    @property
    def kept(self) -> Tensor:
        return ~self.left.isneginf()

    def answer(self) -> dict[str, Any]:
        numbers = self.logits, self.scaled, self.probability, self.final
        columns = [*(rounded(each[self.ids].cpu()) for each in numbers), self.kept[self.ids].tolist()]
        names = ("id", "piece", "logit", "scaled", "probability", "final", "kept")
        rows = zip(self.ids, self.pieces, *columns, strict=True)
        return {
            "temperature": self.sampling.temperature,
            "top_k": self.sampling.top_k,
            "top_p": self.sampling.top_p,
            "candidates": [dict(zip(names, row, strict=True)) for row in rows],
            "kept": int(self.kept.sum()),
            "vocab_size": len(self.logits),
        }

    def vector(self, name: str, values: Tensor, scale: str) -> dict[str, Any]:
        """Of (vocab_size,) the numbers of the likeliest, by name."""
        return shown(name, values[self.ids], ("candidate", self.pieces), scale=scale)


def choose(logits: Tensor, settings: Sampling, name: Callable[[list[int]], list[str]]) -> Choice:
    """Logits (vocab_size,) as `settings` choose from them; `name` gives the names of ids."""
    logits = logits.float()
    sampling.check_logits(logits)
    ids = sampling.highest(logits[None], min(MAX_CANDIDATES, len(logits)))[1][0].tolist()
    if settings.greedy:  # the likeliest alone is left
        left = torch.full_like(logits, -torch.inf)
        left[sampling.greedy(logits)] = 0.0
        return Choice(settings, ids, name(ids), logits, logits, left)
    scaled = sampling.heated(logits, settings.temperature)
    return Choice(settings, ids, name(ids), logits, scaled, sampling.filtered(logits[None], [settings])[0])


def choice_stages(way: Way, choice: Choice) -> None:
    """Temperature and softmax, the cut, and the choice, after the logits."""
    settings, kept, size = choice.sampling, int(choice.kept.sum()), len(choice.logits)
    way.add(
        "output.temperature",
        "no-temperature" if settings.greedy else "temperature",
        choice.vector("probability", choice.probability, "probability"),
        choice.vector("scaled", choice.scaled, "signed"),
        numbers={"temperature": settings.temperature, "vocab_size": size},
        by=sampling.heated,
    )
    final = choice.vector("final", choice.final, "probability")
    cut = {name: value for name in ("top_k", "top_p") if (value := getattr(settings, name)) is not None}
    way.add(
        "output.cut",
        "no-cut" if kept == size else "cut",
        final,
        numbers={**cut, "kept": kept},
        by=sampling.top_p if settings.top_p is not None else sampling.top_k,
    )
    way.add(
        "output.choice",
        "greedy-choice" if settings.greedy else "choice",
        final,
        numbers={"likeliest": choice.pieces[0]},
        by=sampling.greedy if settings.greedy else sampling.draw,
    )
