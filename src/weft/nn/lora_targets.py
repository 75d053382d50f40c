"""Which layers an adapter is added to, by their names."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from weft.errors import ConfigError
from weft.nn.config import LoRA


def targets(settings: LoRA, names: Iterable[str]) -> list[str]:
    """The names of linear layers that `settings` chooses, in order; a pattern that matches none is an error."""
    names = list(names)
    if settings.targets is None:
        return [name for name in names if fnmatchcase(name, "*.attention.*") or fnmatchcase(name, "*.cross.*")]
    for pattern in settings.targets:
        if not any(fnmatchcase(name, pattern) for name in names):
            there = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)
            raise ConfigError(f"adapter.targets: '{pattern}' matches no layer; there are {', '.join(there)}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in settings.targets)]
