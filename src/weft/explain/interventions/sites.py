"""Places of a model whose activations can be exchanged: sites, mapped by layer and position, and nodes of circuits."""

from itertools import product
from typing import NamedTuple

from weft.explain.capture import stack_input
from weft.explain.interventions.cells import cell_parts
from weft.explain.reading import unsupported
from weft.models.bahdanau import Bahdanau
from weft.models.base import LanguageModel
from weft.models.recurrent import Recurrent
from weft.models.stack import Stack
from weft.models.transformer import Transformer
from weft.nn.feedforward import Gated, Plain
from weft.nn.recurrent import state_parts

MAX_BLOCKS = 128  # nodes that the units of a recurrent layer are divided into


class Site(NamedTuple):
    """Kind of activation with a tap per layer; `labels` name the layers, and positions may be those of the source."""

    kind: str
    labels: tuple[str, ...]
    taps: tuple[str, ...]
    source: bool = False


class CircuitNode(NamedTuple):
    """Part of a circuit: the same units of one or more taps, at all positions."""

    name: str
    taps: tuple[str, ...]
    units: slice


def sites(model: LanguageModel) -> list[Site]:
    """Return the sites of a model in the order of its computation."""
    if isinstance(model, Transformer):
        return [site for name, stack in _stacks(model).items() for site in _stack_sites(model, name, stack)]
    if isinstance(model, Recurrent):
        return _cell_sites("recurrence", model)
    if isinstance(model, Bahdanau):
        annotations = Site("source states", ("encoder",), ("encoder",), source=True)
        return [annotations, Site("context", ("attention",), ("attention",)), *_cell_sites("decoder", model)]
    raise unsupported(model, "no activations to patch", "it takes a Transformer, a recurrent or a bahdanau model")


def nodes(model: LanguageModel) -> list[CircuitNode]:
    """Return the nodes of a model: heads and feed-forward layers, or units of recurrent layers and source states.

    Hidden and cell state of a unit are one node. Units of wide layers are taken together, at most 128 groups a layer.
    """
    if isinstance(model, Transformer):
        return [node for name, stack in _stacks(model).items() for node in _stack_nodes(model, name, stack)]
    if isinstance(model, Recurrent):
        return _unit_nodes("recurrence", model)
    assert isinstance(model, Bahdanau)
    return [*_blocks("source", ("encoder",), 2 * model.config.d_model), *_unit_nodes("decoder", model)]


def neuron_taps(model: LanguageModel) -> list[str]:
    """Return the taps of feed-forward neurons, by layer; mixtures of experts have none that every token uses."""
    if not isinstance(model, Transformer):
        return []
    layers = [(name, n, block) for name, stack in _stacks(model).items() for n, block in enumerate(stack.layers)]
    dense = [(name, n) for name, n, block in layers if isinstance(block.feedforward, Plain | Gated)]
    return [f"{name}.{n}.feedforward.hidden" for name, n in dense]


def _stacks(model: Transformer) -> dict[str, Stack]:
    both = {"encoder": model.encoder, "decoder": model.decoder}
    return {name: stack for name, stack in both.items() if stack is not None}


def _sublayers(model: Transformer, name: str, stack: Stack) -> dict[str, str]:
    """Return the names of a stack's sublayers in words."""
    cross = {"cross": "attention to the source"} if name == "decoder" and model.encoder is not None else {}
    fed = {"feedforward": "feed-forward"} if stack.blocks[0].feedforward is not None else {}
    return {"attention": "attention", **cross, **fed}


def _stack_sites(model: Transformer, name: str, stack: Stack) -> list[Site]:
    both, layers = len(_stacks(model)) == 2, [str(n) for n in range(len(stack.layers))]
    prefix, source = f"{name}, " if both else "", both and name == "encoder"
    taps = (stack_input(name, stack), *(f"{name}.{n}.residual" for n in layers))
    found = [Site(f"{prefix}residual stream", ("embedding", *layers), taps, source)]
    for part, kind in _sublayers(model, name, stack).items():
        found.append(Site(f"{prefix}{kind}", tuple(layers), tuple(f"{name}.{n}.{part}" for n in layers), source))
    return found


def _stack_nodes(model: Transformer, name: str, stack: Stack) -> list[CircuitNode]:
    both, found, d_v = len(_stacks(model)) == 2, list[CircuitNode](), model.config.d_v
    prefix = f"{name} " if both else ""
    for n, part in product(range(len(stack.layers)), _sublayers(model, name, stack)):
        if part == "feedforward":
            found.append(CircuitNode(f"{prefix}feed-forward {n}", (f"{name}.{n}.{part}",), slice(None)))
            continue
        kind = "cross " if part == "cross" else f"{prefix}head "
        for head in range(model.config.attention.heads):
            units = slice(head * d_v, (head + 1) * d_v)
            found.append(CircuitNode(f"{kind}{n}.{head}", (f"{name}.{n}.{part}.heads",), units))
    return found


def _cell_sites(stack: str, model: Recurrent | Bahdanau) -> list[Site]:
    layers = [str(n) for n in range(model.config.layers)]
    parts = cell_parts(getattr(model, stack))
    return [Site(f"{part}", tuple(layers), tuple(f"{stack}.{n}.{part}" for n in layers)) for part in reversed(parts)]


def _unit_nodes(stack: str, model: Recurrent | Bahdanau) -> list[CircuitNode]:
    parts = ("hidden", "cell")[: state_parts(getattr(model, stack))]
    found: list[CircuitNode] = []
    for n in range(model.config.layers):
        found += _blocks(f"layer {n}", tuple(f"{stack}.{n}.{part}" for part in parts), model.config.d_model)
    return found


def _blocks(name: str, taps: tuple[str, ...], width: int) -> list[CircuitNode]:
    """Divide `width` units into at most MAX_BLOCKS nodes."""
    size = -(-width // MAX_BLOCKS)
    ends = [(first, min(first + size, width)) for first in range(0, width, size)]
    label = "unit {0}" if size == 1 else "units {0}–{1}"
    return [CircuitNode(f"{name} {label.format(a, b - 1)}", taps, slice(a, b)) for a, b in ends]
