"""Quantise a Transformer's weights to 16, 8 or 4 bits: a decode step reads every weight once, so smaller is faster.

A weight w is stored as bf16, or as an integer q with w ≈ scale · q. In 8 bits a row has one scale. In 4 bits every 32
consecutive weights have a scale and a centre, w ≈ scale · q + centre, as in GGUF's Q4_1. Embedding tables, norms and
biases keep their dtype. With 4 bits the LM head is stored in 8, because it is the most sensitive to errors.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.decode.fast.matmul import MatrixSpec, fastest, pack_weight
from weft.decode.fast.quantized_weights import DTYPES, GROUP, Bits, Packed
from weft.errors import ConfigError, ModelError
from weft.models import heads
from weft.models.base import LanguageModel
from weft.models.transformer import Transformer
from weft.nn.activations import apply_softcap
from weft.nn.dropout import RowRng
from weft.nn.experts import ExpertLayers
from weft.nn.linear import Linear, LowRank
from weft.progress import bar

HEAD = "output.words"  # name of the LM head's layer, in files too


class QuantizedLinear(nn.Module):
    """A linear layer with quantised weights, for x of dtype `dtype`: (…, K) → (…, N)."""

    def __init__(self, weight: Packed, bias: Tensor | None, dtype: torch.dtype):
        super().__init__()
        spec = MatrixSpec(*weight.shape, weight.groups, weight.numbers.device)
        self.matmul = fastest(weight.bits, spec, dtype).make(weight)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor, rng: RowRng | None = None) -> Tensor:
        y = self.matmul(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.matmul.N)
        return y if self.bias is None else y + self.bias


class QuantizedHead(heads.LMHead):
    """LM head with a quantised table. A tied model keeps its embeddings beside it."""

    def __init__(self, head: heads.LMHead, words: QuantizedLinear):
        nn.Module.__init__(self)
        self.scale, self.softcap, self.weight, self.words = head.scale, head.softcap, None, words
        self.dense, self.transform = head.dense, head.transform

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None = None, *, rng: RowRng | None = None) -> Tensor:
        return apply_softcap(self.words(self.prepare(x)), self.softcap)


class SplitExperts(ExpertLayers):
    """Experts whose matrices are layers of their own, one per expert, so that they can be quantised."""

    fused = False

    def __init__(self, fused: ExpertLayers):
        nn.Module.__init__(self)
        self.settings, self.activation, self.exchange = fused.settings, fused.activation, None
        self.gate_up = _split(fused.gate_up, fused.gate_up_bias)  # type: ignore[assignment]
        self.down = _split(fused.down, fused.down_bias)  # type: ignore[assignment]

    def product(self, name: Literal["gate_up", "down"], x: Tensor, ends: Tensor) -> Tensor:
        rows = [x[begin:end] for begin, end in pairwise([0, *ends.tolist()])]
        layers: Any = getattr(self, name)
        return torch.cat([layer(part) for layer, part in zip(layers, rows, strict=True) if len(part)])


def _split(weight: Tensor, bias: Tensor | None) -> nn.ModuleList:
    """Linear layers whose weights are views of fused ones (experts, outputs, inputs)."""
    _, outputs, inputs = weight.shape
    with torch.device("meta"):
        layers = nn.ModuleList(Linear(inputs, outputs, bias=bias is not None) for _ in weight)
    for number, layer in enumerate(layers):
        layer.weight = nn.Parameter(weight[number].detach(), requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias[number].detach(), requires_grad=False)
    return layers


def check_bits(bits: str) -> Bits:
    for known in DTYPES:
        if bits == known:
            return known
    raise ConfigError(f"quantize = '{bits}': expected 'bf16', 'int8' or 'int4'")


@torch.no_grad()
def quantize(model: LanguageModel, bits: str, saved: dict[str, Tensor] | None = None) -> LanguageModel:
    """Quantise a Transformer's weights in place, on their device.

    The model can then generate and be evaluated, but not be trained or saved. `saved` receives all of its tensors by
    name, from which `fill` restores them into an empty model.
    """
    width = check_bits(bits)
    if not isinstance(model, Transformer):
        kind = getattr(model.config, "kind", type(model).__name__)
        raise ModelError(f"a model of kind '{kind}' can't be quantized; Transformers can")
    dtype, layers = model.embedding.weight.dtype, _quantized_layers(model, width)

    @torch.no_grad()  # applies to one thread only
    def pack(name: str) -> tuple[Packed, Tensor | None]:
        weight, bias = _weight_and_bias(model, name)
        return pack_weight(layers[name], weight), bias

    with bar("quantizing", len(layers)) as advance, _map_in_threads(model, layers.values()) as parallel_map:
        for name, (weight, bias) in zip(layers, parallel_map(pack, layers), strict=True):
            if saved is not None:
                saved |= {f"{name}.{key}": tensor for key, tensor in weight._asdict().items() if tensor is not None}
            _replace_layer(model, name, QuantizedLinear(weight, bias, dtype))
            advance(1)
    if saved is not None:
        saved |= {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return model.eval()


def fill(model: Transformer, bits: Bits, saved: Mapping[str, Tensor]) -> None:
    """Give a Transformer with empty weights the tensors that `quantize` saved; ValueError if they don't match it."""
    tensors = dict(saved)
    if "embedding.weight" not in tensors:
        raise ValueError("not the weights of a Transformer")
    dtype = tensors["embedding.weight"].dtype
    for name, stored in _quantized_layers(model, bits).items():
        weight = Packed(*(tensors.pop(f"{name}.{key}", None) for key in Packed._fields))  # type: ignore[arg-type]
        empty, bias = _weight_and_bias(model, name)
        if weight.numbers is None or not weight.is_for(stored, *empty.shape):
            raise ValueError(f"{name}: not of this model's shape")
        _replace_layer(model, name, QuantizedLinear(weight, bias, dtype))
    expected = {name: (tensor.shape, dtype) for name, tensor in model.state_dict().items()}
    if expected != {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}:
        raise ValueError("not the weights of this model")
    model.load_state_dict(tensors, assign=True)
    model.requires_grad_(False).eval()


@contextmanager
def _map_in_threads(model: Transformer, widths: Iterable[Bits]) -> Iterator[Callable[..., Iterable[Any]]]:
    """Yield a `map` that, on a CPU, runs on torch's number of threads with one torch thread each. Quantising a matrix
    is many small operations, and synchronising threads after each would take longer than one thread alone."""
    device, dtype = model.embedding.weight.device, model.embedding.weight.dtype
    if device.type != "cpu":
        yield map
        return
    for bits in set(widths):
        fastest(bits, MatrixSpec(GROUP, GROUP, 1, device), dtype)  # time kernels before the threads disturb the clock
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads, "quantize", torch.set_num_threads, (1,)) as pool:
        try:
            yield pool.map
        finally:
            torch.set_num_threads(threads)  # applies to threads started later too


def _quantized_layers(model: Transformer, bits: Bits) -> dict[str, Bits]:
    """Names and widths of the layers to quantise: all linear layers, those of experts once they are split, and the LM
    head, with 4 bits in 8."""
    for name, part in [*model.named_modules()]:
        if type(part) is ExpertLayers:
            model.set_submodule(name, SplitExperts(part))
    layers = {name: bits for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    if type(model.output) is heads.LMHead:
        layers[HEAD] = "bf16" if bits == "bf16" else "int8"
    return layers


def _weight_and_bias(model: Transformer, name: str) -> tuple[Tensor, Tensor | None]:
    if name == HEAD:
        head = model.output
        assert isinstance(head, heads.LMHead)
        return (model.embedding.weight if head.weight is None else head.weight), head.bias
    part = model.get_submodule(name)
    linear = part.merge() if isinstance(part, LowRank) else part
    return linear.weight, linear.bias  # type: ignore[return-value]


def _replace_layer(model: Transformer, name: str, layer: QuantizedLinear) -> None:
    if name == HEAD:
        assert isinstance(model.output, heads.LMHead)
        model.output = QuantizedHead(model.output, layer)
    else:
        model.set_submodule(name, layer)
