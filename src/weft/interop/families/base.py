"""What a family of Hugging Face models is: its names for weights, and its settings in both directions."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.config import Tree, validate
from weft.errors import InteropError
from weft.interop.bundle import LazyWeights
from weft.interop.settings import Flat, Settings, Transformer, flat, nested
from weft.interop.table import Table
from weft.interop.weight_map import Rule

# the blocks of the Transformer of 2017: biases, a plain feed-forward, LayerNorm after each sublayer
POST_NORM = {
    "attention.bias": "all",
    "feedforward.kind": "plain",
    "norm.kind": "layer",
    "placement": "post",
    "init.kind": "normal",
    "init.depth_scaled": False,
}


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json.

    `architectures` maps each class of transformers that weft can read to the kind of head it has; the last one is the
    base model. Names of tensors are those of the whole model; a file with only the base model leaves `prefix` out.
    """

    kind: str
    title: str
    model: type[Transformer]
    architectures: Mapping[str, str]
    settings: Table
    rules: Callable[[Any], tuple[Rule, ...]]
    prefix: str = ""
    # settings that config.json does not give, from the names of the stored tensors
    by_weights: Mapping[str, Callable[[Collection[str]], bool]] = field(default_factory=dict)
    copies: Callable[[Any], Mapping[str, str]] = lambda model: {}  # tensors that repeat another one
    unused: tuple[str, ...] = ()  # patterns of tensors that weft has no use for
    fillers: Callable[[Any], LazyWeights] = lambda model: {}  # tensors that transformers warns about if missing
    # an old ending of a name, or a beginning that ends in a dot → the present one
    renames: Mapping[str, str] = field(default_factory=dict)

    def read(self, settings: Settings, architecture: str, known: Mapping[str, Any]) -> Transformer:
        """The model of a config.json; `known` are settings that the weights or other files give."""
        model = self.settings.read(settings, {"head.kind": self.architectures[architecture], **known})
        return validate(self.model, nested(model), settings.where)

    def write(self, model: Transformer) -> Tree:
        """The config.json of a model, as near as the family can come."""
        named = [name for name, head in self.architectures.items() if head == model.head.kind]
        if not named:
            raise InteropError(f"model.head.kind = '{model.head.kind}', which {self.title} does not have")
        return {"model_type": self.kind, "architectures": named[:1], **self.settings.write(flat(model))}

    def known(self, model: Transformer) -> Flat:
        """The settings of a model that would be read from its weights and other files, not from config.json."""
        pooling = ("head.pooling", "head.normalise") if model.head.kind == "embedding" else ()
        return {key: value for key, value in flat(model).items() if key in (*self.by_weights, *pooling)}
