"""Views of a model by name, and the modules that compute and draw them.

`views.attention` is the module of that view, imported on first use: the drawing libraries take half a second to load.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.explain import ablation as ablation
    from weft.explain import activations as activations
    from weft.explain import cache as cache
    from weft.explain import costs as costs
    from weft.explain import experts as experts
    from weft.explain import gradients as gradients
    from weft.explain import growth as growth
    from weft.explain import heads as heads
    from weft.explain import lens as lens
    from weft.explain import likelihood as likelihood
    from weft.explain import neurons as neurons
    from weft.explain import positions as positions
    from weft.explain import precision as precision
    from weft.explain import reading as reading
    from weft.explain import saliency as saliency
    from weft.explain import schedule as schedule
    from weft.explain import search as search
    from weft.explain import surprise as surprise
    from weft.explain import timing as timing
    from weft.explain import training as training
    from weft.explain import weights as weights
    from weft.explain.anatomy import anatomy as anatomy
    from weft.explain.attention import maps as _attention
    from weft.explain.graph import picture as _graph
    from weft.explain.interventions import patch as patch
    from weft.explain.interventions import probe as probe
    from weft.explain.step import step as _step
    from weft.figures import picture as picture

    attention, graph, step = _attention, _graph, _step

VIEWS = (
    *("anatomy", "attention", "heads", "surprise", "lens", "saliency", "search", "step", "cache", "costs", "growth"),
    *("timing", "graph", "gradients", "positions", "activations", "precision", "schedule", "training", "likelihood"),
    *("neurons", "weights", "patch", "probe", "experts"),
)
# views of a text, which need a trained model
OF_A_TEXT = (
    *("attention", "heads", "surprise", "lens", "saliency", "search", "step", "gradients", "weights", "graph"),
    *("likelihood", "patch", "experts"),
)
_MODULES = {name: f"weft.explain.{name}" for name in (*VIEWS, "ablation", "reading")} | {
    "anatomy": "weft.explain.anatomy.anatomy",
    "attention": "weft.explain.attention.maps",
    "graph": "weft.explain.graph.picture",
    "patch": "weft.explain.interventions.patch",
    "probe": "weft.explain.interventions.probe",
    "step": "weft.explain.step.step",
    "picture": "weft.figures.picture",
}


def __getattr__(name: str) -> ModuleType:
    if name not in _MODULES:
        raise AttributeError(f"there is no view named '{name}'")
    return import_module(_MODULES[name])
