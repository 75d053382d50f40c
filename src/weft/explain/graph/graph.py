"""The computation graph of a model: what was computed from what, for one input.

One node an intermediate variable, labelled with the function that computes it and the variable's name; every
parameter, intercept, input and constant is a node too; edges are directed and unlabelled. The model is run once, and
each operation is recorded as it happens, so that the graph shows what the control flow did.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

Kind = Literal["parameter", "input", "constant", "variable"]

# A copy is not another variable of the algorithm, and neither is a view in another shape.
COPIES = {"clone", "_to_copy", "detach", "alias", "lift_fresh"}
RESHAPES = {"transpose_", "t_", "squeeze_", "unsqueeze_", "as_strided_", "detach_", "swapaxes_", "swapdims_"}
PRODUCTS = ("linear", "matmul", "addmm", "baddbmm")
# These look at a tensor's shape and not at its numbers.
BLANKS = ("empty", "zeros", "ones", "full", "new_")


class Call(NamedTuple):
    """A call of the module at `path`, of class `kind`, from inside of another call; the first one is the model's."""

    path: str
    kind: str
    parent: int


@dataclass(frozen=True)
class Node:
    """A variable: its `name`, and the `function` that computes it, within a call of a module.

    `arguments` are the function's tensors by the names of its parameters, each with the node that holds its value.
    `number` is the other operand where that is no tensor: 2 in x².
    """

    kind: Kind
    function: str
    name: str
    call: int = 0
    shape: tuple[int, ...] = ()
    floating: bool = True
    arguments: tuple[tuple[str, int], ...] = ()
    number: float | None = None


@dataclass(frozen=True)
class Graph:
    """Nodes in the order they were computed, and edges (from, to) between their places in that order.

    `calls` are those of modules in the order they began.
    """

    nodes: list[Node]
    edges: list[tuple[int, int]]
    calls: list[Call]


def graph(model: nn.Module, *inputs: Any, **given: Any) -> Graph:
    """The computation graph of model(*inputs, **given). It runs the model once, as it is, without gradients.

    Fused kernels are switched off where PyTorch has others, for they hide what the slides show. A model on the meta
    device, whose weights have shapes and no numbers, is recorded too, as it would run on the processor: whatever
    depends on its weights is not computed, but positions, masks and token ids are.
    """
    weights = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    if any(tensor.is_meta for tensor in weights.values()):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes: dict[Tensor, Tensor] = {}  # of tied weights one
        for tensor in (tensor for tensor in weights.values() if tensor.is_meta):
            with mode:
                fakes.setdefault(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
        weights = {name: fakes.get(tensor, tensor) for name, tensor in weights.items()}
    recorder = _Recorder(model, weights)
    for name, value in (inspect.signature(model.forward).bind_partial(*inputs).arguments | given).items():
        for path, tensor in _named_tensors(name, value):
            recorder.add(tensor, recorder.leaf("input", path, tensor))
    hooks = [
        hook
        for path, module in model.named_modules()
        for hook in (
            module.register_forward_pre_hook(lambda module, _, path=path: recorder.enter(path, module)),
            module.register_forward_hook(lambda _, given, result, path=path: recorder.leave(path or "model", result)),
        )
    ]
    fused = torch._C._get_mkldnn_enabled()
    try:
        torch._C._set_mkldnn_enabled(False)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), recorder:
            result = functional_call(model, weights, inputs, given)
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

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor]):
        super().__init__()
        self.nodes: list[Node] = []
        self.edges: list[tuple[int, int]] = []
        self.place: dict[int, int] = {}
        self.alive: list[Tensor] = []  # a storage that is freed could lend its address to another
        self.calls: list[Call] = []
        self.open: list[int] = []  # the calls that have begun and not ended
        self.counts: dict[str, int] = {}
        self.product: int | None = None  # a product of matrices that was computed just now
        self.stored: dict[int, tuple[Kind, str, Tensor]] = {}
        kinds: dict[Kind, Any] = {"constant": model.named_buffers(), "parameter": model.named_parameters()}
        for kind, members in kinds.items():
            for name, _ in members:
                self.stored[weights[name].untyped_storage()._cdata] = (kind, name, weights[name])

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
            self.add(tensor, self.leaf(*self.stored.get(key, ("constant", self._fresh("constant"), tensor))))
        return self.place[key]

    def leaf(self, kind: Kind, name: str, tensor: Tensor) -> Node:
        """A node that nothing computes."""
        call = self.open[-1] if self.open else 0
        return Node(kind, kind, name, call, tuple(tensor.shape), tensor.is_floating_point())

    def enter(self, path: str, module: nn.Module) -> None:
        self.calls.append(Call(path, type(module).__name__, self.open[-1] if self.open else 0))
        self.open.append(len(self.calls) - 1)

    def leave(self, path: str, result: Any) -> None:
        """What a module returns (first) takes the module's name, unless a module inside it has named it."""
        self.open.pop()
        for _, tensor in islice(_named_tensors("", result), 1):
            i = self.find(tensor)
            if self.nodes[i].name.startswith(f"{path}:"):
                self.nodes[i] = replace(self.nodes[i], name=path)

    def _fresh(self, path: str) -> str:
        self.counts[path] = self.counts.get(path, 0) + 1
        return f"{path}:{self.counts[path]}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, func._schema
        name = schema.name.split("::")[-1]
        result = func(*args, **kwargs)
        made = [tensor for _, tensor in _named_tensors("", result)]
        # a parameter is a node from where its numbers are used, not from where it is looked at
        views = bool(schema.returns) and all(r.alias_info is not None for r in schema.returns)
        if not schema.is_mutable and (views or not made):
            return self._view(name, args, result)
        by_name = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | kwargs
        given = [pair for role, value in by_name.items() for pair in _named_tensors(role, value)]
        used = [] if name.startswith(BLANKS) else given  # the tensors by the names of the function's parameters
        arguments = tuple((role, self.find(tensor)) for role, tensor in used)
        sources = list(dict.fromkeys(source for _, source in arguments))
        if schema.is_mutable and name not in RESHAPES:
            places = zip(schema.arguments, args, strict=False)
            written = [value for a, value in places if a.alias_info is not None and a.alias_info.is_write]
            made += [tensor for _, tensor in _named_tensors("", written)]
        else:
            made = [tensor for tensor in made if tensor.untyped_storage()._cdata not in self.place]
        if not made:
            return self._view(name, args, result)
        self.product = None
        if name in COPIES and sources:
            i = sources[0]
        else:
            function = self._function(name, dict(used), kwargs)
            if function == "linear" and len(arguments) == 3:  # addmm has the intercept first
                arguments = (*arguments[1:], arguments[0])
            call = self.open[-1] if self.open else 0
            path = self.calls[call].path if self.calls else ""
            made_of = self._fresh(path or "model"), call, tuple(made[0].shape), made[0].is_floating_point()
            second = args[1] if len(args) > 1 and schema.arguments[1].name in ("other", "exponent", "value") else None
            number = float(second) if isinstance(second, int | float) and not isinstance(second, bool) else None
            node = Node("variable" if sources else "constant", function, *made_of, arguments, number)
            i = self.add(made[0], node)
            self.product = i if function in PRODUCTS else None
            self.edges += [(source, i) for source in sources]
        for tensor in made:
            self.alive.append(tensor)
            self.place[tensor.untyped_storage()._cdata] = i
        return result

    def _view(self, name: str, args: Any, result: Any) -> Any:
        """What is no variable of its own. Products take matrices: theirs has the shape it is given right afterwards."""
        of = self.place.get(args[0].untyped_storage()._cdata) if name in ("view", "_unsafe_view") else None
        if of is not None and of == self.product:
            self.nodes[of] = replace(self.nodes[of], shape=tuple(result.shape))
        self.product = None
        return result

    def _function(self, name: str, used: dict[str, Tensor], given: dict[str, Any]) -> str:
        """A product with a parameter that is transposed for it is a linear layer."""
        right = used.get("mat2")
        if right is not None and (stored := self.stored.get(right.untyped_storage()._cdata)) is not None:
            shape, strides = stored[2].shape, stored[2].stride()
            if right.shape[-2:] == shape[::-1] and right.stride()[-2:] == strides[::-1]:
                return "linear"
        plain = name.strip("_").removeprefix("native_").removeprefix("safe_").removeprefix("thnn_")
        plain = plain.removesuffix("_forward")
        plain = "attention" if "scaled_dot_product" in name else {"mm": "matmul", "bmm": "matmul"}.get(plain, plain)
        return "gelu-tanh" if plain == "gelu" and given.get("approximate") == "tanh" else plain

    def before(self, results: list[Tensor]) -> Graph:
        """The part of the graph that the results depend on."""
        needed = {self.find(tensor) for tensor in results}
        for source, target in reversed(self.edges):
            if target in needed:
                needed.add(source)
        number = {old: new for new, old in enumerate(sorted(needed))}
        edges = [(number[a], number[b]) for a, b in self.edges if b in needed]
        found = (self.nodes[old] for old in number)
        nodes = [replace(n, arguments=tuple((role, number[i]) for role, i in n.arguments)) for n in found]
        return Graph(nodes, edges, self.calls)
