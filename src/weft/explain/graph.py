"""The computation graph of a model: what was computed from what, for one input.

One node an intermediate variable, labelled with the function that computes it and the variable's name; every
parameter, intercept, input and constant is a node too; edges are directed and unlabelled. The model is run once, and
each operation is recorded as it happens, so that the graph shows what the control flow did.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

Kind = Literal["parameter", "input", "constant", "variable"]

# A copy is not another variable of the algorithm, and neither is a view in another shape.
COPIES = {"clone", "_to_copy", "detach", "alias", "lift_fresh"}
RESHAPES = {"transpose_", "t_", "squeeze_", "unsqueeze_", "as_strided_", "detach_", "swapaxes_", "swapdims_"}
# These look at a tensor's shape and not at its numbers.
BLANKS = ("empty", "zeros", "ones", "full", "new_")


@dataclass(frozen=True)
class Node:
    """A variable: its `name`, and the `function` that computes it."""

    kind: Kind
    function: str
    name: str


@dataclass(frozen=True)
class Graph:
    """Nodes in the order they were computed, and edges (from, to) between their places in that order."""

    nodes: list[Node]
    edges: list[tuple[int, int]]


def graph(model: nn.Module, *inputs: Any, **given: Any) -> Graph:
    """The computation graph of model(*inputs, **given). It runs the model once, as it is, without gradients.

    Fused kernels are switched off where PyTorch has others, for they hide what the slides show.
    """
    recorder = _Recorder(model)
    fused = torch._C._get_mkldnn_enabled()
    for name, value in (inspect.signature(model.forward).bind_partial(*inputs).arguments | given).items():
        for path, tensor in _named_tensors(name, value):
            recorder.add(tensor, Node("input", "input", path))
    hooks = [
        hook
        for path, module in model.named_modules()
        for hook in (
            module.register_forward_pre_hook(lambda _, given, path=path or "model": recorder.enter(path)),
            module.register_forward_hook(lambda _, given, result, path=path or "model": recorder.leave(path, result)),
        )
    ]
    try:
        torch._C._set_mkldnn_enabled(False)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), recorder:
            result = model(*inputs, **given)
    finally:
        torch._C._set_mkldnn_enabled(fused)
        for hook in hooks:
            hook.remove()
    return recorder.before([tensor for _, tensor in _named_tensors("", result)])


def _named_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a value of any type: itself, or the members of a list, a mapping or an object."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, member in value.items():
            yield from _named_tensors(f"{name}.{key}" if name else str(key), member)
    elif isinstance(value, list | tuple):
        for key, member in enumerate(value):
            yield from _named_tensors(f"{name}[{key}]", member)
    elif hasattr(value, "__dict__"):
        yield from _named_tensors(name, vars(value))


class _Recorder(TorchDispatchMode):
    """Sees every operation on tensors below autograd.

    A variable is known by the storage of its numbers, so that views of it are the variable itself; writing into it
    makes a new variable there.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.nodes: list[Node] = []
        self.edges: list[tuple[int, int]] = []
        self.place: dict[int, int] = {}
        self.alive: list[Tensor] = []  # a storage that is freed could lend its address to another
        self.paths: list[str] = []
        self.counts: dict[str, int] = {}
        self.stored: dict[int, Node] = {}
        for name, tensor in model.named_buffers():
            self.stored[tensor.untyped_storage()._cdata] = Node("constant", "constant", name)
        for name, tensor in model.named_parameters():
            self.stored[tensor.untyped_storage()._cdata] = Node("parameter", "parameter", name)

    def add(self, tensor: Tensor, node: Node) -> int:
        """Add a node, and note that the tensor holds its value."""
        self.nodes.append(node)
        self.alive.append(tensor)
        self.place[tensor.untyped_storage()._cdata] = len(self.nodes) - 1
        return len(self.nodes) - 1

    def find(self, tensor: Tensor) -> int:
        """The node of a tensor's value; what nothing has computed is a parameter or a constant."""
        key = tensor.untyped_storage()._cdata
        if key not in self.place:
            self.add(tensor, self.stored.get(key) or Node("constant", "constant", self._fresh("constant")))
        return self.place[key]

    def enter(self, path: str) -> None:
        self.paths.append(path)

    def leave(self, path: str, result: Any) -> None:
        """What a module returns (first) takes the module's name, unless a module inside it has named it."""
        self.paths.pop()
        for _, tensor in islice(_named_tensors("", result), 1):
            i = self.find(tensor)
            if self.nodes[i].name.startswith(f"{path}:"):
                self.nodes[i] = replace(self.nodes[i], name=path)

    def _fresh(self, path: str) -> str:
        self.counts[path] = self.counts.get(path, 0) + 1
        return f"{path}:{self.counts[path]}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        name = schema.name.split("::")[-1]
        used = [] if name.startswith(BLANKS) else [tensor for _, tensor in _named_tensors("", [args, kwargs])]
        sources = list(dict.fromkeys(self.find(tensor) for tensor in used))
        result = func(*args, **kwargs)
        made = [tensor for _, tensor in _named_tensors("", result)]
        if schema.is_mutable and name not in RESHAPES:
            arguments = zip(schema.arguments, args, strict=False)
            written = [value for a, value in arguments if a.alias_info is not None and a.alias_info.is_write]
            made += [tensor for _, tensor in _named_tensors("", written)]
        else:
            made = [tensor for tensor in made if tensor.untyped_storage()._cdata not in self.place]
        if not made:
            return result
        if name in COPIES and sources:
            i = sources[0]
        else:
            path = self.paths[-1] if self.paths else "model"
            kind: Kind = "variable" if sources else "constant"
            i = self.add(made[0], Node(kind, _plain(name), self._fresh(path)))
            self.edges += [(source, i) for source in sources]
        for tensor in made:
            self.alive.append(tensor)
            self.place[tensor.untyped_storage()._cdata] = i
        return result

    def before(self, results: list[Tensor]) -> Graph:
        """The part of the graph that the results depend on."""
        needed = {self.place[tensor.untyped_storage()._cdata] for tensor in results}
        for source, target in reversed(self.edges):
            if target in needed:
                needed.add(source)
        number = {old: new for new, old in enumerate(sorted(needed))}
        edges = [(number[a], number[b]) for a, b in self.edges if b in needed]
        return Graph([self.nodes[old] for old in number], edges)


def _plain(name: str) -> str:
    """An operation's name as a reader knows it."""
    if "scaled_dot_product" in name:
        return "attention"
    name = name.strip("_").removeprefix("native_").removeprefix("safe_").removeprefix("thnn_")
    return {"mm": "matmul", "bmm": "matmul", "addmm": "linear", "baddbmm": "linear"}.get(name, name)
