"""weft: from a text file to a language model that is trained, measured and explained.

    import weft

    run = weft.train("gpt-tiny", data="book.txt", run="runs/book")
    print(run.perplexity())
    print(run.generate("Once upon"))

Importing weft imports nothing heavy; the first call does.
"""

from types import ModuleType
from typing import TYPE_CHECKING, Any

from weft import train

if TYPE_CHECKING:
    from weft.api import Run, beam, load, prepare, resume, sampling

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "beam", "load", "prepare", "resume", "sampling", "train"]


class _TrainingRoom(ModuleType):
    """The package `weft.train` stands where the function of that name belongs, so it can be called as one."""

    def __call__(self, *args: Any, **given: Any) -> "Run":
        """`weft.api.train`."""
        from weft.api import train

        return train(*args, **given)


train.__class__ = _TrainingRoom


def __getattr__(name: str) -> Any:
    if name in __all__:
        from weft import api

        return getattr(api, name)
    raise AttributeError(f"module 'weft' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
