"""Values that go to and come from a student's function: drawn by seed, sent as JSON, and compared."""

import base64
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_TENSOR_BYTES = 1 << 24  # of a tensor in an answer
FLOORS = {torch.float64: 1e-9, torch.float32: 2e-5}  # relative difference that other orders of summation may make
KINDS = "float64 float32 float16 bfloat16 bool int64 int32 int16 int8 uint8"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in KINDS.split()}


class Draw:
    """Random values by seed, the same on every machine. Numbers are float64."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.random = random.Random(seed)

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


def encode(value: Any) -> Any:
    """Convert a value to JSON data."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        value = value.detach().contiguous().cpu()
        if value.numel() * value.element_size() > MAX_TENSOR_BYTES or str(value.dtype)[6:] not in DTYPES:
            return {"other": f"a tensor of {value.dtype} and shape {tuple(value.shape)}"}
        data = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return {"tensor": str(value.dtype)[6:], "shape": list(value.shape), "data": base64.b64encode(data).decode()}
    if isinstance(value, list):
        return list(map(encode, value))
    if isinstance(value, tuple):
        return {"tuple": list(map(encode, value))}
    if isinstance(value, Mapping):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    return {"other": "..." if value is ... else type(value).__name__}


def to_tensors(value: Any) -> Any:
    """Convert the arrays of a nested value to tensors, and NumPy's numbers to Python's."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value)) if value.dtype.name in DTYPES else value.tolist()
    if isinstance(value, dict):
        return {key: to_tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [to_tensors(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


class OtherValue(str):
    """Description of a value that is not a tensor, number, text, list, tuple or dict."""


def decode(data: Any) -> Any:
    """Convert JSON data back to a value."""
    match data:
        case list():
            return list(map(decode, data))
        case {"tuple": list(items)}:
            return tuple(map(decode, items))
        case {"dict": list(items)}:
            return {decode(key): decode(item) for key, item in items}
        case {"tensor": dtype, "shape": shape, "data": text}:
            raw, kind = bytearray(base64.b64decode(text)), DTYPES[dtype]
            return (torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)).reshape(shape)
        case {"other": text}:
            return OtherValue(text)
    return data


def map_tensors(value: Any, change: Any) -> Any:
    """Apply a function to every tensor of a nested value."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        items = [map_tensors(item, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return {key: map_tensors(item, change) for key, item in value.items()} if isinstance(value, dict) else value


def parts(value: Any, names: Sequence[str]) -> dict[str, Any]:
    """Split the outputs of a function by name."""
    if len(names) == 1:
        return {names[0]: value}
    if isinstance(value, Mapping):
        value = tuple(value.get(name, OtherValue("nothing")) for name in names)
    if not isinstance(value, tuple | list) or len(value) != len(names):
        count = len(value) if isinstance(value, tuple | list) else 1
        raise MismatchError(f"expected {len(names)} results, {', '.join(names)}; got {described(value, count)}")
    return dict(zip(names, value, strict=True))


def described(value: Any, count: int = 1) -> str:
    """Describe a value in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, OtherValue):
        return str(value)
    return f"{count} values" if count > 1 else f"a {type(value).__name__}" if value is not None else "None"


def gap(expected: Any, given: Any) -> float:
    """Return the largest absolute difference of two values; raise MismatchError if they cannot be compared."""
    if isinstance(given, OtherValue) or (given is None) != (expected is None):
        raise MismatchError(f"expected {described(expected)}, got {described(given)}")
    if isinstance(expected, Tensor):
        return _tensor_gap(expected, given)
    if isinstance(expected, list | tuple):
        if isinstance(given, Tensor):
            given = given.tolist()
        if not isinstance(given, list | tuple) or len(given) != len(expected):
            size = f" of {len(given)}" if isinstance(given, list | tuple) else ""
            raise MismatchError(f"expected a list of {len(expected)}, got a {type(given).__name__}{size}")
        return max((gap(a, b) for a, b in zip(expected, given, strict=True)), default=0.0)
    if isinstance(expected, Mapping):
        if not isinstance(given, Mapping) or set(given) != set(expected):
            shown = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
            raise MismatchError(f"expected the keys {sorted(map(str, expected))}, got {shown}")
        return max((gap(item, given[key]) for key, item in expected.items()), default=0.0)
    if isinstance(expected, int | float):
        return _tensor_gap(torch.tensor(expected, dtype=torch.float64), given)
    if type(expected) is not type(given):
        raise MismatchError(f"expected {described(expected)}, got {described(given)}")
    return 0.0 if expected == given else math.inf


def _tensor_gap(expected: Tensor, given: Any) -> float:
    try:
        other = given if isinstance(given, Tensor) else torch.tensor(given, dtype=torch.float64)
        a, b = expected.detach().to(torch.float64), other.detach().to(torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise MismatchError(f"expected {described(expected)}, got {described(given)}") from None
    if a.shape != b.shape:
        raise MismatchError(f"its shape is {tuple(b.shape)}; expected {tuple(a.shape)}")
    same = (a == b) | (a.isnan() & b.isnan())
    distance = (a - b).abs()[~same]
    return float(distance.nan_to_num(math.inf, math.inf).max()) if distance.numel() else 0.0


def magnitude(value: Any) -> float:
    """Return the largest finite absolute number in a value."""
    if isinstance(value, Tensor):
        finite = value.detach().double()
        finite = finite[finite.isfinite()]
        return float(finite.abs().max()) if finite.numel() else 0.0
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return max(map(magnitude, value), default=0.0)
    return abs(float(value)) if isinstance(value, int | float) and math.isfinite(value) else 0.0
