"""Effect of removing attention heads: their outputs are set to zero, and the model continues from there.

without_heads(reading, [("decoder", 1, 3), ("decoder", 1, 4)])   # surprisal and continuation without two heads
ablation_costs(reading)                                          # loss increase without each head
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from weft.decode.config import Sampling
from weft.decode.generate import complete
from weft.decode.prompt import Prompt
from weft.errors import ConfigError
from weft.explain.attention.maps import AttentionKind, probability_names
from weft.explain.capture import Change, capture, matching, taps, without_head
from weft.explain.reading import Reading, SourceTokens
from weft.explain.surprise import Surprise, predicts_masked, surprise
from weft.models.base import LanguageModel, evaluating
from weft.models.config import Bahdanau
from weft.models.transformer import Transformer

ABLATED_TOKENS = 128  # tokens of the text on which each head's cost is measured, one forward pass per head
BATCH_TOKENS = 1024  # tokens in one forward pass
WRITTEN_TOKENS = 30  # tokens of the continuation without the heads

HeadIndex = tuple[AttentionKind, int, int]  # kind, layer, head


@dataclass(frozen=True)
class WithoutHeads:
    """Surprisal without some heads (None without a token to score), and the greedy continuation or translation."""

    surprise: Surprise | None
    writes: str | None


def without_heads(reading: Reading, heads: Sequence[HeadIndex], tokens: int = WRITTEN_TOKENS) -> WithoutHeads:
    """Return a text's surprisal without these heads, and the next `tokens` that the model writes without them."""
    model, tokenizer, surprisal, writes = reading.model, reading.tokenizer, None, None
    with evaluating(model), capture(model, replace=removal(model, heads)):
        if len(reading.ids) > max(1, reading.before):
            surprisal = surprise(reading, top=1)
        if not predicts_masked(model):
            # With a source the target starts from its prefix; else the text continues, framed as in `generate`.
            text, prefix = reading.ids[reading.before :], reading.ids[: reading.before]
            prompt = Prompt.of(tokenizer, [*tokenizer.leading, *text] if reading.source is None else list(prefix))
            greedy = Sampling(temperature=0.0, max_tokens=tokens)
            writes = complete(model, [prompt], greedy, source=reading.model_kwargs.get("source"))[0].text
    return WithoutHeads(surprisal, writes)


def removal(model: LanguageModel, heads: Sequence[HeadIndex]) -> dict[str, Change]:
    """Return the replacements for `capture` that set these heads' outputs to zero."""
    names, all_taps = probability_names(model), taps(model)
    by_layer: dict[str, list[int]] = {}
    for kind, layer, head in heads:
        if kind not in names:
            raise ConfigError(f"heads: '{kind}': this model has {' and '.join(names)} attention")
        count = 1 if isinstance(model.config, Bahdanau) else model.config.attention.heads  # type: ignore[attr-defined]
        for name, number, limit in (("layer", layer, len(matching(names[kind], all_taps))), ("head", head, count)):
            if not 0 <= number < limit:
                raise ConfigError(f"heads: {name} {number} of {kind} attention: this model has 0 to {limit - 1}")
        by_layer.setdefault(names[kind].replace("*", str(layer)), []).append(head)
    if isinstance(model.config, Bahdanau):  # its one head gives a context, which the next query depends on
        return {"attention": torch.zeros_like} if heads else {}
    return {name: without_head(*removed) for name, removed in by_layer.items()}


def remove_heads(model: LanguageModel, heads: Sequence[HeadIndex]) -> None:
    """Set these heads' outputs to zero for good: their columns of the output projection, in place."""
    removal(model, heads)  # refuses heads that the model does not have
    for kind, layer, head in heads:
        name = probability_names(model)[kind].replace("*", str(layer)).replace("probabilities", "heads")
        tap = taps(model).get(name)
        if tap is None or tap.calls > 1 or not isinstance(weight := tap.module.weight, torch.Tensor):
            raise ConfigError(f"heads: layer {layer} of {kind} attention has no output projection of its own")
        weight = weight.detach().clone()  # the model's may be a file's memory
        weight.view(weight.shape[0], model.config.attention.heads, -1)[:, head] = 0.0  # type: ignore[attr-defined]
        tap.module.weight = torch.nn.Parameter(weight)


@torch.no_grad()
def ablation_costs(reading: Reading) -> dict[AttentionKind, NDArray[np.float64]]:
    """Return the increase of the loss without each head, in nats per token, (layers, heads) by kind."""
    model = reading.model
    assert isinstance(model, Transformer) and model.decoder is not None
    decoder = model.decoder
    ids, heads = reading.tokens[:, :ABLATED_TOKENS], model.config.attention.heads
    calls: list[tuple[Tensor, dict[str, Any]]] = []  # input and arguments of each block of the decoder

    with evaluating(model), ExitStack() as hooks:
        for block in decoder.blocks:
            keep = block.register_forward_pre_hook(lambda _, x, kwargs: calls.append((x[0], kwargs)), with_kwargs=True)
            hooks.callback(keep.remove)
        baseline = _losses(model, model.features(ids, **reading.model_kwargs), ids)

    def run_all(rows: int, _: int) -> Tensor:
        source = SourceTokens(reading.model_kwargs["source"].tokens.expand(rows, -1))
        return model.features(ids.expand(rows, -1), source=source)

    def run_from(rows: int, layer: int) -> Tensor:  # from the recorded input of a decoder layer upwards
        x = calls[layer][0].expand(rows, -1, -1)
        for block, (_, kwargs) in zip(decoder.blocks[layer:], calls[layer:], strict=True):
            if kwargs["source"] is not None:
                keys_values, mask = kwargs["source"]
                kwargs = {**kwargs, "source": (tuple(each.expand(rows, -1, -1, -1) for each in keys_values), mask)}
            x = block(x, **kwargs)
        return x if decoder.norm is None else decoder.norm(x)

    # a batch ablates one head per row, and the decoder's layers below the ablated one are not run again
    batch = max(1, BATCH_TOKENS // max(ids.shape[1], len(reading.source or ())))
    costs: dict[AttentionKind, NDArray[np.float64]] = {}
    with evaluating(model):
        for kind, name in probability_names(model).items():
            stack = model.encoder if kind == "encoder" else decoder
            assert stack is not None
            layers, run = len(stack.layers), run_all if kind == "encoder" else run_from
            costs[kind] = np.empty((layers, heads))
            for layer, first in product(range(layers), range(0, heads, batch)):
                removed = list(range(first, min(first + batch, heads)))
                with capture(model, replace={name.replace("*", str(layer)): partial(_without_one_per_row, removed)}):
                    features = run(len(removed), layer)
                costs[kind][layer, first : first + batch] = _losses(model, features, ids) - baseline
    return costs


def _without_one_per_row(heads: list[int], probabilities: Tensor) -> Tensor:
    """Return probabilities (rows, heads, …) with head `heads[i]` of row i set to zero."""
    changed = probabilities.clone()
    changed[torch.arange(len(heads)), heads] = 0.0
    return changed


def _losses(model: Transformer, features: Tensor, ids: Tensor) -> NDArray[np.float64]:
    """Return nats per token of ids (1, time) for each row of features (rows, time, d_model)."""
    targets = ids[0, 1:]  # the logits of one row at a time, because they are large
    return np.array([float(F.cross_entropy(model.head(row[None, :-1])[0].float(), targets)) for row in features])
