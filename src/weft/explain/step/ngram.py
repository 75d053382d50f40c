"""Stages of an n-gram model: counts order by order, and the probability that each leaves to the shorter context."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.decode.config import Sampling
from weft.decode.prompt import output_vocab_size
from weft.explain.reading import Reading, pieces
from weft.explain.step.head import Candidates, candidates, choice_stages
from weft.explain.step.stage import StageList, sent
from weft.explain.step.threads import shown_threads
from weft.models.ngram import NGram
from weft.models.ngram_smoothing import discounts, smooth
from weft.models.smoothing import AddK, KneserNey, ModifiedKneserNey, StupidBackoff

Interpolated = KneserNey | ModifiedKneserNey


class NGramOrder(NamedTuple):
    """Prediction of the n-grams of one order after a context: counts and log p, (vocab_size,) each.

    The counts of an unseen context (not `known`) are zero. `shorter` is log p after the next shorter context, and
    `factor` the log of its weight.
    """

    n: int
    known: bool
    counts: Tensor
    log_p: Tensor
    shorter: Tensor | None = None
    factor: float | None = None


def orders(model: NGram, context: Tensor) -> Iterator[NGramOrder]:
    """Yield the orders from the empty context to the longest, (order − 1,) tokens, as `NGram.head` does."""
    V, width, table = model.config.vocab_size, model.config.order - 1, model._table
    log_p = table("log_prob", 1).clone()
    yield NGramOrder(1, True, table("counts", 1), log_p=log_p.clone())
    for n, entry in enumerate(map(int, model._suffixes(context[None])), start=2):
        counts, shorter, factor = torch.zeros_like(table("counts", 1)), log_p.clone(), None
        if isinstance(model.config.smoothing, AddK) and bool((context[width - n + 1 :] < V).all()):
            log_p[:] = -torch.tensor(V).log()
        if entry >= 0:
            factor = float(table("backoff", n - 1)[entry])
            log_p += factor
            children = slice(*table("starts", n - 1)[entry : entry + 2].tolist())
            tokens = table("words", n)[children].long()
            counts[tokens], log_p[tokens] = table("counts", n)[children], table("log_prob", n)[children]
        yield NGramOrder(n, entry >= 0, counts, log_p=log_p.clone(), shorter=shorter, factor=factor)


def ngram_stages(
    stages: StageList, reading: Reading, position: int, *, settings: Sampling, threads: Sequence[int] = ()
) -> Candidates:
    """Record each order's prediction of the likeliest tokens after a position, and the choice of one."""
    model, tokenizer = reading.model, reading.tokenizer
    assert isinstance(model, NGram)
    V, width = model.config.vocab_size, model.config.order - 1
    tokens = reading.tokens[0, reading.before : position + 1]  # texts were counted without special tokens before them
    context = torch.cat([tokens.new_full((width,), V), tokens])[len(tokens) :]
    all_orders = list(orders(model, context))
    logits = all_orders[-1].log_p[: output_vocab_size(model, tokenizer.vocab_size)]
    choice = candidates(logits, settings, lambda ids: pieces(tokenizer, ids))
    stages.threads = {"rows": shown_threads(len(reading.ids), position, requested=threads), "order": width + 1}
    stages.record_tokens("context", reading.ids, reading.pieces, position=position)
    known = [id for id in context.tolist() if id < V]
    texts, words = pieces(tokenizer, known), {"width": width, "own": len(known)}
    last, by = sent("context", torch.tensor(known), ("token", texts), scale="positive"), NGram.forward_features
    stages.record("context.last", last, text="last-tokens", numbers={"order": width + 1}, words=words, by=by)
    for order in all_orders:
        _order_stage(stages, model, order, choice=choice, context=texts[len(texts) - order.n + 1 :])
    longest = torch.stack([torch.where(order.counts > 0, order.n, 0) for order in all_orders]).amax(0)
    tensors = [choice.sent("log p", choice.logits, "signed"), choice.sent("order", longest, "positive")]
    numbers = {"vocab_size": len(choice.logits)}
    stages.record("output.logits", *tensors, text="log-probabilities", numbers=numbers, by=NGram.head)
    choice_stages(stages, choice)
    return choice


def _order_stage(stages: StageList, model: NGram, order: NGramOrder, *, choice: Candidates, context: list[str]) -> None:
    """Record one order; `context` are its tokens as text."""
    smoothing, p = model.config.smoothing, order.log_p.exp()
    interpolated = isinstance(smoothing, Interpolated)
    numbers: dict[str, Any] = {"count of the context": int(order.counts.sum())}
    numbers["different tokens after it"] = int((order.counts > 0).sum())
    tensors = [choice.sent("probability", p, "probability"), choice.sent("counts", order.counts, "positive")]
    if order.factor is not None and order.shorter is not None:
        numbers["γ(c)"] = float(torch.tensor(order.factor).exp())
        below = torch.full_like(p, 1 / len(p)) if isinstance(smoothing, AddK) else order.shorter.exp()
        backed_off = numbers["γ(c)"] * below
        backed_off = backed_off if interpolated else backed_off.masked_fill(order.counts > 0, 0.0)
        tensors.append(choice.sent("from the shorter context", backed_off, "probability"))
        counted = (p - backed_off).clamp(min=0.0).masked_fill(order.counts == 0, 0.0)
        tensors.append(choice.sent("from its own counts", counted, "probability"))
    if isinstance(smoothing, Interpolated) and order.n == model.config.order:
        numbers |= dict(zip(("D₁", "D₂", "D₃₊"), discounts(smoothing, model._host("counts", order.n)), strict=True))
    if isinstance(smoothing, AddK | StupidBackoff):
        numbers |= {"k": smoothing.k} if isinstance(smoothing, AddK) else {"alpha": smoothing.alpha}
    after = f"after “{' '.join(context)}”" if context else "in any context"
    about = f"How often each token occurred {after}."
    if order.n > 1 and not order.known:
        complete = len(context) == order.n - 1
        about = f"Nothing was counted {after}" if complete else "The text is too short for this order"
        about += ": the shorter context decides."
    elif interpolated and order.n < model.config.order:
        about += " Here a counts the different tokens before each, not its occurrences."
    text, words = f"order-{'1-' if order.n == 1 else ''}{smoothing.kind}", {"n": order.n, "about": about}
    stages.record(f"order.{order.n}", *tensors, text=text, numbers=numbers, words=words, by=smooth)
