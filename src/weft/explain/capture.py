"""Capture or replace a model's intermediate tensors without changing its code.

    with capture(model, "decoder.*.attention.probabilities", "decoder.3.residual") as captured:
        model(tokens)
    captured["decoder.3.residual"]

A name is a module's path and stands for its output; `.blocks` is left out of paths, and `*` matches one part of a name.
`blocks.*.attention.output` is another way to write `*.*.attention` for encoders and decoders. Some tensors inside
modules have names too:

    decoder.3.residual                  the residual stream after layer 3, (batch, time, d_model)
    decoder.3.attention.probabilities   (batch, heads, time, source time); `cross` for attention to a source
    decoder.3.attention.heads           outputs of the heads before the output projection, (batch, time, heads · d_head)
    decoder.3.feedforward.hidden        after the activation, (batch, time, d_ff)
    decoder.3.feedforward.router        logits of a mixture's experts, (batch, time, experts)
    attention.probabilities             of a Bahdanau model, (batch, time, source time)
    recurrence.0.hidden                 states of a recurrent layer, also `cell`, and its gates: `input`, `forget`,
                                        `candidate`, `output`, or `reset`, `update`, `candidate`; (batch, 1, d_model)

Tensors of a recurrent model, and of a Bahdanau model's attention, come step by step, in one call per token. Capturing
changes no bit of the output. Only the named tensors are kept, and an uncaptured model has no overhead.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from weft.errors import ModelError, suggestion
from weft.explain.interventions.cells import cell_kind, cell_parts, unrolled
from weft.models.bahdanau import Bahdanau
from weft.models.stack import Stack
from weft.nn.block import Block
from weft.nn.feedforward import Gated, Plain
from weft.nn.recurrent import single_layers
from weft.nn.scaled_dot_product import Probabilities, changed
from weft.progress import pause, pausing

Change = Callable[[Tensor], Tensor]
BY_STEP, ONCE = ("attention", "decoder"), ("attention.probabilities", "attention.keys")  # of a Bahdanau model


class Tap(NamedTuple):
    """Tensor that can be captured: a module's output, its input, or a gate or state (`cell`) of a recurrent layer."""

    module: nn.Module
    output: bool
    call: int = 0  # number of the call, of a module that layers share
    calls: int = 1  # of the module in a pass
    cell: tuple[int, str] | None = None  # layer of a recurrent stack, and the name inside it
    by_step: bool = False  # one call per token


class Captured(Mapping[str, Tensor]):
    """Captured tensors by name, each from the last call; `calls` has those of all calls, such as decode steps."""

    def __init__(self, names: Mapping[str, Tap]):
        self._taps = names
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

    def joined(self, name: str) -> Tensor:
        """Return the tensor of the last pass, with the steps of a recurrent model along its second dimension."""
        calls = self.calls(name)
        return join_steps(calls) if self._taps[name].by_step else calls[-1]


def join_steps(calls: Sequence[Tensor]) -> Tensor:
    """Return tensors of consecutive steps, (batch, 1, d) or (batch, …) each, along the second dimension."""
    stepped = calls[0].dim() == 3 and calls[0].shape[1] == 1
    return torch.cat(list(calls), dim=1) if stepped else torch.stack(list(calls), dim=1)


@contextmanager
def capture(
    model: nn.Module, *names: str, grads: bool = False, replace: Mapping[str, Change] | None = None
) -> Iterator[Captured]:
    """Keep the tensors that match `names` while the model runs inside the context.

    With `grads`, a backward pass sets their `.grad`, and attention uses its reference implementation. `replace` maps
    names to functions that return a tensor of the same shape and type to continue with, such as `without_head(2)` for
    probabilities.
    """
    all_taps = taps(model)
    kept = {name: all_taps[name] for pattern in names for name in matching(pattern, all_taps)}
    changes: dict[str, list[Change]] = {}
    for pattern, change in (replace or {}).items():
        for name in matching(pattern, all_taps):
            changes.setdefault(name, []).append(change)
    captured = Captured(kept)
    with ExitStack() as stack:
        stack.enter_context(pausing(lambda: None))  # during a pause, other passes would be captured or changed
        cells: dict[nn.RNNBase, dict[tuple[int, str], Change]] = {}
        for name in sorted({**changes, **kept}, key=lambda name: all_taps[name].cell is None):
            tap, keep = all_taps[name], captured._calls.get(name)
            through = partial(_pass_through, name=name, changes=changes.get(name, ()), keep=keep, grads=grads)
            if tap.cell is None:
                stack.callback(_hook(tap, through))
                continue
            assert isinstance(tap.module, nn.RNNBase)
            if tap.module not in cells:
                cells[tap.module] = {}
                stack.enter_context(_cell_hooks(tap.module, cells[tap.module]))
            cells[tap.module][tap.cell] = through
        yield captured
    pause()  # passes of others may run between two captures


def without_head(*heads: int) -> Change:
    """Return a change of probabilities (batch, heads, …) that sets these heads to zero."""
    return lambda probabilities: probabilities.index_fill(1, torch.tensor(heads, device=probabilities.device), 0.0)


def stack_input(name: str, stack: Stack) -> str:
    """Return the tap of the vectors that a stack's first layer reads: in evaluation mode dropout is the identity."""
    return f"{name}.projection" if stack.projection is not None and stack.narrow else f"{name}.dropout"


def taps(model: nn.Module) -> dict[str, Tap]:
    """Return all tensors of a model that can be captured, by name."""
    named: dict[str, Tap] = {}
    for name, module, number, calls in _named_modules(model):
        if name:
            named[name] = Tap(module, True, number, calls)
        if isinstance(module, Block):
            named[f"{name}.residual"] = Tap(module, True, number, calls)
            for attention in ("attention", "cross"):
                if (part := getattr(module, attention)) is not None:
                    named[f"{name}.{attention}.heads"] = Tap(part.out, False, number, calls)
            if isinstance(module.feedforward, Plain | Gated):
                named[f"{name}.feedforward.hidden"] = Tap(module.feedforward.down, False, number, calls)
        if isinstance(module, nn.RNNBase):
            for layer, part in product(range(module.num_layers), cell_parts(module)):
                named[f"{name}.{layer}.{part}"] = Tap(module, True, cell=(layer, part), by_step=True)
    if isinstance(model, Bahdanau):
        names = [name for name in named if name.split(".")[0] in BY_STEP and name not in ONCE]
        named |= {name: named[name]._replace(by_step=True) for name in names}
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
    plain = re.sub(r"^blocks\.", "*.", pattern.removesuffix(".output"))
    regex = re.compile(r"[^.]+".join(map(re.escape, plain.split("*"))))
    matches = [name for name in names if regex.fullmatch(name)]
    if not matches:
        raise ModelError(f"{pattern!r}: nothing in this model has that name; {suggestion(pattern, names)}")
    return matches


def _pass_through(x: Tensor, *, name: str, changes: Sequence[Change], keep: list[Tensor] | None, grads: bool) -> Tensor:
    """Apply the changes and keep the tensor; return x itself if nothing changes it and no gradient is kept."""
    for change in changes:
        given, x = x, change(x)
        if not isinstance(x, Tensor) or (x.shape, x.dtype, x.device) != (given.shape, given.dtype, given.device):
            raise ModelError(f"{name}: the function returned {_described(x)}, expected {_described(given)}")
    if keep is not None and grads:
        x = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
        x.retain_grad()
    if keep is not None:
        keep.append(x if grads else x.detach())
    return x


def _described(value: object) -> str:
    """Say what a value is: a tensor by its shape, type and device, anything else by its type."""
    if not isinstance(value, Tensor):
        return "None" if value is None else f"a value of type {type(value).__name__}"
    device = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}{device}"


def _hook(tap: Tap, through: Change) -> Callable[[], object]:
    """Pass the first tensor of the tap's call `through`; return a function that removes the hook."""
    calls = count()

    def own_call(x: Tensor) -> Tensor:
        return through(x) if next(calls) % tap.calls == tap.call else x

    def hook(_: nn.Module, *values: Any) -> Any:  # the inputs, or the inputs and the output
        first, *others = values[-1] if isinstance(values[-1], tuple) else (values[-1],)
        x = _through_padded(first, own_call) if isinstance(first, PackedSequence) else own_call(first)
        return None if x is first else (x, *others) if isinstance(values[-1], tuple) else x

    if isinstance(tap.module, Probabilities):  # they are computed only while watched
        return tap.module.watch(own_call)
    return (tap.module.register_forward_hook if tap.output else tap.module.register_forward_pre_hook)(hook).remove


def _through_padded(packed: PackedSequence, through: Change) -> PackedSequence:
    """Pass sequences without padding `through` a function that gets them padded with zeros, (sequences, time, d)."""
    padded, _ = pad_packed_sequence(packed, batch_first=True)
    if (new := through(padded)) is padded:
        return packed
    numbers = torch.arange(len(packed.data), device=padded.device)
    indices, _ = pad_packed_sequence(PackedSequence(numbers, *packed[1:]), batch_first=True, padding_value=-1)
    real = indices >= 0
    return PackedSequence(packed.data.index_copy(0, indices[real], new[real]), *packed[1:])


@contextmanager
def _cell_hooks(stack: nn.RNNBase, through: Mapping[tuple[int, str], Change]) -> Iterator[None]:
    """Pass gates and states of a stack `through` functions, by layer and name, while the context is open.

    They are computed beside the module by the formulas. Its output is replaced only if a function changed a value, so
    that looking changes no bit.
    """

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(inputs[0], Tensor):
            raise ModelError("gates and states are shown for whole rows; this pass packs several texts into a row")
        assert isinstance(module, nn.RNNBase)
        begin = 0 if module is stack else singles.index(module)  # with dropout, layers run one by one
        any_changed = False

        def change(layer: int, part: str, x: Tensor) -> Tensor:
            nonlocal any_changed
            function = through.get((begin + layer, part))
            given = x[:, None]
            if function is None or (new := function(given)) is given:
                return x
            any_changed = any_changed or changed(new, given)
            return new[:, 0]

        state = inputs[1] if len(inputs) > 1 else None
        first = None if state is None else torch.stack(state) if isinstance(state, tuple) else state[None]
        layers = unrolled(module, inputs[0].transpose(0, 1), first, change=change)
        if not any_changed:
            return None
        last = torch.stack([layer.states[-1] for layer in layers], dim=1)  # (parts, layers, batch, d_model)
        hidden = layers[-1].states[:, 0].transpose(0, 1)
        return hidden, tuple(last) if cell_kind(module) == "lstm" else last[0]

    singles = single_layers(stack)
    with ExitStack() as hooks:
        for module in (stack, *singles[:-1]):  # the last of them shares the hooks of the stack
            hooks.callback(module.register_forward_hook(hook).remove)
        yield
