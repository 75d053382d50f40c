"""Arguments of a wrong type: one line that names the argument, for every public function."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tests.api.test_python import OLD

import weft
from weft.api.arguments import checked
from weft.api.evaluation import Evaluation
from weft.api.explain import Explain
from weft.decode.config import Sampling
from weft.errors import ConfigError, WeftError


class Odd:
    """A type that no argument has."""

    def __repr__(self) -> str:
        return "odd"


@pytest.fixture(scope="module")
def run() -> weft.Run:
    return weft.load(OLD / "gpt")


def public_methods(owner: type) -> list[Callable[..., Any]]:
    members = (inspect.getattr_static(owner, name) for name in dir(owner) if not name.startswith("_"))
    return [member for member in members if inspect.isfunction(member)]


FUNCTIONS = [each for name in weft.__all__ if inspect.isfunction(each := getattr(weft, name))]
METHODS = [each for owner in (weft.Run, Explain, Evaluation) for each in public_methods(owner)]


@pytest.mark.parametrize("function", [*FUNCTIONS, *METHODS], ids=lambda each: each.__qualname__)
def test_every_argument_of_every_public_function(function: Callable[..., Any], run: weft.Run) -> None:
    parameters = inspect.signature(function).parameters
    required = {"self": run, "recipe": "gpt2", "messages": [{"role": "user", "content": "a"}]}
    for name, parameter in parameters.items():
        if name == "self" or parameter.annotation is Any:
            continue
        assert parameter.kind is not parameter.VAR_KEYWORD, "settings are shown as keyword arguments"
        arguments = {key: value for key, value in required.items() if key in parameters} | {name: Odd()}
        with pytest.raises(WeftError, match=rf"^{name}(\.kind)?( = odd: expected |: missing)"):
            function(**arguments)


@pytest.mark.parametrize("function", [weft.sampling, weft.Run.generate, weft.Run.chat])
def test_settings_are_keyword_arguments_with_their_types(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    assert set(Sampling.model_fields) <= set(parameters)
    assert parameters["top_k"].annotation == int | None and parameters["top_k"].default is None


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda run: run.generate(["a"]), "prompt = ['a']: expected str"),
        (lambda run: run.generate(None), "prompt = None: expected str"),
        (lambda run: weft.train("gpt-tiny", data=cast(Any, 5)), "data = 5: expected Sequence[str | Path] | str | Path"),
        (lambda run: weft.load(cast(Any, 5)), "run = 5: expected Path | str"),
        (lambda run: run.complete("x", weft.sampling()), "prompts = 'x': expected Sequence[str]"),
        (lambda run: run.complete([None], weft.sampling()), "prompts = [None]: expected Sequence[str]"),
        (lambda run: run.tag(["a b"]), "sentences = ['a b']: expected Sequence[Sequence[str]]"),
        (lambda run: run.against("x"), "amateur = 'x': expected Run"),
        (lambda run: weft.plan("gpt2", gpus="x"), "gpus = 'x': expected a whole number"),
        (lambda run: weft.plan("gpt2", gpu=4), "gpu: no such argument; did you mean 'gpus'?"),
        (lambda run: run.generate("a", temprature=1), "temprature: no such argument; did you mean 'temperature'?"),
        (lambda run: weft.load(run.path, "gpu"), "device = 'gpu': expected a device, such as 'cpu' or 'cuda'"),
        (lambda run: weft.load(run.path, "cuda:99"), "device = 'cuda:99': torch sees no such GPU"),
        (lambda run: run.embed(["a"], pooling="median"), "pooling = 'median': did you mean 'mean'?"),
        (lambda run: run.tokenizer.decode("a"), "'a': expected token ids, such as [5, 7]"),
        (lambda run: run.tokenizer.decode(5), "5: expected token ids, such as [5, 7]"),
        (lambda run: run.tokenizer.encode(["a", "b"]), "['a', 'b']: expected a text, not list"),
        (lambda run: weft.load(OLD / "classify").generate("a"), "this run is a classifier; it can't continue a text"),
        (
            lambda run: cast(Any, weft.train)("gpt-tiny", device="cuda"),
            "device: no such argument; a GPU is used",
        ),
        (lambda run: cast(Any, weft.train)("gpt-tiny", epochs=3), "changes={'steps': …}; one epoch is"),
        (lambda run: weft.train("gpt-tiny"), "give it with --data FILE (in Python data=)"),
        (lambda run: weft.train("gpt-tiny", data=Path("none.txt")), "none.txt: no such file"),
        (lambda run: weft.prepare("x", "y", tokenizer=cast(Any, "bpe")), "expected Union[Tokenizer, Word, Char, Byte"),
    ],
)
def test_messages(run: weft.Run, call: Callable[[Any], Any], line: str) -> None:
    with pytest.raises(WeftError) as error:
        call(run)
    assert line in str(error.value)


def test_what_an_annotation_allows() -> None:
    def plain(number: float, items: "list[int] | None" = None, *others: Any, **settings: Any) -> float:
        return number

    function: Any = checked(plain)
    assert function(3) == 3 and function(number=np.float32(1.5), other="x") == 1.5
    with pytest.raises(ConfigError, match="items = 'x': expected list"):
        function(1, items="x")
    with pytest.raises(TypeError):
        function()
