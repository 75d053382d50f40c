"""The plan of the house, held: imports go to lower floors and never in a circle, and hide in no function."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from tests.sources import MODULES, nodes
from tests.sources import PACKAGE as ROOT

from weft.interop.families.known import FAMILIES

FLOORS = {
    "config": 0, "errors": 0, "layout": 0, "machine": 0, "native": 0, "progress": 0, "storage": 0, "workers": 0,
    "nn": 1, "text": 1, "data": 1, "figures": 1,
    "models": 2,
    "costs": 2.5,
    "recipe": 3, "decode": 3, "interop": 3, "parallel": 3,
    "runs": 4, "evaluate": 4, "explain": 4,
    "training": 5,
    "objectives": 6,
    "api": 7, "compare": 7,
    "serve": 8, "course": 8,
    "exercises": 0,  # data: read by course/, never imported
    "cli": 9, "__main__": 10,
}  # fmt: skip
# on one floor, in this direction
ALLOWED = {("data", "text"), ("compare", "api")}
ALLOWED |= {(room, "errors") for room in ("config", "layout", "storage")} | {
    ("config", "storage"),
    ("layout", "config"),
    ("progress", "storage"),
    *(("native", below) for below in ("machine", "progress", "storage")),
}


# families of other programs' models are named in interop/ alone; elsewhere such a word is the name of something else
NAMESAKES = {
    "models/presets.py": {"gpt2"},  # a preset
    "cli/plan.py": {"opt"},  # a table of sizes in a paper
    "nn/position_config.py": {"t5"},  # a kind of position
    "explain/positions.py": {"t5"},
    "text/config.py": {"gpt2", "qwen2"},  # ways to cut text
    "text/vocabularies.py": {"gpt2", "qwen2"},
}


def room(module: str) -> str:
    """'weft.nn.attention' → 'nn'; 'weft' → ''."""
    return module.split(".")[1] if "." in module else ""


def name_of(path: Path) -> str:
    return ".".join(["weft", *path.relative_to(ROOT).with_suffix("").parts])


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, wherever the import stands, except under `if TYPE_CHECKING`."""
    typing_only = {
        inner
        for node in nodes(path)
        if isinstance(node, ast.If)
        and any("TYPE_CHECKING" in (getattr(name, "id", ""), getattr(name, "attr", "")) for name in ast.walk(node.test))
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in nodes(path):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and called(node).endswith("import_module"):
            first = node.args[0]
            if isinstance(first, ast.Constant):
                yield str(first.value), node.lineno


def called(node: ast.Call) -> str:
    """The dotted name of what is called; nothing for what has none, such as a call's own result."""
    parts, inner = [], node.func
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    return ".".join([inner.id if isinstance(inner, ast.Name) else "", *reversed(parts)])


def test_every_room_stands_on_a_floor() -> None:
    rooms = {room(name_of(path)) for path in MODULES} - {"__init__"}
    assert rooms <= set(FLOORS), f"no floor for {sorted(rooms - set(FLOORS))}"


def test_imports_go_down() -> None:
    assert not [wrong for path in MODULES for wrong in upward(path)]


def upward(path: Path) -> Iterator[str]:
    here = room(name_of(path))
    for module, line in imports(path) if here != "__init__" else ():  # weft/__init__.py only points at the api
        there = room(module)
        if not module.startswith("weft.") or there == here or there.startswith("__"):
            continue
        if there not in FLOORS:
            yield f"{path}:{line}: {module} is in no known room"
        elif FLOORS[there] >= FLOORS[here] and (here, there) not in ALLOWED:
            yield f"{path}:{line}: {here} (floor {FLOORS[here]}) imports {module} (floor {FLOORS[there]})"


def test_no_files_import_each_other_in_a_circle() -> None:
    files = {name_of(path).removesuffix(".__init__"): path for path in MODULES}

    def file_of(module: str) -> str:
        while module not in files:
            module = module.rpartition(".")[0]
        return module

    graph = {
        name: {file_of(module) for module, _ in imports(path) if module.split(".")[0] == "weft"} - {name, "weft"}
        for name, path in files.items()
    }
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


# what need not be installed, or is on some systems only; what is written in Triton, which comes with CUDA; and what
# splits a model, which takes a second to load
OPTIONAL = {
    "fcntl",
    "gguf",
    "huggingface_hub",
    "lm_eval",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "pandas",
    "pyarrow",
    "ray",
    "resource",
    "torch.utils.tensorboard",
    "triton",
    "wandb",
    "weft.decode.fast.attend",
    "weft.decode.fast.chunks",
    "weft.nn.kernels.attention",
    "weft.nn.kernels.dropout",
    "weft.nn.kernels.feedforward",
    "weft.decode.fast.kernels",
    "weft.decode.fast.kernels4",
    "weft.decode.fast.kernels8",
    "weft.decode.fast.kernels_experts",
    "weft.nn.kernels.loss",
    "weft.training.sharded",
}


def test_no_import_hides_in_a_function() -> None:
    assert not [wrong for path in MODULES if room(name_of(path)) != "cli" for wrong in hidden_imports(path)]


def hidden_imports(path: Path) -> Iterator[str]:
    functions = [node for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in {inner for function in functions for inner in ast.walk(function)}:
        match node:
            case ast.Import():
                hidden = [alias.name for alias in node.names]
            case ast.ImportFrom():
                hidden = [f"{node.module}.{alias.name}" for alias in node.names]
            case _:
                continue
        for module in hidden:
            if not any(module == name or module.startswith(f"{name}.") for name in OPTIONAL):
                yield f"{path}:{node.lineno}: {module} is imported inside a function"


def test_models_know_nothing_of_processes() -> None:
    for path in [path for path in MODULES if room(name_of(path)) in ("nn", "models")]:
        assert not [f"{path}: {module}" for module, _ in imports(path) if module.startswith("torch.distributed")]
        assert "torch.distributed" not in ast.unparse(nodes(path)[0]), path


def test_nothing_loaded_can_run_code() -> None:
    assert not [wrong for path in MODULES for wrong in unsafe_readers(path)]


def unsafe_readers(path: Path) -> Iterator[str]:
    unsafe = {"pickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}
    found = {module for module, _ in imports(path) if module.split(".")[0] in unsafe}
    yield from (f"{path}: imports {module}" for module in found)
    for node in nodes(path):
        if isinstance(node, ast.Call):
            name = called(node)
            if name in ("eval", "exec", "torch.load"):  # weft.interop.torch_file reads files of torch.save
                yield f"{path}:{node.lineno}: {name}"
            if name.split(".")[-1] == "load" and name.split(".")[0] in ("np", "numpy"):
                yield from (f"{path}:{node.lineno}: {k.arg}" for k in node.keywords if k.arg == "allow_pickle")


def test_names_say_what_is_inside() -> None:
    vague = {"utils", "util", "helpers", "helper", "misc", "common"}
    assert not [path for path in MODULES if path.stem in vague or path.parent.name in vague]


def test_package_files_are_empty() -> None:
    filled = [p for p in ROOT.rglob("__init__.py") if p.parent != ROOT and p.read_text(encoding="utf-8").strip()]
    assert not filled


LIGHT = ("weft", "weft.models.config", "weft.models.presets", "weft.recipe.config", "weft.recipe.resolve")


def test_light_modules_import_no_torch() -> None:
    heavy = "{'torch', 'tokenizers', 'matplotlib'} & set(sys.modules)"
    code = "\n".join(f"import sys, {module}; print('{module}', *{heavy})" for module in (*LIGHT, "weft.cli.main"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [*LIGHT, "weft.cli.main"]


def test_the_version_is_stated_once_in_each_place() -> None:
    import tomllib

    import weft

    project = tomllib.loads((ROOT.parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert weft.__version__ == project["project"]["version"]


def test_no_family_is_named_outside_interop() -> None:
    """Whatever a family needs of a model is a setting: what computes, counts or writes never asks for its name."""
    names = {family.kind for family in FAMILIES.values()}
    names |= {name for family in FAMILIES.values() for name in family.architectures}
    for path in MODULES:
        place = path.relative_to(ROOT).as_posix()
        words = {node.value for node in nodes(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        found = words & names - NAMESAKES.get(place, set())
        assert place.startswith("interop/") or not found, f"{place}: {found}"
