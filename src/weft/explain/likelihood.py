"""Maximum likelihood of an n-gram model, derived step by step for the words after one context."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.errors import DataError, ModelError
from weft.explain.texts import TEXTS
from weft.figures.charts import Charts
from weft.figures.plot import Axis, Look, Plot, Series
from weft.figures.tables import Table
from weft.models.base import LanguageModel
from weft.models.ngram import NGram
from weft.text.tokenizer import Tokenizer

MAX_FACTORS = 4  # words written out in a formula


@dataclass(frozen=True)
class Likelihood(Charts):
    """Counts of the words after a context, their maximum-likelihood estimates and the model's probabilities."""

    context: str
    words: tuple[str, ...]
    counts: tuple[int, ...]
    probabilities: tuple[float, ...]

    about = TEXTS["likelihood"]

    @property
    def title(self) -> str:  # type: ignore[override]
        return f"Maximum likelihood of the words after “{self.context}”"

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def difference(self) -> float:
        """Largest difference between an estimate and the model's probability."""
        pairs = zip(self.counts, self.probabilities, strict=True)
        return max(abs(count / self.total - probability) for count, probability in pairs)

    def log_likelihood(self, estimates: Sequence[float]) -> float:
        """Σ n log p of the words for these probabilities, in nats."""
        return sum(count * math.log(p) for count, p in zip(self.counts, estimates, strict=True))

    def charts(self) -> list[Plot]:
        word, best = self.words[0], self.counts[0] / self.total
        others = (1 - best) or 1.0
        shares = [count / self.total / others for count in self.counts[1:]]
        grid = np.linspace(0.01, 0.99, 99)
        points = [(float(p), self.log_likelihood([p, *((1 - p) * share for share in shares)])) for p in grid]
        top = self.log_likelihood([n / self.total for n in self.counts])
        labelled = Series(points=[(best, top)], look=Look("c1", "o"), labels=[f"{self.counts[0]}/{self.total}"])
        x = Axis(f"p({word} | {self.context})", includes=(0.0, 1.0))
        y = Axis("log-likelihood, nats", includes=(top + 2,))
        curve = Plot("Log-likelihood, the other words in proportion", [Series(points=points), labelled], x, y)
        ticks = Axis(ticks=dict(enumerate(self.words[:12])), includes=(-0.5, min(12, len(self.words)) - 0.5))
        estimates = Series("n / N", [(i, n / self.total) for i, n in enumerate(self.counts[:12])], bars=True)
        model = Series("the model", list(enumerate(self.probabilities[:12])), Look("c1", "D", width=0))
        return [curve, Plot("Estimate and model", [estimates, model], ticks, Axis("probability", includes=(0.0,)))]

    def tables(self) -> list[Table]:
        N, short = self.total, list(zip(self.words, self.counts, strict=True))[:MAX_FACTORS]
        more = " …" if len(self.words) > MAX_FACTORS else ""
        uniform = self.log_likelihood([1 / len(self.words)] * len(self.words))
        best = self.log_likelihood([count / N for count in self.counts])
        steps = [
            ("1", "likelihood", "L = ∏ p(w)ⁿ", " · ".join(f"p({word})^{n}" for word, n in short) + more),
            ("2", "logarithm", "ℓ = Σ n log p(w)", " + ".join(f"{n} log p({word})" for word, n in short) + more),
            ("3", "constraint", "Σ p(w) = 1", f"over {len(self.words)} words"),
            ("4", "Lagrangian", "Λ = ℓ + λ(1 − Σ p(w))", ""),
            ("5", "gradient", "∂Λ/∂p(w) = n/p(w) − λ = 0", "p(w) = n/λ"),
            ("6", "sum over w", "1 = Σ n/λ", f"λ = {N}"),
            ("7", "solution", "p(w) = n/N", ", ".join(f"{word} {n}/{N}" for word, n in short) + more),
            ("8", "a maximum", "∂²Λ/∂p² = −n/p² < 0", f"ℓ = {best:.3f}; with equal p: {uniform:.3f}"),
        ]
        columns = zip(self.words, self.counts, self.probabilities, strict=True)
        rows = [(w, str(n), f"{n}/{N}", f"{n / N:.4f}", f"{n / (n / N) - N:.0f}", f"{p:.4f}") for w, n, p in columns]
        result = f"The estimate differs from the model by at most {self.difference:.1e}."
        if self.difference > 1e-4:
            result += f" {TEXTS['likelihood-smoothed']}"
        derivation = Table(("", "step", "formula", "here"), steps, self.title, text=(0, 1, 2, 3))
        return [derivation, Table(("word", "n", "n/N", "p", "n/p − λ", "model"), rows, "", [result])]


def likelihood(model: LanguageModel, tokenizer: Tokenizer, text: str) -> Likelihood:
    """Derive the estimate for the words that follow the end of `text` in the training text."""
    if not isinstance(model, NGram):
        raise ModelError("likelihood: only an n-gram model has a solution in closed form; others follow the gradient")
    ids = tokenizer.encode(text)
    context = ids[-(model.config.order - 1) :] if model.config.order > 1 else []
    counts = model.following(context)
    shown = tokenizer.decode(context).strip()
    if not counts:
        raise DataError(f"--text {text!r}: “{shown}” never occurs in the training text; give words that do")
    with torch.no_grad():
        logits = model(torch.tensor([ids or [0]]))[0, -1] if context else model.head(torch.empty(1, 1, 0))[0, 0]
    order = sorted(counts, key=lambda id: (-counts[id], id))
    return Likelihood(
        shown,
        words=tuple(tokenizer.token(id).strip() or repr(tokenizer.token(id)) for id in order),
        counts=tuple(counts[id] for id in order),
        probabilities=tuple(float(p) for p in logits.exp()[order]),
    )
