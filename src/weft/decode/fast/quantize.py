"""Weights in 16, 8 or 4 bits: a decoding step reads every weight once, so smaller weights are faster steps.

A weight w of a row is stored as bf16, or as a whole number q with w ≈ scale · q. In 8 bits a row has one scale; in 4
bits every 32 neighbours have their own, and a centre, w ≈ scale · q + centre, as in GGUF's Q4_1. Only weights are
stored so; tables that are looked up, norms and biases stay as they are, and with 4 bits the table that gives the logits
is stored in 8, because every error in it shows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.decode.fast.products import Case, fastest, packed, product
from weft.decode.fast.rounding import DTYPES, GROUP, Bits, Packed
from weft.errors import ConfigError, ModelError
from weft.models import heads
from weft.models.base import LanguageModel
from weft.models.transformer import Transformer
from weft.nn.activations import apply_softcap
from weft.nn.dropout import RowRng
from weft.nn.linear import LowRank
from weft.progress import bar

HEAD = "output.words"  # the name of the layer that gives the logits


class QuantizedLinear(nn.Module):
    """A linear layer with quantized weights, for x of the type `dtype`: (…, K) → (…, N)."""

    def __init__(self, weight: Packed, bias: Tensor | None, dtype: torch.dtype):
        super().__init__()
        self.product = product(weight, dtype)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor, rng: RowRng | None = None) -> Tensor:
        y = self.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.product.N)
        return y if self.bias is None else y + self.bias


class QuantizedHead(heads.LMHead):
    """Features to words through a quantized table, which a tied model has beside its embeddings."""

    def __init__(self, head: heads.LMHead, words: QuantizedLinear):
        nn.Module.__init__(self)
        self.scale, self.softcap, self.weight, self.words = head.scale, head.softcap, None, words
        self.dense = head.dense

    def forward(self, features: Tensor, table: Tensor, mask: Tensor | None = None, rng: RowRng | None = None) -> Tensor:
        return apply_softcap(self.words(self.prepare(features)), self.softcap)


def check_bits(bits: str) -> Bits:
    for known in DTYPES:
        if bits == known:
            return known
    raise ConfigError(f"quantize = '{bits}': expected 'bf16', 'int8' or 'int4'")


@torch.no_grad()
def quantize(model: LanguageModel, bits: str, kept: dict[str, Tensor] | None = None) -> LanguageModel:
    """Quantize a Transformer's weights in place, on the device where they are.

    Afterwards the model can write and be evaluated, but not be trained or saved. With `kept`, all that it holds is put
    there, by names, as `fill` gives it to an empty model.
    """
    width = check_bits(bits)
    if not isinstance(model, Transformer):
        kind = getattr(model.config, "kind", type(model).__name__)
        raise ModelError(f"a model of kind '{kind}' can't be quantized; Transformers can")
    dtype, places = model.embedding.weight.dtype, _places(model, width)

    @torch.no_grad()  # which holds for a thread alone
    def rounded(place: _Place) -> tuple[Packed, Tensor | None]:
        weight, bias = place.read(model)
        return packed(place.bits, weight), bias

    with bar("quantizing", len(places)) as advance, _each_alone(model, places) as mapped:
        for place, (small, bias) in zip(places, mapped(rounded, places), strict=True):
            if kept is not None:
                kept |= {f"{place.name}.{key}": each for key, each in small._asdict().items() if each is not None}
            place.put(model, QuantizedLinear(small, bias, dtype))
            advance(1)
    if kept is not None:
        kept |= {name: each.detach() for name, each in model.state_dict().items()}
    return model.eval()


def fill(model: Transformer, bits: Bits, kept: Mapping[str, Tensor]) -> None:
    """Give a Transformer with empty weights those that `quantize` kept; ValueError where they are not for it."""
    rest = dict(kept)
    if "embedding.weight" not in rest:
        raise ValueError("not the weights of a Transformer")
    dtype = rest["embedding.weight"].dtype
    for place in _places(model, bits):
        weight = Packed(*(rest.pop(f"{place.name}.{key}", None) for key in Packed._fields))  # type: ignore[arg-type]
        empty, bias = place.read(model)
        if weight.numbers is None or not weight.is_for(place.bits, *empty.shape):
            raise ValueError(f"{place.name}: not of this model's shape")
        place.put(model, QuantizedLinear(weight, bias, dtype))
    own = {name: (each.shape, dtype) for name, each in model.state_dict().items()}
    if own != {name: (each.shape, each.dtype) for name, each in rest.items()}:
        raise ValueError("not the weights of this model")
    model.load_state_dict(rest, assign=True)
    model.requires_grad_(False).eval()


@contextmanager
def _each_alone(model: Transformer, places: "list[_Place]") -> Iterator[Callable[..., Iterable[Any]]]:
    """`map`, on a CPU in as many threads as torch has, in each of which torch has one: a matrix is rounded in many
    small operations, and threads that wait for each other after every one of them take longer than one alone."""
    device, dtype = model.embedding.weight.device, model.embedding.weight.dtype
    if device.type != "cpu":
        yield map
        return
    for bits in {place.bits for place in places}:
        fastest(bits, Case(GROUP, GROUP, 1, device), dtype)  # by a clock that nothing else disturbs, and then known
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads, "quantize", torch.set_num_threads, (1,)) as pool:
        try:
            yield pool.map
        finally:
            torch.set_num_threads(threads)  # also for threads that begin later


class _Place(NamedTuple):
    """A matrix that is quantized, by the name of its layer, and its width."""

    name: str
    bits: Bits

    def read(self, model: Transformer) -> tuple[Tensor, Tensor | None]:
        if self.name == HEAD:
            head = model.output
            assert isinstance(head, heads.LMHead)
            return (model.embedding.weight if head.weight is None else head.weight), head.bias
        part = model.get_submodule(self.name)
        whole = part.merge() if isinstance(part, LowRank) else part
        return whole.weight, whole.bias  # type: ignore[return-value]

    def put(self, model: Transformer, part: QuantizedLinear) -> None:
        if self.name == HEAD:
            assert isinstance(model.output, heads.LMHead)
            model.output = QuantizedHead(model.output, part)
        else:
            model.set_submodule(self.name, part)


def _places(model: Transformer, bits: Bits) -> list[_Place]:
    """All linear layers, and the table that gives the logits, with 4 bits in 8."""
    linear = [_Place(name, bits) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    head = [_Place(HEAD, "bf16" if bits == "bf16" else "int8")] if type(model.output) is heads.LMHead else []
    return linear + head
