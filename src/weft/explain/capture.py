"""Capture or replace a model's intermediate tensors without changing its code.

    with capture(model, "decoder.*.attention.probabilities", "decoder.3.residual") as captured:
        model(tokens)
    captured["decoder.3.residual"]

A name is a module's path and stands for its output; `.blocks` is left out of paths, and `*` matches one part of a name.
Some tensors inside modules have names too:

    decoder.3.residual                  the residual stream after layer 3, (batch, time, d_model)
    decoder.3.attention.probabilities   (batch, heads, time, source time); `cross` for attention to a source
    decoder.3.attention.heads           outputs of the heads before the output projection, (batch, time, heads · d_head)
    decoder.3.feedforward.hidden        after the activation, (batch, time, d_ff)
    attention.probabilities             of a Bahdanau model, (batch, time, source time)

Capturing changes no bit of the output. Only the named tensors are kept, and an uncaptured model has no overhead.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.errors import ModelError, suggestion
from weft.models.stack import Stack
from weft.nn.block import Block
from weft.nn.scaled_dot_product import Probabilities
from weft.progress import pausing

Change = Callable[[Tensor], Tensor]


class Tap(NamedTuple):
    """Tensor that can be captured: a module's output, or its input."""

    module: nn.Module
    output: bool
    call: int = 0  # number of the call, of a module that layers share
    calls: int = 1  # of the module in a pass


class Captured(Mapping[str, Tensor]):
    """Captured tensors by name, each from the last call; `calls` has those of all calls, such as decode steps."""

    def __init__(self, names: list[str]):
        self._calls: dict[str, list[Tensor]] = {name: [] for name in names}

    def __getitem__(self, name: str) -> Tensor:
        return self.calls(name)[-1]

    def __iter__(self) -> Iterator[str]:
        return (name for name, calls in self._calls.items() if calls)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def calls(self, name: str) -> list[Tensor]:
        """Return the tensors of all calls, in order."""
        if name not in self._calls:
            raise ModelError(f"{name!r} was not captured; {suggestion(name, self._calls)}")
        if not self._calls[name]:
            raise ModelError(f"{name!r}: the model did not compute it inside this capture")
        return self._calls[name]


@contextmanager
def capture(
    model: nn.Module, *names: str, grads: bool = False, replace: Mapping[str, Change] | None = None
) -> Iterator[Captured]:
    """Keep the tensors that match `names` while the model runs inside the context.

    With `grads`, a backward pass sets their `.grad`, and attention uses its reference implementation. `replace` maps
    names to functions that return a tensor of the same shape to continue with, such as `without_head(2)` for
    probabilities.
    """
    all_taps = taps(model)
    kept = list(dict.fromkeys(name for pattern in names for name in matching(pattern, all_taps)))
    changes: dict[str, list[Change]] = {}
    for pattern, change in (replace or {}).items():
        for name in matching(pattern, all_taps):
            changes.setdefault(name, []).append(change)
    captured = Captured(kept)
    with ExitStack() as stack:
        stack.enter_context(pausing(lambda: None))  # during a pause, other passes would be captured or changed
        for name in dict.fromkeys([*changes, *kept]):
            through = partial(_pass_through, changes=changes.get(name, ()), keep=captured._calls.get(name), grads=grads)
            stack.callback(_hook(all_taps[name], through))
        yield captured


def without_head(*heads: int) -> Change:
    """Return a change of probabilities (batch, heads, …) that sets these heads to zero."""
    return lambda probabilities: probabilities.index_fill(1, torch.tensor(heads, device=probabilities.device), 0.0)


def taps(model: nn.Module) -> dict[str, Tap]:
    """Return all tensors of a model that can be captured, by name."""
    named: dict[str, Tap] = {}
    for name, module, *call in _named_modules(model):
        if name:
            named[name] = Tap(module, True, *call)
        if isinstance(module, Block):
            named[f"{name}.residual"] = Tap(module, True, *call)
            for attention in ("attention", "cross"):
                if (part := getattr(module, attention)) is not None:
                    named[f"{name}.{attention}.heads"] = Tap(part.out, False, *call)
            named[f"{name}.feedforward.hidden"] = Tap(module.feedforward.down, False, *call)
    return named


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, int, int]]:
    """Yield every module with its name, `call` and `calls`; a shared module has one name in each layer."""
    stacks = {f"{path}.blocks.": stack for path, stack in model.named_modules() if isinstance(stack, Stack)}
    for path, module in model.named_modules():
        name = path.replace(".blocks.", ".")
        stack = next((stack for prefix, stack in stacks.items() if path.startswith(prefix)), None)
        if stack is None or stack.sharing == 1:
            yield name, module, 0, 1
        elif path.count(".") == 2:  # a block; its submodules are yielded once for each layer
            prefix, block = name.rsplit(".", 1)
            for call in range(stack.sharing):
                for inner, part in module.named_modules():
                    layer = f"{prefix}.{int(block) * stack.sharing + call}"
                    yield f"{layer}.{inner}".rstrip("."), part, call, stack.sharing


def matching(pattern: str, names: Mapping[str, Any]) -> list[str]:
    """Return the names that a pattern matches, in the model's order; raise if there are none."""
    if pattern in names:
        return [pattern]
    regex = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))
    matches = [name for name in names if regex.fullmatch(name)]
    if not matches:
        raise ModelError(f"{pattern!r}: nothing in this model has that name; {suggestion(pattern, names)}")
    return matches


def _pass_through(x: Tensor, *, changes: Sequence[Change], keep: list[Tensor] | None, grads: bool) -> Tensor:
    """Apply the changes and keep the tensor; return x itself if nothing changes it and no gradient is kept."""
    for change in changes:
        shape, x = x.shape, change(x)
        if x.shape != shape:
            raise ModelError(f"a replacement has shape {tuple(x.shape)}, expected {tuple(shape)}")
    if keep is not None and grads:
        x = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
        x.retain_grad()
    if keep is not None:
        keep.append(x if grads else x.detach())
    return x


def _hook(tap: Tap, through: Change) -> Callable[[], object]:
    """Pass the first tensor of the tap's call `through`; return a function that removes the hook."""
    calls = count()

    def own_call(x: Tensor) -> Tensor:
        return through(x) if next(calls) % tap.calls == tap.call else x

    def hook(_: nn.Module, *values: Any) -> Any:  # the inputs, or the inputs and the output
        first, *others = values[-1] if isinstance(values[-1], tuple) else (values[-1],)
        x = own_call(first)
        return None if x is first else (x, *others) if isinstance(values[-1], tuple) else x

    if isinstance(tap.module, Probabilities):  # they are computed only while watched
        return tap.module.watch(own_call)
    return (tap.module.register_forward_hook if tap.output else tap.module.register_forward_pre_hook)(hook).remove
