"""Names of a computation graph's variables and numbers, as in the formulas of the papers and lectures (names.toml)."""

import re
import tomllib
from collections import Counter
from math import isclose, prod
from pathlib import Path

from weft.explain.graph.graph import Graph, Node

TABLE = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))
PARAMETERS: dict[str, str] = TABLE["parameters"]
MODULES: dict[str, str] = TABLE["modules"]
FUNCTIONS: dict[str, dict[str, list[str]]] = TABLE["functions"]
RECURRENT = ("RNN", "SigmoidElman", "LSTM", "GRU")
LAYER = re.compile(r"_l(\d+)(_reverse)?$")
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def reader_path(path: str) -> str:
    """Return a module's path without the `blocks` list of a stack, as `capture` names it."""
    return path.replace(".blocks.", ".")


def short_path(path: str, parent: str) -> str:
    """Return the part of a path that its parent does not say, with the stack's name before a bare layer number."""
    parts, above = reader_path(path).split("."), reader_path(parent).split(".")
    shared = 0
    while shared < min(len(parts) - 1, len(above)) and parts[shared] == above[shared]:
        shared += 1
    if shared and parts[shared:] == parts[-1:] and parts[-1].isdigit():
        shared -= 1
    return ".".join(parts[shared:])


def variable_names(graph: Graph) -> list[str]:
    """Return short names: those of names.toml, of modules, or functions with a number, such as add₂."""
    passes = Counter(n.call for n in graph.nodes if LAYER.search(n.name) and "weight_ih" in n.name)
    seen: Counter[tuple[int, str]] = Counter()
    names = []
    for node in graph.nodes:
        call = graph.calls[node.call] if graph.calls else None
        path, kind = (call.path, call.kind) if call else ("", "")
        if node.kind in ("parameter", "input"):
            names.append(_parameter_name(node.name, path))
            continue
        key = _key(graph, node)
        of_kind = FUNCTIONS.get(kind, {})
        occurrence, cycle = seen[node.call, key], of_kind.get(key, of_kind.get("*", []))
        seen[node.call, key] += 1
        module = _ending(reader_path(path), MODULES) if call and node.name == path else ""
        if module:
            names.append(module)
        elif cycle and (kind in RECURRENT or occurrence < len(cycle)):
            step, which = divmod(occurrence, len(cycle))
            steps = _steps(graph, node.call) if "{" in cycle[which] else 1
            turn, t = divmod(step, steps)
            name = cycle[which].format(t=_subscript(t + 1), before=_subscript(t))
            # of a later recurrent layer or direction
            names.append(name + _superscript(turn if passes[node.call] > 1 else 0))
        elif node.name == "model":
            names.append("logits" if node.function == "linear" else "result")
        elif call and node.name == path:
            names.append(short_path(path, graph.calls[call.parent].path))
        elif ":" in node.name:
            names.append(f"{node.function}{_subscript(seen[node.call, key])}")
        else:
            names.append(reader_path(node.name.removeprefix(f"{path}.") if path else node.name))
    return names


def scalar_label(graph: Graph, node: Node) -> str:
    """Return the number in a node's function, by its meaning if it has one: 1/√d_k, √d_model, ε."""
    assert node.scalar is not None
    kind = graph.calls[node.call].kind if graph.calls else ""
    if node.function == "mul" and kind.endswith("Attention") and len(node.shape) == 4:
        product = graph.nodes[node.arguments[0][1]]
        queries = graph.nodes[product.arguments[0][1]].shape if product.function == "matmul" else ()
        if queries and isclose(node.scalar**-2, prod(queries) / prod(node.shape[:3]), rel_tol=1e-4):
            return "1/√d_k"
    if node.function == "mul" and kind == "Transformer" and isclose(node.scalar**2, node.shape[-1], rel_tol=1e-4):
        return "√d_model"
    return "ε" if node.function == "add" and kind == "RMSNorm" else f"{node.scalar:.4g}".replace("-", "−")


def _key(graph: Graph, node: Node) -> str:
    """Return the function of a node, with the parameter it multiplies or an n for a number, as names.toml writes it."""
    weights = (graph.nodes[source].name for _, source in node.arguments if graph.nodes[source].kind == "parameter")
    weight = next((LAYER.sub("", w).split(".")[-1] for w in weights if "weight" in w and LAYER.search(w)), "")
    return " ".join(filter(None, (node.function, weight, "n" if node.scalar is not None else "")))


def _steps(graph: Graph, call: int) -> int:
    """Return the number of steps of a recurrent layer: of its first product with W_ah until the input's next W_ax."""
    of_call = [node for node in graph.nodes if node.call == call]
    products = sum(_key(graph, node) == "linear weight_hh" for node in of_call)
    return max(1, products // max(1, sum(node.kind == "parameter" and "weight_ih" in node.name for node in of_call)))


def _parameter_name(name: str, path: str) -> str:
    layer = LAYER.search(name)
    found = _ending(reader_path(LAYER.sub("", name)), PARAMETERS)
    if found and layer:
        return found + _superscript(int(layer[1])) + ("←" if layer[2] else "")
    return found or reader_path(name.removeprefix(f"{path}.") if path else name)


def _ending(path: str, table: dict[str, str]) -> str:
    """Return the entry for the longest ending of a path."""
    parts = path.split(".")
    return next((table[end] for n in range(len(parts)) if (end := ".".join(parts[n:])) in table), "")


def _subscript(number: int) -> str:
    return str(number).translate(SUBSCRIPTS)


def _superscript(layer: int) -> str:
    """Return the mark of a layer above the first, counted from 0."""
    return f"⁽{str(layer).translate(SUPERSCRIPTS)}⁾" if layer else ""
