"""See what a model computes on its way, and replace it, without touching its code.

    with capture(model, "decoder.*.attention.probabilities", "decoder.3.residual") as seen:
        model(tokens)
    seen["decoder.3.residual"]

A name is the path of a module, whose output it means; `.blocks` is left out of paths, and `*` stands for any one part
of a name. Some places inside have names of their own:

    decoder.3.residual                  the residual stream after layer 3, (batch, time, d_model)
    decoder.3.attention.probabilities   (batch, heads, time, source time); `cross` for attention to a source
    decoder.3.attention.heads           what the heads give, before they are mixed, (batch, time, heads · d_head)
    decoder.3.feedforward.hidden        after the activation, (batch, time, d_ff)
    attention.probabilities             of a Bahdanau model, (batch, time, source time)

Looking changes no output bit. Nothing is kept but what was named, and a model that nobody looks into pays nothing.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor, nn

from weft.errors import ModelError, suggestion
from weft.models.stack import Stack
from weft.nn.block import Block
from weft.nn.scaled_dot_product import Probabilities

Change = Callable[[Tensor], Tensor]


class Tap(NamedTuple):
    """A place in a model: what a module is given, or what it gives.

    Where layers share a module, it runs `turns` times, and the place is where it runs for the time number `turn`.
    """

    module: nn.Module
    gives: bool
    turn: int = 0
    turns: int = 1


class Seen(Mapping[str, Tensor]):
    """What was captured, by name: of several calls the last. `calls` has all of them, one for each step of a text."""

    def __init__(self, names: list[str]):
        self._calls: dict[str, list[Tensor]] = {name: [] for name in names}

    def __getitem__(self, name: str) -> Tensor:
        return self.calls(name)[-1]

    def __iter__(self) -> Iterator[str]:
        return (name for name, calls in self._calls.items() if calls)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def calls(self, name: str) -> list[Tensor]:
        """What passed at each call, in their order."""
        if name not in self._calls:
            raise ModelError(f"{name!r} was not asked for; {suggestion(name, self._calls)}")
        if not self._calls[name]:
            raise ModelError(f"{name!r}: the model did not compute it inside of this capture")
        return self._calls[name]

    def gradient(self, name: str) -> Tensor:
        """The gradient by what passed last, after a backward pass; capture it with grads=True."""
        found = self[name].grad
        if found is None:
            raise ModelError(f"{name!r} has no gradient: it takes capture(…, grads=True) and a backward pass")
        return found


@contextmanager
def capture(
    model: nn.Module, *names: str, grads: bool = False, replace: Mapping[str, Change] | None = None
) -> Iterator[Seen]:
    """Keep what passes the places that `names` match, while the model runs inside the block.

    With `grads` they keep their gradients too, and attention runs by its formula. `replace` changes what passes: a
    function from a tensor to one of the same shape for each name, such as `without_head(2)` for probabilities.
    """
    places = taps(model)
    wanted = list(dict.fromkeys(name for pattern in names for name in matching(pattern, places)))
    changes: dict[str, list[Change]] = {}
    for pattern, change in (replace or {}).items():
        for name in matching(pattern, places):
            changes.setdefault(name, []).append(change)
    seen = Seen(wanted)
    with ExitStack() as stack:
        for name in dict.fromkeys([*changes, *wanted]):
            through = partial(_pass, changes=changes.get(name, ()), keep=seen._calls.get(name), grads=grads)
            stack.callback(_hook(places[name], through))
        yield seen


def without_head(*heads: int) -> Change:
    """A change of probabilities (batch, heads, …) that takes heads out: they give zeros."""

    def change(probabilities: Tensor) -> Tensor:
        changed = probabilities.clone()
        changed[:, list(heads)] = 0.0
        return changed

    return change


def taps(model: nn.Module) -> dict[str, Tap]:
    """All places that have a name."""
    found: dict[str, Tap] = {}
    for name, module, *turn in _named(model):
        if name:
            found[name] = Tap(module, True, *turn)
        if isinstance(module, Block):
            found[f"{name}.residual"] = Tap(module, True, *turn)
            for attention in ("attention", "cross"):
                if (part := getattr(module, attention)) is not None:
                    found[f"{name}.{attention}.heads"] = Tap(part.out, False, *turn)
            found[f"{name}.feedforward.hidden"] = Tap(module.feedforward.down, False, *turn)
    return found


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module, int, int]]:
    """Every module with its name; what layers share has a name in each of them: which turn of how many it is there."""
    shared = {f"{path}.blocks.": stack for path, stack in model.named_modules() if isinstance(stack, Stack)}
    for path, module in model.named_modules():
        name = path.replace(".blocks.", ".")
        stack = next((stack for prefix, stack in shared.items() if path.startswith(prefix)), None)
        if stack is None or stack.sharing == 1:
            yield name, module, 0, 1
        elif path.count(".") == 2:  # a block: all that is in it comes with its layers
            prefix, block = name.rsplit(".", 1)
            for turn in range(stack.sharing):
                for inner, part in module.named_modules():
                    layer = f"{prefix}.{int(block) * stack.sharing + turn}"
                    yield f"{layer}.{inner}".rstrip("."), part, turn, stack.sharing


def matching(pattern: str, places: Mapping[str, Any]) -> list[str]:
    """The names that a pattern matches, in the model's order; at least one."""
    if pattern in places:
        return [pattern]
    form = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))
    found = [name for name in places if form.fullmatch(name)]
    if not found:
        raise ModelError(f"{pattern!r}: nothing in this model has that name; {suggestion(pattern, places)}")
    return found


def _pass(x: Tensor, changes: Sequence[Change], keep: list[Tensor] | None, grads: bool) -> Tensor:
    """What goes on in the place of x: x itself, unless it is changed or its gradient is wanted."""
    for change in changes:
        given, x = x, change(x)
        if x.shape != given.shape:
            raise ModelError(f"a replacement has the shape {tuple(x.shape)}, where {tuple(given.shape)} passed")
    if keep is not None and grads:
        x = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
        x.retain_grad()
    if keep is not None:
        keep.append(x if grads else x.detach())
    return x


def _hook(tap: Tap, through: Change) -> Callable[[], object]:
    """Let the first tensor of a call pass `through`, if the call is the place's turn; what is returned ends that."""
    calls = count()

    def passing(x: Tensor) -> Tensor:
        return through(x) if next(calls) % tap.turns == tap.turn else x

    def hook(_: nn.Module, *given: Any) -> Any:  # the inputs, or these and the output
        first, *more = given[-1] if isinstance(given[-1], tuple) else (given[-1],)
        x = passing(first)
        return None if x is first else (x, *more) if isinstance(given[-1], tuple) else x

    if isinstance(tap.module, Probabilities):  # they are computed only where somebody watches
        return tap.module.watch(passing)
    return (tap.module.register_forward_hook if tap.gives else tap.module.register_forward_pre_hook)(hook).remove
