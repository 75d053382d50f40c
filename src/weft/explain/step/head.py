"""From features to what a model says, words, labels or a vector; and from logits to a token: temperature, the cut."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.decode import sampling
from weft.decode.config import Sampling
from weft.decode.prompt import output_vocab_size
from weft.explain.reading import Reading, pieces
from weft.explain.step.passing import Followed
from weft.explain.step.stage import Way, cost, rounded, shown
from weft.models import heads
from weft.nn.loss import Readout

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
    ids = sampling.fast_topk(logits[None], min(MAX_CANDIDATES, len(logits)))[1][0].tolist()
    if settings.greedy:  # the likeliest alone is left
        left = torch.full_like(logits, -torch.inf)
        left[sampling.greedy(logits)] = 0.0
        return Choice(settings, ids, name(ids), logits, logits, left)
    scaled = sampling.apply_temperature(logits, settings.temperature)
    return Choice(settings, ids, name(ids), logits, scaled, sampling.filter_logits(logits[None], [settings])[0])


def choice_stages(way: Way, choice: Choice) -> None:
    """Temperature and softmax, the cut, and the choice, after the logits."""
    settings, kept, size = choice.sampling, int(choice.kept.sum()), len(choice.logits)
    way.add(
        "output.temperature",
        "no-temperature" if settings.greedy else "temperature",
        choice.vector("probability", choice.probability, "probability"),
        choice.vector("scaled", choice.scaled, "signed"),
        numbers={"temperature": settings.temperature, "vocab_size": size},
        by=sampling.apply_temperature,
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


def word_stages(way: Way, reading: Reading, features: Tensor, settings: Sampling) -> Choice:
    """Logits of all tokens after features (d_model,), and the choice of one."""
    model = reading.model
    readout = model.readout(features)
    assert readout is not None  # it is a product of features and a table
    logits = readout.logits()[: output_vocab_size(model, reading.tokenizer.vocab_size)]
    choice = choose(logits, settings, lambda ids: pieces(reading.tokenizer, ids))
    c, sizes = readout.softcap, {"vocab_size": readout.weight.shape[0], "width": readout.weight.shape[1]}
    product = "E x" if readout.bias is None else "E x + b"
    way.add(
        "output.logits",
        "logits",
        choice.vector("logits", choice.logits, "signed"),
        numbers=sizes if c is None else {**sizes, "c": c},
        words={"formula": product if c is None else f"c · tanh(({product}) / c)", "shown": len(choice.ids)},
        by=Readout.logits,
        cost=cost(2 * readout.weight.numel(), readout.weight, readout.bias),
    )
    choice_stages(way, choice)
    return choice


def head_stages(
    way: Way, reading: Reading, followed: Followed, settings: Sampling, labels: Sequence[str]
) -> Choice | None:
    """What a Transformer's head makes of its features: a choice of tokens or of labels; None where it has neither."""
    model = followed.model
    features, words = followed.seen[followed.name], model.token_head
    if words is not None:
        _prepared(way, words, features[0, followed.place])
        return word_stages(way, reading, features[0, followed.place], settings)
    head: Any = model.output
    given = model.head(features)[0]
    if isinstance(head, heads.Classifier):
        _pooled(way, head, features)
    elif isinstance(head, heads.Tagger | heads.Detector):
        given = given[followed.place]
    if not isinstance(head, heads.Classifier | heads.Tagger) or given.ndim == 0 or len(given) == 1:
        values = shown("output", given.reshape(-1), "coordinate")
        way.add("output.head", "other-head", values, by=type(head).forward, cost=cost(0, head))
        return None
    names = labels if len(labels) == len(given) else _names(model.config.head.kind, len(given))
    choice = choose(given, Sampling(), lambda ids: [names[id] for id in ids])
    counted, logits = cost(2 * head.out.weight.numel(), head.out), choice.vector("logits", choice.logits, "signed")
    way.add("output.logits", "label-logits", logits, by=type(head).forward, cost=counted)
    way.add("output.probabilities", "probabilities", choice.vector("probability", choice.probability, "probability"))
    return choice


def _names(head: str, count: int) -> list[str]:
    return {"span": ["begins", "ends"], "nsp": ["follows", "does not"]}.get(head, [str(n) for n in range(count)])


def _prepared(way: Way, head: heads.TokenHead, features: Tensor) -> None:
    """What the head does to features (d_model,) before their product with the table, if anything."""
    prepared = head.prepare(features)
    if prepared is features:
        return
    dense, scale, after = (getattr(head, name, None) for name in ("dense", "scale", "norm"))
    way.add(
        "output.transform",
        "masked-transform" if isinstance(head, heads.MaskedLMHead) else "transform",
        shown("prepared", prepared, "coordinate"),
        numbers={} if scale is None else {"scale": scale},
        words={"factors": ("" if scale is None else "scale · ") + ("" if dense is None else "W ")},
        by=type(head).prepare,
        cost=cost(0 if dense is None else 2 * dense.weight.numel(), dense, after),
    )


def _pooled(way: Way, head: heads.Classifier, features: Tensor) -> None:
    x = heads.pool(features, None, head.pooling)
    way.add("output.pool", f"pool-{head.pooling}", shown("pooled", x[0], "coordinate"), by=heads.pool)
    for name, part in (("pooler", head.pooler), ("transform", head.transform)):
        if part is not None:
            x = part(x)
            counted, values = cost(2 * part.dense.weight.numel(), part), shown("prepared", x[0], "coordinate")
            way.add(f"output.{name}", f"class-{name}", values, by=type(part).forward, cost=counted)
