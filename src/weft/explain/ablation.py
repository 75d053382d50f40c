"""What a model loses without some of its attention heads: they give zeros, and it reads on from there.

without_heads(reading, [("decoder", 1, 3), ("decoder", 1, 4)])   # the text's surprise, and what the model writes then
ablation_costs(reading)                                          # what each head alone is worth on the text
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from weft.decode.config import Sampling
from weft.decode.generate import complete
from weft.decode.prompt import Prompt
from weft.errors import ConfigError
from weft.explain.attention.maps import Kind, probability_places
from weft.explain.capture import Change, capture, matching, taps, without_head
from weft.explain.reading import Reading, SourceTokens
from weft.explain.surprise import Surprise, predicts_masked, surprise
from weft.models.base import LanguageModel, evaluating
from weft.models.config import Bahdanau
from weft.models.transformer import Transformer

ABLATED_TOKENS = 128  # of the text on which each head's cost is measured: it takes a forward pass for each
BATCH_TOKENS = 1024
WRITTEN_TOKENS = 30  # that a model goes on with, to be compared

HeadPlace = tuple[Kind, int, int]  # kind, layer, head


@dataclass(frozen=True)
class WithoutHeads:
    """A text as a model reads it while some heads give zeros: its surprise, None where it has no token to score, and
    what the model writes then, the likeliest token each time: after the text, or from the source. A masked one writes
    nothing."""

    surprise: Surprise | None
    writes: str | None


def without_heads(reading: Reading, heads: Sequence[HeadPlace], tokens: int = WRITTEN_TOKENS) -> WithoutHeads:
    """The surprise of a text without these heads, and the next `tokens` that the model writes."""
    model, found, writes = reading.model, None, None
    with evaluating(model), capture(model, replace=removed(model, heads)):
        if len(reading.ids) > max(1, reading.before):
            found = surprise(reading, top=1)
        if not predicts_masked(model):
            # what is written from a source begins as the target does; else it goes on after the text, as `generate`
            own, tokenizer = reading.ids[reading.before :], reading.tokenizer
            ids = [*tokenizer.leading, *own] if reading.source is None else list(reading.ids[: reading.before])
            prompt = Prompt.of(tokenizer, ids)
            greedy = Sampling(temperature=0.0, max_tokens=tokens)
            writes = complete(model, [prompt], greedy, source=reading.given.get("source"))[0].text
    return WithoutHeads(found, writes)


def removed(model: LanguageModel, heads: Sequence[HeadPlace]) -> dict[str, Change]:
    """What `capture` has to replace in a model, so that these heads give zeros."""
    places, layers = probability_places(model), taps(model)
    of_a_layer: dict[str, list[int]] = {}
    for kind, layer, head in heads:
        if kind not in places:
            raise ConfigError(f"heads: '{kind}': this model has {' and '.join(places)} attention")
        count = 1 if isinstance(model.config, Bahdanau) else model.config.attention.heads  # type: ignore[attr-defined]
        several = len(matching(places[kind], layers))
        for name, number, most in (("layer", layer, several), ("head", head, count)):
            if not 0 <= number < most:
                raise ConfigError(f"heads: {name} {number} of {kind} attention: this model has 0 to {most - 1}")
        of_a_layer.setdefault(places[kind].replace("*", str(layer)), []).append(head)
    if isinstance(model.config, Bahdanau):  # its one head gives a context, which the next query depends on
        return {"attention": torch.zeros_like} if heads else {}
    return {name: without_head(*several) for name, several in of_a_layer.items()}


@torch.no_grad()
def ablation_costs(reading: Reading) -> dict[Kind, NDArray[np.float64]]:
    """What the text loses in nats a token without each head, by kind.

    Several heads are left out at once, each in a row of its own, and a decoder's layers below are not run again.
    """
    model = reading.model
    assert isinstance(model, Transformer) and model.decoder is not None
    ids, heads = reading.tokens[:, :ABLATED_TOKENS], model.config.attention.heads
    calls: list[tuple[Tensor, dict[str, Any]]] = []  # what each block of the decoder was given

    def keep(_: nn.Module, given: tuple[Tensor], named: dict[str, Any]) -> None:
        calls.append((given[0], named))

    hooks = [block.register_forward_pre_hook(keep, with_kwargs=True) for block in model.decoder.blocks]
    try:
        with evaluating(model):
            whole = _losses(model, model.features(ids, **reading.given), ids)
    finally:
        for hook in hooks:
            hook.remove()

    def again(rows: int, _: int) -> Tensor:
        source = SourceTokens(reading.given["source"].tokens.expand(rows, -1))
        return model.features(ids.expand(rows, -1), source=source)

    on = partial(_from_layer, model, calls)
    ways: dict[Kind, tuple[int, Callable[[int, int], Tensor]]]
    ways = {"decoder": (len(calls), on), "cross": (len(calls), on)}
    if model.encoder is not None:
        ways["encoder"] = (len(model.encoder.layers), again)
    at_once = max(1, BATCH_TOKENS // max(ids.shape[1], len(reading.source or ())))
    found: dict[Kind, NDArray[np.float64]] = {}
    with evaluating(model):
        for kind, name in probability_places(model).items():
            layers, run = ways[kind]
            found[kind] = np.empty((layers, heads))
            for layer, first in product(range(layers), range(0, heads, at_once)):
                chosen = list(range(first, min(first + at_once, heads)))
                with capture(model, replace={name.replace("*", str(layer)): partial(_without_each, chosen)}):
                    features = run(len(chosen), layer)
                found[kind][layer, first : first + at_once] = _losses(model, features, ids) - whole
    return found


def _without_each(heads: list[int], probabilities: Tensor) -> Tensor:
    """Probabilities (rows, heads, …) with one head taken out of each row."""
    changed = probabilities.clone()
    changed[torch.arange(len(heads)), heads] = 0.0
    return changed


def _from_layer(model: Transformer, calls: Sequence[tuple[Tensor, dict[str, Any]]], rows: int, layer: int) -> Tensor:
    """Features (rows, time, d_model) of what a decoder's layer was given, read on from there in each row."""
    assert model.decoder is not None
    x = calls[layer][0].expand(rows, -1, -1)
    for block, (_, given) in zip(model.decoder.blocks[layer:], calls[layer:], strict=True):
        if given["source"] is not None:
            keys_values, over = given["source"]
            given = {**given, "source": (tuple(each.expand(rows, -1, -1, -1) for each in keys_values), over)}
        x = block(x, **given)
    return x if model.decoder.norm is None else model.decoder.norm(x)


def _losses(model: Transformer, features: Tensor, ids: Tensor) -> NDArray[np.float64]:
    """Nats a token of ids (1, time) in each row of features (rows, time, d_model), row by row: logits are large."""
    targets = ids[0, 1:]
    return np.array([float(F.cross_entropy(model.head(row[None, :-1])[0].float(), targets)) for row in features])
