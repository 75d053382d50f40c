"""Computation graph of a model: which values were computed from which, for one input.

A node is an intermediate variable, labelled with the function that computes it and the variable's name. Parameters,
inputs and constants are nodes too; edges are directed and unlabelled. The model runs once and every operation is
recorded as it executes, so the graph shows the control flow that was taken.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from weft.nn.scaled_dot_product import Probabilities

NodeKind = Literal["parameter", "input", "constant", "variable"]

# Copies and reshapes are the same variable of the algorithm.
COPIES = {"clone", "_to_copy", "detach", "alias", "lift_fresh"}
IN_PLACE_RESHAPES = {"transpose_", "t_", "squeeze_", "unsqueeze_", "as_strided_", "detach_", "swapaxes_", "swapdims_"}
SPLITS = {"split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "unbind"}
NEUTRAL = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0}  # scalar with which an operation changes nothing
PRODUCTS = ("linear", "matmul", "addmm", "baddbmm")
SHAPE_ONLY = ("empty", "zeros", "ones", "full", "new_")  # prefixes of operations that read only their argument's shape


class Call(NamedTuple):
    """Call of the module at `path`, of class `kind`, made inside call number `parent`; call 0 is the model's."""

    path: str
    kind: str
    parent: int


@dataclass(frozen=True)
class Node:
    """Variable `name`, computed by `function` during call number `call`."""

    kind: NodeKind
    function: str
    name: str
    call: int = 0
    shape: tuple[int, ...] = ()
    floating: bool = True
    arguments: tuple[tuple[str, int], ...] = ()  # names of the tensor parameters, and the nodes of their values
    scalar: float | None = None  # the second operand if it is a Python number, such as the 2 in x²


@dataclass(frozen=True)
class Graph:
    """Nodes in the order of computation, edges (source, target) as indices of nodes, and module calls in call order."""

    nodes: list[Node]
    edges: list[tuple[int, int]]
    calls: list[Call]


def graph(model: nn.Module, *args: Any, **kwargs: Any) -> Graph:
    """Return the computation graph of `model(*args, **kwargs)`, recorded in one forward pass without gradients.

    Attention is computed by the formula, and fused kernels are disabled where PyTorch has an alternative, because they
    hide the operations of the slides. A model
    on the meta device is recorded as if it ran on the CPU: nothing that depends on its weights is computed, but
    positions, masks and token ids are.
    """
    weights = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    if any(tensor.is_meta for tensor in weights.values()):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes: dict[Tensor, Tensor] = {}  # tied weights share one
        for tensor in (tensor for tensor in weights.values() if tensor.is_meta):
            with mode:
                fakes.setdefault(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
        weights = {name: fakes.get(tensor, tensor) for name, tensor in weights.items()}
    recorder = _Recorder(model, weights)
    for name, value in (inspect.signature(model.forward).bind_partial(*args).arguments | kwargs).items():
        for path, tensor in _named_tensors(name, value):
            recorder.add(tensor, recorder.leaf("input", path, tensor))
    with ExitStack() as undo:
        for path, module in model.named_modules():
            undo.callback(module.register_forward_pre_hook(partial(recorder.enter, path)).remove)
            undo.callback(module.register_forward_hook(partial(recorder.leave, path or "model")).remove)
            if isinstance(module, Probabilities):  # a replacement, even an equal one, is mixed with the values as it is
                undo.callback(module.watch(lambda probabilities: probabilities.view_as(probabilities)))
        undo.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags would warn about TF32
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), recorder:
            result = functional_call(model, weights, args, kwargs)
    return recorder.ancestors([tensor for _, tensor in _named_tensors("", result)])


def _named_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a value, recursing into lists, mappings and objects."""
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


def _is_number(value: Any, expected: float | None = None) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and expected in (None, value)


class _Recorder(TorchDispatchMode):
    """Record every tensor operation below autograd. A variable is a storage, or a part of a split, such as queries."""

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor]):
        super().__init__()
        self.nodes: list[Node] = []
        self.edges: list[tuple[int, int]] = []
        self.node_of: dict[int, int] = {}  # by storage
        self.parts: dict[int, int] = {}  # nodes of the parts of splits, and of their views, by id of the tensor
        self.alive: list[Tensor] = []  # keeps storages from being freed, whose addresses could be reused
        self.calls: list[Call] = []
        self.open_calls: list[int] = []
        self.counts: dict[str, int] = {}
        self.last_product: int | None = None  # node of the previous operation if it was a matrix product
        self.stored: dict[int, tuple[NodeKind, str, Tensor]] = {}
        kinds: dict[NodeKind, Any] = {"constant": model.named_buffers(), "parameter": model.named_parameters()}
        for kind, members in kinds.items():
            for name, _ in members:
                self.stored[weights[name].untyped_storage()._cdata] = (kind, name, weights[name])

    def add(self, tensor: Tensor, node: Node) -> int:
        """Append a node whose value `tensor` holds; return its index."""
        self.nodes.append(node)
        self.alive.append(tensor)
        self.node_of[tensor.untyped_storage()._cdata] = len(self.nodes) - 1
        return len(self.nodes) - 1

    def find(self, tensor: Tensor) -> int:
        """Return the node of a tensor; add a parameter or a constant if no recorded operation computed it."""
        if id(tensor) in self.parts:
            return self.parts[id(tensor)]
        key = tensor.untyped_storage()._cdata
        if key not in self.node_of:
            self.add(tensor, self.leaf(*self.stored.get(key, ("constant", self._fresh_name("constant"), tensor))))
        return self.node_of[key]

    def leaf(self, kind: NodeKind, name: str, tensor: Tensor) -> Node:
        """Return a node of the current call without arguments."""
        call = self.open_calls[-1] if self.open_calls else 0
        return Node(kind, kind, name, call=call, shape=tuple(tensor.shape), floating=tensor.is_floating_point())

    def enter(self, path: str, module: nn.Module, inputs: Any) -> None:
        self.calls.append(Call(path, type(module).__name__, self.open_calls[-1] if self.open_calls else 0))
        self.open_calls.append(len(self.calls) - 1)

    def leave(self, path: str, *call: Any) -> None:  # module, inputs and output
        """Name a module's first output after the module, unless a submodule has named it already."""
        self.open_calls.pop()
        for _, tensor in islice(_named_tensors("", call[-1]), 1):
            i = self.find(tensor)
            if self.nodes[i].name.startswith(f"{path}:"):
                self.nodes[i] = replace(self.nodes[i], name=path)

    def _fresh_name(self, path: str) -> str:
        self.counts[path] = self.counts.get(path, 0) + 1
        return f"{path}:{self.counts[path]}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, func._schema
        name = schema.name.split("::")[-1]
        result = func(*args, **kwargs)
        outputs = [tensor for _, tensor in _named_tensors("", result)]
        if name in SPLITS and isinstance(result, list | tuple) and len(outputs) > 1:
            return self._split(name, args[0], outputs, result=result)
        # A view computes nothing: a parameter becomes a node when its values are used.
        is_view = bool(schema.returns) and all(r.alias_info is not None for r in schema.returns)
        if not schema.is_mutable and (is_view or not outputs):
            return self._view(name, args, result)
        by_name = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | kwargs
        tensors = [pair for role, value in by_name.items() for pair in _named_tensors(role, value)]
        operands = [] if name.startswith(SHAPE_ONLY) else tensors
        arguments = tuple((role, self.find(tensor)) for role, tensor in operands)
        sources = list(dict.fromkeys(source for _, source in arguments))
        if schema.is_mutable and name not in IN_PLACE_RESHAPES:
            declared = zip(schema.arguments, args, strict=False)
            mutated = [value for a, value in declared if a.alias_info is not None and a.alias_info.is_write]
            outputs += [tensor for _, tensor in _named_tensors("", mutated)]
        else:
            outputs = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in self.node_of]
        if not outputs:
            return self._view(name, args, result)
        self.last_product = None
        second: Any = args[1] if len(args) > 1 and schema.arguments[1].name in ("other", "exponent", "value") else None
        masks_nothing = name == "masked_fill" and type(args[1]) is Tensor and not args[1].any()
        if sources and (name in COPIES or masks_nothing or (name in NEUTRAL and _is_number(second, NEUTRAL[name]))):
            i = sources[0]
        else:
            function = self._function_name(name, dict(operands), kwargs)
            if function == "linear" and len(arguments) == 3:  # addmm has the bias first
                arguments = (*arguments[1:], arguments[0])
            path = self.calls[self.open_calls[-1] if self.open_calls else 0].path if self.calls else ""
            scalar = float(second) if _is_number(second) else None
            node = self.leaf("variable" if sources else "constant", self._fresh_name(path or "model"), outputs[0])
            i = self.add(outputs[0], replace(node, function=function, arguments=arguments, scalar=scalar))
            self.last_product = i if function in PRODUCTS else None
            self.edges += [(source, i) for source in sources]
        for tensor in outputs:
            self.alive.append(tensor)
            self.node_of[tensor.untyped_storage()._cdata] = i
            if id(tensor) in self.parts:
                self.parts[id(tensor)] = i
        return result

    def _split(self, name: str, tensor: Tensor, outputs: list[Tensor], *, result: Any) -> Any:
        """Add a node for each part of a tensor: to the current call, or to the module that computed it far below."""
        whole, call = self.find(tensor), self.open_calls[-1] if self.open_calls else 0
        if self.nodes[whole].kind == "constant":
            return result
        path, source = self.calls[call].path, self.calls[self.nodes[whole].call].path
        if source != path and source.rpartition(".")[0] != path:
            call, path = self.nodes[whole].call, source
        function = name.removeprefix("unsafe_").split("_")[0]
        for part in outputs:
            node = self.leaf("variable", self._fresh_name(path or "model"), part)
            self.nodes.append(replace(node, function=function, call=call, arguments=(("self", whole),)))
            self.alive.append(part)
            self.parts[id(part)] = len(self.nodes) - 1
            self.edges.append((whole, len(self.nodes) - 1))
        return result

    def _view(self, name: str, args: Any, result: Any) -> Any:
        """Return the result of an operation that adds no node; a view right after a matrix product sets its shape."""
        if args and id(args[0]) in self.parts and isinstance(result, Tensor):
            self.alive.append(result)
            self.parts[id(result)] = self.parts[id(args[0])]
        node = self.node_of.get(args[0].untyped_storage()._cdata) if name in ("view", "_unsafe_view") else None
        if node is not None and node == self.last_product:
            self.nodes[node] = replace(self.nodes[node], shape=tuple(result.shape))
        self.last_product = None
        return result

    def _function_name(self, name: str, operands: dict[str, Tensor], kwargs: dict[str, Any]) -> str:
        """Return the reader's name of an operation; a product with a transposed parameter is "linear"."""
        right = operands.get("mat2")
        if right is not None and (stored := self.stored.get(right.untyped_storage()._cdata)) is not None:
            shape, strides = stored[2].shape, stored[2].stride()
            if right.shape[-2:] == shape[::-1] and right.stride()[-2:] == strides[::-1]:
                return "linear"
        if "scaled_dot_product" in name:
            return "attention"
        plain = re.sub("^(native_|safe_|thnn_)|_forward$", "", name.strip("_"))
        if plain == "gelu" and kwargs.get("approximate") == "tanh":
            return "gelu-tanh"
        return {"mm": "matmul", "bmm": "matmul"}.get(plain, plain)

    def ancestors(self, results: list[Tensor]) -> Graph:
        """Return the part of the graph that the results depend on."""
        needed = {self.find(tensor) for tensor in results}
        for source, target in reversed(self.edges):
            if target in needed:
                needed.add(source)
        renumbered = {old: new for new, old in enumerate(sorted(needed))}
        edges = [(renumbered[a], renumbered[b]) for a, b in self.edges if b in needed]
        kept = (self.nodes[old] for old in renumbered)
        nodes = [replace(n, arguments=tuple((role, renumbered[i]) for role, i in n.arguments)) for n in kept]
        return Graph(nodes, edges, self.calls)
