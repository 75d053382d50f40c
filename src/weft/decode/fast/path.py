"""The interface of decoding paths, and the checks that fast paths share: which models they can run."""

from collections.abc import Collection
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor

from weft.config import Config
from weft.models.base import LanguageModel, State
from weft.models.config import Decoder, EncoderDecoder
from weft.models.head_config import LMHead
from weft.models.transformer import Transformer
from weft.nn.config import Experts, Gated, RMSNorm
from weft.nn.position_config import Rotary
from weft.nn.scaled_dot_product import Probabilities


class PlainPath:
    """Advances a model and its state by the model's own methods, which fit everything. Faster paths derive from it."""

    survives_move: ClassVar[bool] = False  # whether it can be used after the state's memory has moved
    survives_truncation: ClassVar[bool] = False  # whether it can be used after the state has forgotten tokens

    def __init__(self, model: Any, state: Any):
        self.model, self.state = model, state

    @classmethod
    def fits(cls, model: LanguageModel, state: State) -> bool:
        """Whether it can take decode steps."""
        return True

    @classmethod
    def fits_prefill(cls, model: LanguageModel, state: State, tokens: int) -> bool:
        """Whether to read this many tokens, of all rows together."""
        return True

    def __call__(self, tokens: Tensor) -> Tensor:
        """Read tokens (batch,) → logits (batch, V), valid until the next call."""
        return self.model.step(tokens.unsqueeze(1), self.state)[:, -1]

    def read(self, tokens: Tensor, lengths: Tensor | None) -> Tensor:
        """Read tokens (batch, time), the first lengths[i] of row i → features (batch, time, …) for the head."""
        return self.model.advance(tokens, self.state, lengths)


def setting_names(*names: str, **nested: str) -> frozenset[str]:
    return frozenset(names) | {f"{name}.{leaf}" for name, leaves in nested.items() for leaf in leaves.split()}


# Settings in which models of LLaMA's shape may differ. Dropout and initial weights don't matter in a step.
LLAMA = setting_names(
    *("vocab_size", "context", "layers", "d_model", "embedding_scale", "dropout", "init"),
    attention="heads kv_heads d_head scale dropout",
    feedforward="d_ff dropout",
    norm="eps",
    position="base scaling",
    head="tied bias scale",
)


def without_experts(settings: Config) -> Config:
    """Settings in which every layer of a mixture of experts is one of its dense layers, or LLaMA's."""
    mixture = getattr(settings, "feedforward", None)
    if not isinstance(mixture, Experts):
        return settings
    return settings.replace(feedforward=mixture.dense or Gated(d_ff=mixture.d_ff))


def is_llama_like(settings: Config) -> bool:
    """Whether a model is LLaMA with other sizes."""
    if not isinstance(settings, Decoder) or not isinstance(settings.position, Rotary):
        return False
    if not (isinstance(settings.feedforward, Gated) and isinstance(settings.norm, RMSNorm)):
        return False
    return settings.position.changes_after(settings.context) is None and others_at_default(settings, LLAMA)


def others_at_default(settings: Decoder | EncoderDecoder, names: Collection[str]) -> bool:
    """Whether a model predicts tokens and all settings outside `names`, and what is nested in them, have their default.

    Positions other than rotary ones may have any settings: paths read them from the model's own tables.
    """
    names = names if isinstance(settings.position, Rotary) else {*names, "position"}
    prefixes = tuple(f"{name}." for name in names)
    return isinstance(settings.head, LMHead) and all(f"{name}.".startswith(prefixes) for name in _changed(settings))


def _changed(settings: Config) -> set[str]:
    """Dotted names of the settings that differ from their defaults."""
    names: set[str] = set()
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if value != field.default:
            nested = {f"{name}.{leaf}" for leaf in _changed(value)} if isinstance(value, Config) else set()
            names |= nested or (set() if isinstance(value, Config) and field.is_required() else {name})
    return names


def is_float32_on_cpu(model: LanguageModel) -> TypeGuard[Transformer]:
    """Whether a model is a Transformer whose fast paths run on a CPU in float32."""
    if not isinstance(model, Transformer) or model.training:
        return False
    table = model.embedding.weight
    if table.device.type != "cpu" or table.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return False
    return has_readable_weights(model)


def has_readable_weights(model: Transformer) -> bool:
    """Whether a path may bypass the modules: all weights are in this process, and no hook or watcher observes them."""
    return model.shards == 1 and not any(
        part.watchers if isinstance(part, Probabilities) else part._forward_hooks or part._forward_pre_hooks
        for part in model.modules()
    )


def positions_change(model: Transformer, length: int) -> bool:
    """Whether what is done at a position changes while a text grows to `length` tokens, as in dynamic NTK scaling."""
    context = model.config.context
    limits = [kind.position.changes_after(context) for kind in model.config.kinds() if kind.position is not None]
    return any(limit is not None and length > limit for limit in limits)
