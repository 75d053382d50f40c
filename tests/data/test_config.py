"""The recipe's `data` section."""

import pytest

from weft.config import to_toml, validate
from weft.data.config import Data, HashSplit, MixturePart, TailSplit
from weft.errors import ConfigError


def test_a_recipe_chooses_its_split() -> None:
    data = validate(Data, {"sources": ["a.txt"], "validation": {"kind": "tail", "bytes": 5000}})
    assert data.validation == TailSplit(bytes=5000)
    assert Data().validation == HashSplit(fraction=0.1)
    assert data.parts == (MixturePart(sources=("a.txt",)),)
    assert 'kind = "tail"' in to_toml(data)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"sources": ["a"], "prepared": "b"}, "sources and prepared are both set"),
        ({"mixture": [{"weight": 2}]}, "either sources or prepared"),
        ({"mixture": [{"sources": ["a"], "weight": 0}]}, "weight = 0: expected a number greater than 0"),
        ({"validation": {"kind": "hash", "fraction": 1.5}}, r"validation\.fraction = 1\.5"),
        ({"validation": {"kind": "tale"}}, "did you mean 'tail'"),
        ({"sorces": ["a"]}, "did you mean 'sources'"),
    ],
)
def test_invalid_settings_are_refused(tree: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(Data, tree)
