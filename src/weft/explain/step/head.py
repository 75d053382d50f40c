"""Stages from features to a model's output (tokens, labels or a vector), and from logits to the chosen token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weft.decode import sampling
from weft.decode.config import Sampling
from weft.decode.prompt import output_vocab_size
from weft.explain.reading import Reading, pieces
from weft.explain.step.passing import FollowedToken
from weft.explain.step.stage import StageList, cost, linear_cost, rounded, sent
from weft.models import heads
from weft.nn.linear import Linear
from weft.nn.loss import Readout

MAX_CANDIDATES = 40  # likeliest candidates that are sent
MAX_FACTORS = 8  # of them, candidates whose row of the output matrix is sent
MAX_TAIL = 24  # tokens that represent all others in a draw


@dataclass(frozen=True)
class Candidates:
    """Candidates for the next token or label: the likeliest `ids` with their names; tensors are (vocab_size,)."""

    sampling: Sampling
    ids: list[int]
    pieces: list[str]
    logits: Tensor
    scaled: Tensor  # divided by the temperature
    filtered: Tensor  # scaled, with −∞ outside top-k and top-p
    tail: list[tuple[int, str]]  # other tokens, at equal steps of their probability
    readout: Readout | None = None  # factors of the logits

    @property
    def probability(self) -> Tensor:
        return self.scaled.softmax(-1)

    @property
    def final(self) -> Tensor:
        return self.filtered.softmax(-1)

    @property
    def kept(self) -> Tensor:
        return ~self.filtered.isneginf()

    def answer(self) -> dict[str, Any]:
        tensors = self.logits, self.scaled, self.probability, self.final
        columns = [*(rounded(each[self.ids].cpu()) for each in tensors), self.kept[self.ids].tolist()]
        names = ("id", "piece", "logit", "scaled", "probability", "final", "kept")
        rows = zip(self.ids, self.pieces, *columns, strict=True)
        factors, first = None, self.ids[:MAX_FACTORS]
        if self.readout is not None:
            x, weight, bias, *_ = self.readout
            factors = {"features": rounded(x), "rows": rounded(weight[first])}
            factors["bias"] = None if bias is None else rounded(bias[first])
        return {
            "factors": factors,
            "tail": [{"id": id, "piece": piece} for id, piece in self.tail],
            "temperature": self.sampling.temperature,
            "top_k": self.sampling.top_k,
            "top_p": self.sampling.top_p,
            "candidates": [dict(zip(names, row, strict=True)) for row in rows],
            "kept": int(self.kept.sum()),
            "vocab_size": len(self.logits),
        }

    def sent(self, name: str, values: Tensor, scale: str) -> dict[str, Any]:
        """Return the likeliest candidates' values out of (vocab_size,), as JSON data."""
        size, uncut = len(values), sent(name, values, "candidate", scale=scale)
        shown = sent(name, values[self.ids], ("candidate", self.pieces), scale=scale)
        cut = {"axis": 0, "of": size} if size > len(self.ids) else None
        return {**shown, "shape": [size], "cut": cut, "norm": uncut["norm"]}


def candidates(logits: Tensor, settings: Sampling, names: Callable[[list[int]], list[str]]) -> Candidates:
    """Return the candidates for logits (vocab_size,) under these sampling settings; `names` maps ids to texts."""
    logits = logits.float()
    sampling.check_logits(logits)
    ids = sampling.fast_topk(logits[None], min(MAX_CANDIDATES, len(logits)))[1][0].tolist()
    scaled = logits if settings.greedy else sampling.apply_temperature(logits, settings.temperature)
    if settings.greedy:
        filtered = torch.full_like(logits, -torch.inf)
        filtered[sampling.greedy(logits)] = 0.0
    else:
        filtered = sampling.filter_logits(logits[None], [settings])[0]
    others = _tail(filtered.softmax(-1), ids)
    tail = list(zip(others, names(others), strict=True))
    return Candidates(settings, ids, names(ids), logits=logits, scaled=scaled, filtered=filtered, tail=tail)


def _tail(probability: Tensor, shown: list[int]) -> list[int]:
    """Return tokens outside `shown`: those at equal steps of the probability that is left, so each is as likely."""
    rest = probability.clone()
    rest[shown] = 0.0
    values, ids = rest.sort(descending=True, stable=True)
    total = values.double().cumsum(0)
    if total[-1] <= 0:
        return []
    steps = (torch.arange(MAX_TAIL, device=rest.device) + 0.5) / MAX_TAIL * total[-1]
    return ids[torch.searchsorted(total, steps).clamp(max=len(ids) - 1)].tolist()


def choice_stages(stages: StageList, choice: Candidates) -> None:
    """Record temperature and softmax, truncation, and the choice, after the logits."""
    settings, kept, size = choice.sampling, int(choice.kept.sum()), len(choice.logits)
    probability = choice.sent("probability", choice.probability, "probability")
    tensors = [probability, choice.sent("scaled", choice.scaled, "signed")]
    text, numbers = "no-temperature" if settings.greedy else "temperature", {"temperature": settings.temperature}
    numbers["vocab_size"] = size
    stages.record("output.temperature", *tensors, text=text, numbers=numbers, by=sampling.apply_temperature)
    final = choice.sent("final", choice.final, "probability")
    limits = {name: value for name in ("top_k", "top_p") if (value := getattr(settings, name)) is not None}
    by: Callable[..., Tensor] = sampling.top_p if settings.top_p is not None else sampling.top_k
    text = "no-cut" if kept == size else "cut"
    stages.record("output.cut", final, text=text, numbers={**limits, "kept": kept}, by=by)
    text, by = ("greedy-choice", sampling.greedy) if settings.greedy else ("choice", sampling.draw)
    stages.record("output.choice", final, text=text, numbers={"likeliest": choice.pieces[0]}, by=by)


def token_stages(stages: StageList, reading: Reading, features: Tensor, *, settings: Sampling) -> Candidates:
    """Record the logits of all tokens after features (d_model,), and the choice of one."""
    choice = logit_stage(stages, reading, features, settings=settings)
    choice_stages(stages, choice)
    return choice


def logit_stage(
    stages: StageList, reading: Reading, features: Tensor, *, settings: Sampling, inputs: Sequence[str] | None = None
) -> Candidates:
    """Record the logits of all tokens from features (d_model,), computed by the stages `inputs`."""
    model = reading.model
    readout = model.readout(features)
    assert readout is not None  # a product of features and a table
    logits = readout.logits()[: output_vocab_size(model, reading.tokenizer.vocab_size)]
    choice = candidates(logits, settings, lambda ids: pieces(reading.tokenizer, ids))
    choice = replace(choice, readout=readout)
    c, sizes = readout.softcap, {"vocab_size": readout.weight.shape[0], "width": readout.weight.shape[1]}
    product = "E x" if readout.bias is None else "E x + b"
    stages.record(
        "output.logits",
        choice.sent("logits", choice.logits, "signed"),
        numbers=sizes if c is None else {**sizes, "c": c},
        words={"formula": product if c is None else f"c · tanh(({product}) / c)", "shown": len(choice.ids)},
        inputs=inputs,
        by=Readout.logits,
        cost=cost(2 * readout.weight.numel(), readout.weight, readout.bias),
    )
    return choice


def head_stages(
    token: FollowedToken, reading: Reading, *, settings: Sampling, labels: Sequence[str]
) -> Candidates | None:
    """Record the stages of a Transformer's head; return its candidate tokens or labels, or None if it has neither."""
    model, stages, position = token.model, token.stages, token.position
    features = token.captured[token.name]
    if model.token_head is not None:
        _transform_stage(stages, model.token_head, features[0, position])
        return token_stages(stages, reading, features[0, position], settings=settings)
    head: Any = model.output
    output = model.head(features)[0]
    readout = None
    if isinstance(head, heads.Classifier):

        def pooled(x: Tensor) -> Tensor:
            x = heads.pool(x, None, head.pooling)
            stages.record("output.pool", sent("pooled", x[0], "coordinate"), text=f"pool-{head.pooling}", by=heads.pool)
            return x

        x = features if head.pooled_late else pooled(features)
        for name, part in (("pooler", head.pooler), ("transform", head.transform)):
            if part is not None:
                x = part(x)
                values = sent("prepared", x[0, position] if head.pooled_late else x[0], "coordinate")
                weights = cost(2 * part.dense.weight.numel(), part)
                stages.record(f"output.{name}", values, text=f"class-{name}", by=type(part).forward, cost=weights)
        if head.pooled_late:
            x = pooled(x)
        readout = Readout(x[0], head.out.weight, head.out.bias) if type(head.out) is Linear else None
    elif isinstance(head, heads.Tagger | heads.Detector):
        output = output[position]
    if not isinstance(head, heads.Classifier | heads.Tagger) or output.ndim == 0 or len(output) == 1:
        values = sent("output", output.reshape(-1), "coordinate")
        stages.record("output.head", values, text="other-head", by=type(head).forward, cost=cost(0, head))
        return None
    names = {"span": ["begins", "ends"], "nsp": ["follows", "does not"]}.get(model.config.head.kind)
    names = list(labels) if len(labels) == len(output) else names or [str(n) for n in range(len(output))]
    choice = candidates(output, Sampling(), lambda ids: [names[id] for id in ids])
    logits = choice.sent("logits", choice.logits, "signed")
    stages.record("output.logits", logits, text="label-logits", by=type(head).forward, cost=linear_cost(head.out))
    stages.record("output.probabilities", choice.sent("probability", choice.probability, "probability"))
    return replace(choice, readout=readout)


def _transform_stage(stages: StageList, head: heads.TokenHead, features: Tensor) -> None:
    """Record the transformation of features (d_model,) before their product with the table, if there is one."""
    prepared = head.prepare(features)
    if prepared is features:
        return
    dense, scale, after = (getattr(head, name, None) for name in ("dense", "scale", "norm"))
    transform: Any = getattr(head, "transform", None)
    linears = [each for each in (dense, None if transform is None else transform.dense) if each is not None]
    stages.record(
        "output.transform",
        sent("prepared", prepared, "coordinate"),
        text="masked-transform" if isinstance(head, heads.MaskedLMHead) or transform is not None else "transform",
        numbers={} if scale is None else {"scale": scale},
        words={"factors": ("" if scale is None else "scale · ") + ("" if dense is None else "W ")},
        by=type(head).prepare,
        cost=cost(sum(2 * each.weight.numel() for each in linears), dense, after, transform),
    )
