"""weft: from a text file to a language model that is trained, evaluated and explained.

    import weft

    run = weft.train("gpt-tiny", data="book.txt", run="runs/book")
    print(run.perplexity())
    print(run.generate("Once upon"))

Importing weft is fast: torch is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.api.explain import architecture
    from weft.api.load import load
    from weft.api.plan import plan
    from weft.api.run import Run
    from weft.api.settings import beam, sampling
    from weft.api.train import prepare, resume, train
    from weft.course.checker import check
    from weft.errors import (
        ConfigError,
        DamageError,
        DataError,
        DivergedError,
        InteropError,
        LostError,
        ModelError,
        RunError,
        TokenizerError,
        WeftError,
    )

__version__ = "0.4.0"
__all__ = [
    "ConfigError",
    "DamageError",
    "DataError",
    "DivergedError",
    "InteropError",
    "LostError",
    "ModelError",
    "Run",
    "RunError",
    "TokenizerError",
    "WeftError",
    "__version__",
    "architecture",
    "beam",
    "check",
    "load",
    "plan",
    "prepare",
    "resume",
    "sampling",
    "train",
]

_MODULES = {
    "weft.api.explain": ("architecture",),
    "weft.api.load": ("load",),
    "weft.api.plan": ("plan",),
    "weft.api.run": ("Run",),
    "weft.api.settings": ("beam", "sampling"),
    "weft.api.train": ("prepare", "resume", "train"),
    "weft.course.checker": ("check",),
    "weft.errors": tuple(name for name in __all__ if name.endswith("Error")),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'weft' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
