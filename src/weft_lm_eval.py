"""Tells lm-evaluation-harness of weft's models, so that its own command knows them: `lm_eval --model weft`.

The harness looks for no models of other packages. weft_lm_eval.pth therefore imports this file whenever Python starts:
it does nothing until the harness's list of models is imported, and then adds one line to it. Nothing that takes time
is imported before: importlib.abc alone would take forty milliseconds of every start.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

LIST = "lm_eval.models"


class _Finder:
    """Finds the harness's list of models, once, as Python would."""

    def find_spec(self, name: str, path: object, target: object = None) -> "ModuleSpec | None":
        if name != LIST:
            return None
        from importlib.machinery import PathFinder

        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


class _Loader:
    """Loads it as it is, and adds weft."""

    def __init__(self, own: "Loader"):
        self.own = own

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        return self.own.create_module(spec)

    def exec_module(self, module: "ModuleType") -> None:
        self.own.exec_module(module)
        module.__spec__.loader = self.own  # type: ignore[union-attr]
        try:
            from lm_eval.api.registry import model_registry

            model_registry.register("weft", target="weft.api.lm_eval:WeftLM")
        except Exception as error:  # another version of the harness, which must work without us
            print(f"weft: not registered with lm-evaluation-harness: {error}", file=sys.stderr)


sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
