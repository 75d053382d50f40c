"""Values that go to and come from a student's function: drawn by seed, sent as JSON, and compared."""

import base64
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import PlainSerializer, PlainValidator
from torch import Tensor

MAX_KEYS = 3  # that are named, of those that differ
MAX_TENSOR_BYTES = 1 << 24  # of a tensor in an answer
FLOORS = {torch.float64: 1e-9, torch.float32: 2e-5}  # relative difference that other orders of summation may make
NAMES = "float64 float32 float16 bfloat16 bool int64 int32 int16 int8 uint8"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in NAMES.split()}


class Draw:
    """Random values by seed, the same on every machine. Numbers are float64."""

    def __init__(self, seed: int) -> None:
        self.rng, self.random = np.random.default_rng(seed), random.Random(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.tensor(self.rng.standard_normal(shape) * scale, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        """Return numbers in [0, 1)."""
        return torch.tensor(self.rng.random(shape), dtype=torch.float64)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Return integers in [low, high)."""
        return torch.tensor(self.rng.integers(low, high, shape))

    def probabilities(self, *shape: int) -> Tensor:
        """Return distributions over the last dimension."""
        return (2 * self.normal(*shape)).softmax(-1)


class MismatchError(Exception):
    """An answer has another shape or type than expected."""


class OtherValue(str):
    """Description of a value that is not a tensor, number, text, list, tuple or dict."""


def _encode(value: Any) -> Any:
    """Convert a value to JSON data."""
    if isinstance(value, OtherValue):
        return {"other": str(value)}
    if isinstance(value, Tensor):
        if value.nbytes > MAX_TENSOR_BYTES or str(value.dtype)[6:] not in DTYPES:
            return {"other": f"a tensor of {value.dtype} and shape {tuple(value.shape)}"}
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": str(value.dtype)[6:], "shape": list(value.shape), "data": base64.b64encode(data).decode()}
    if isinstance(value, list | tuple):
        items = list(map(_encode, value))
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        return {"dict": [[_encode(key), _encode(item)] for key, item in value.items()]}
    return value


def _decode(data: Any) -> Any:
    """Convert JSON data, which may come from a student's code, back to a value."""
    match data:
        case list():
            return list(map(_decode, data))
        case {"tuple": list(items)}:
            return tuple(map(_decode, items))
        case {"dict": list(items)}:
            return {_decode(key): _decode(item) for key, item in items}
        case {"tensor": dtype, "shape": shape, "data": text}:
            raw = np.frombuffer(bytearray(base64.b64decode(text)), np.uint8)
            return torch.from_numpy(raw).view(DTYPES[dtype]).reshape(shape)
        case {"other": text}:
            return OtherValue(text)
    return data


Value = Annotated[Any, PlainSerializer(_encode), PlainValidator(_decode)]


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to everything in a nested value but its lists, tuples and dicts."""
    if isinstance(value, Mapping):
        return {key: map_leaves(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map_leaves(item, change) for item in value)
    return change(value)


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Apply a function to every tensor of a nested value."""
    return map_leaves(value, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def to_tensor(value: Any) -> Any:
    """Convert an array to a tensor, NumPy's numbers to Python's, and other objects to a description."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value)) if value.dtype.name in DTYPES else value.tolist()
    value = value.item() if isinstance(value, np.generic) else value
    known = value is None or isinstance(value, Tensor | int | float | str)
    return value if known else OtherValue("..." if value is ... else type(value).__name__)


def is_float(value: Any) -> bool:
    """Return whether a value is a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def parts(value: Any, names: Sequence[str]) -> dict[str, Any]:
    """Split the outputs of a function by name."""
    if len(names) == 1:
        return {names[0]: value}
    if isinstance(value, Mapping):
        value = tuple(value.get(name, OtherValue("nothing")) for name in names)
    if not isinstance(value, tuple | list) or len(value) != len(names):
        raise MismatchError(f"expected {len(names)} results, {', '.join(names)}; got {_described(value)}")
    return dict(zip(names, value, strict=True))


def _described(value: Any) -> str:
    """Describe a value in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, OtherValue | None):
        return str(value)
    return type(value).__name__ + (f" of {len(value)}" if isinstance(value, list | tuple) else "")


def _mismatch(expected: Any, given: Any) -> MismatchError:
    return MismatchError(f"expected {_described(expected)}, got {_described(given)}")


def gap(expected: Any, given: Any) -> float:
    """Return the largest absolute difference of two values; raise MismatchError if they cannot be compared."""
    if isinstance(expected, Tensor) and isinstance(given, Tensor) and expected.dtype == given.dtype:
        if torch.equal(expected, given):
            return 0.0  # as an argument, mostly
    elif isinstance(given, OtherValue) or (given is None) != (expected is None):
        raise _mismatch(expected, given)
    if isinstance(expected, list | tuple):
        given = given.tolist() if isinstance(given, Tensor) else given
        if not isinstance(given, list | tuple) or len(given) != len(expected):
            raise MismatchError(f"expected a list of {len(expected)}, got {_described(given)}")
        return max(map(gap, expected, given), default=0.0)
    if isinstance(expected, Mapping):
        if not isinstance(given, Mapping):
            raise _mismatch(expected, given)
        if keys := sorted(map(str, set(expected) ^ set(given))):
            raise MismatchError(f"only what is expected or what is given has the key {' or '.join(keys[:MAX_KEYS])}")
        return max((gap(item, given[key]) for key, item in expected.items()), default=0.0)
    if not isinstance(expected, Tensor | int | float):
        if type(expected) is not type(given):
            raise _mismatch(expected, given)
        return 0.0 if expected == given else math.inf
    try:
        if isinstance(expected, int | float) and isinstance(given, int | float):  # without tensors: these are many
            distance = abs(float(expected) - float(given))
            alike = expected == given or (math.isnan(expected) and math.isnan(given))
            return 0.0 if alike else distance if math.isfinite(distance) else math.inf
        if isinstance(given, Tensor) and given.is_complex():
            raise _mismatch(expected, given)
        a, b = (torch.as_tensor(each, dtype=torch.float64).detach() for each in (expected, given))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise _mismatch(expected, given) from None
    if a.shape != b.shape:
        raise MismatchError(f"its shape is {tuple(b.shape)}; expected {tuple(a.shape)}")
    differences = (a - b).abs()[(a != b) & ~(a.isnan() & b.isnan())]
    return float(differences.nan_to_num(math.inf, math.inf).max()) if differences.numel() else 0.0


def same(expected: Any, given: Any, tolerance: float = 0.0) -> bool:
    """Return whether two values have the same shape, and no numbers that differ by more than a tolerance."""
    try:
        return gap(expected, given) <= tolerance
    except MismatchError:
        return False


def magnitude(value: Any) -> float:
    """Return the largest finite absolute number in a value."""
    if isinstance(value, Mapping | list | tuple):
        return max(map(magnitude, value.values() if isinstance(value, Mapping) else value), default=0.0)
    if not isinstance(value, Tensor):
        return abs(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
    numbers = value.detach().double()
    return float(numbers.abs().where(numbers.isfinite(), 0.0).max()) if numbers.numel() else 0.0
