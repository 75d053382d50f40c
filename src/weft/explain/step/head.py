"""From features to what a Transformer's head says: words, labels, or a vector."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from weft.decode.config import Sampling
from weft.decode.prompt import choices
from weft.explain.reading import Reading, pieces
from weft.explain.step.choice import Choice, choice_stages, choose
from weft.explain.step.passing import Followed
from weft.explain.step.stage import Way, cost, shown
from weft.models import heads
from weft.nn.loss import Readout


def word_stages(way: Way, reading: Reading, features: Tensor, settings: Sampling) -> Choice:
    """Logits of all tokens after features (d_model,), and the choice of one."""
    model = reading.model
    readout = model.readout(features)
    assert readout is not None  # it is a product of features and a table
    logits = readout.logits()[: choices(model, reading.tokenizer.vocab_size)]
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
