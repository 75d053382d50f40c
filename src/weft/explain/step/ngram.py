"""How an n-gram model finds the next token: counts, order by order, and what each leaves to the shorter context."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.decode.config import Sampling
from weft.decode.prompt import output_vocab_size
from weft.explain.reading import Reading, pieces
from weft.explain.step.head import Choice, choice_stages, choose
from weft.explain.step.stage import Way, shown, token_stage
from weft.models.ngram import NGram
from weft.models.ngram_smoothing import discounts, smooth
from weft.models.smoothing import AddK, KneserNey, ModifiedKneserNey, StupidBackoff

Interpolated = KneserNey | ModifiedKneserNey


@dataclass(frozen=True)
class Order:
    """What n-grams of one length say after a context: counts (vocab_size,), of a context that was never seen none;
    `log_p` (vocab_size,) of the context so far; the log-factor of what the shorter context says."""

    n: int
    known: bool
    counts: Tensor
    log_p: Tensor
    factor: float | None = None


def orders(model: NGram, context: Tensor) -> Iterator[Order]:
    """From the empty context up to the longest, (order − 1,) words, as `NGram.head` goes."""
    V, width, table = model.config.vocab_size, model.config.order - 1, model._table
    log_p = table("log_prob", 1).clone()
    yield Order(1, True, table("counts", 1), log_p.clone())
    for n, place in enumerate(map(int, model._places(context[None])), start=2):
        counts, factor = torch.zeros_like(table("counts", 1)), None
        if isinstance(model.config.smoothing, AddK) and bool((context[width - n + 1 :] < V).all()):
            log_p[:] = -torch.tensor(V).log()
        if place >= 0:
            factor = float(table("backoff", n - 1)[place])
            log_p += factor
            children = slice(*table("starts", n - 1)[place : place + 2].tolist())
            words = table("words", n)[children].long()
            counts[words], log_p[words] = table("counts", n)[children], table("log_prob", n)[children]
        yield Order(n, place >= 0, counts, log_p.clone(), factor)


def ngram_stages(way: Way, reading: Reading, place: int, settings: Sampling) -> Choice:
    """What each order says of the likeliest tokens after a place, and the choice of one."""
    model, tokenizer = reading.model, reading.tokenizer
    assert isinstance(model, NGram)
    V, width = model.config.vocab_size, model.config.order - 1
    words = reading.tokens[0, reading.before : place + 1]  # texts were counted without what begins them
    context = torch.cat([words.new_full((width,), V), words])[len(words) :]
    found = list(orders(model, context))
    logits = found[-1].log_p[: output_vocab_size(model, tokenizer.vocab_size)]
    choice = choose(logits, settings, lambda ids: pieces(tokenizer, ids))
    token_stage(way, "embedding", reading.ids, reading.pieces, place)
    own = [id for id in context.tolist() if id < V]
    way.add(
        "embedding.context",
        "last-tokens",
        shown("context", torch.tensor(own), ("token", pieces(tokenizer, own)), scale="positive"),
        numbers={"order": width + 1},
        words={"width": width, "own": len(own)},
        by=NGram.forward_features,
    )
    shorter = None
    for each in found:
        _order(way, model, each, shorter, (choice, pieces(tokenizer, own[len(own) - each.n + 1 :])))
        shorter = each
    answered = torch.stack([torch.where(each.counts > 0, each.n, 0) for each in found]).amax(0)
    way.add(
        "output.logits",
        "log-probabilities",
        choice.vector("log p", choice.logits, "signed"),
        choice.vector("order", answered, "positive"),
        numbers={"vocab_size": len(choice.logits)},
        by=NGram.head,
    )
    choice_stages(way, choice)
    return choice


def _order(way: Way, model: NGram, order: Order, shorter: Order | None, told: tuple[Choice, list[str]]) -> None:
    (choice, context), smoothing = told, model.config.smoothing
    interpolated = isinstance(smoothing, Interpolated)
    numbers: dict[str, Any] = {
        "count of the context": int(order.counts.sum()),
        "different tokens after it": int((order.counts > 0).sum()),
    }
    tensors = [
        choice.vector("probability", order.log_p.exp(), "probability"),
        choice.vector("counts", order.counts, "positive"),
    ]
    if order.factor is not None and shorter is not None:
        numbers["γ(c)"] = float(torch.tensor(order.factor).exp())
        below = (
            torch.full_like(order.log_p, 1 / len(order.log_p)) if isinstance(smoothing, AddK) else shorter.log_p.exp()
        )
        passed = numbers["γ(c)"] * below
        passed = passed if interpolated else passed.masked_fill(order.counts > 0, 0.0)
        tensors.append(choice.vector("from the shorter context", passed, "probability"))
        own = (order.log_p.exp() - passed).clamp(min=0.0).masked_fill(order.counts == 0, 0.0)
        tensors.append(choice.vector("from its own counts", own, "probability"))
    if isinstance(smoothing, Interpolated) and order.n == model.config.order:
        numbers |= dict(zip(("D₁", "D₂", "D₃₊"), discounts(smoothing, model._host("counts", order.n)), strict=True))
    if isinstance(smoothing, AddK | StupidBackoff):
        numbers |= {"k": smoothing.k} if isinstance(smoothing, AddK) else {"alpha": smoothing.alpha}
    after = f"after “{' '.join(context)}”" if context else "on its own, whatever stands before it"
    about = f"How often each token was seen {after}."
    if order.n > 1 and not order.known:
        about = (
            f"Nothing was counted {after}" if len(context) == order.n - 1 else "The text is too short for this order"
        )
        about += ": the shorter context answers."
    elif interpolated and order.n < model.config.order:
        about += " Here a is the number of different tokens before each, not how often it was seen."
    name, words = f"order-{'1-' if order.n == 1 else ''}{smoothing.kind}", {"n": order.n, "about": about}
    way.add(f"order.{order.n}", name, *tensors, numbers=numbers, words=words, by=smooth)
