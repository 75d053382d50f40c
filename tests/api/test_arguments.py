"""Wrong types from Python: one line that names the argument, whichever public function it is given to."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.api.test_python import OLD

import weft
from weft.api.arguments import checked
from weft.api.evaluation import Evaluation
from weft.api.explain import Explain
from weft.errors import ConfigError, WeftError


class Odd:
    """What nothing takes."""

    def __repr__(self) -> str:
        return "odd"


@pytest.fixture(scope="module")
def run() -> weft.Run:
    return weft.load(OLD / "gpt")


def public(of: object) -> list[Callable[..., Any]]:
    found = (inspect.getattr_static(of, name) for name in dir(of) if not name.startswith("_"))
    return [each for each in found if inspect.isfunction(each)]


FUNCTIONS = [each for name in weft.__all__ if inspect.isfunction(each := getattr(weft, name))]
METHODS = [each for owner in (weft.Run, Explain, Evaluation) for each in public(owner)]


@pytest.mark.parametrize("function", [*FUNCTIONS, *METHODS], ids=lambda each: each.__qualname__)
def test_every_argument_of_every_public_function(function: Callable[..., Any]) -> None:
    for argument, parameter in inspect.signature(function).parameters.items():
        if argument == "self" or parameter.annotation is Any or parameter.kind is parameter.VAR_KEYWORD:
            continue
        with pytest.raises(WeftError, match=f"{argument} = odd: expected "):
            function(**{argument: Odd()})


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda run: run.generate(["a"]), "prompt = ['a']: expected str"),
        (lambda run: run.generate(None), "prompt = None: expected str"),
        (lambda run: weft.train("gpt-tiny", data=5), "data = 5: expected Sequence[str | Path] | str | Path"),
        (lambda run: weft.load(5), "run = 5: expected Path | str"),
        (lambda run: run.complete("x", weft.sampling()), "prompts = 'x': expected Sequence[str]"),
        (lambda run: run.complete([None], weft.sampling()), "prompts = [None]: expected Sequence[str]"),
        (lambda run: run.tag(["a b"]), "sentences = ['a b']: expected Sequence[Sequence[str]]"),
        (lambda run: run.against("x"), "amateur = 'x': expected Run"),
        (lambda run: weft.plan("gpt2", gpus="x"), "gpus = 'x': expected int"),
        (lambda run: weft.plan("gpt2", gpu=4), "gpu: no such argument; did you mean 'gpus'?"),
        (lambda run: run.generate("a", temprature=1), "temprature: unknown key; did you mean 'temperature'?"),
        (lambda run: weft.load(run.path, "gpu"), "device = 'gpu': expected a device, such as 'cpu' or 'cuda'"),
        (lambda run: weft.load(run.path, "cuda:99"), "device = 'cuda:99': torch sees no such GPU here"),
        (lambda run: weft.train("gpt-tiny"), "give it with --data FILE (in Python data=)"),
        (lambda run: weft.train("gpt-tiny", data=Path("none.txt")), "none.txt: no such file"),
        (lambda run: weft.prepare("x", "y", tokenizer="bpe"), "expected Union[Tokenizer, Word, Char, Byte, BPE"),
    ],
)
def test_what_the_line_says(run: weft.Run, call: Callable[[Any], Any], line: str) -> None:
    with pytest.raises(WeftError) as error:
        call(run)
    assert line in str(error.value)


def test_what_a_hint_allows() -> None:
    @checked
    def function(number: float, several: "list[int] | None" = None, *rest: Any, **settings: Any) -> float:
        return number

    assert function(3) == 3 and function(number=1.5, other="x") == 1.5
    with pytest.raises(ConfigError, match="several = 'x': expected list"):
        function(1, several="x")
    with pytest.raises(TypeError):
        function()


def test_the_perplexity_of_several_texts_is_that_of_all_their_tokens(run: weft.Run) -> None:
    texts = ["The cat sat on", "the mat and looked."]
    nats = [each.nats for text in texts for each in run.surprisal(text) if each.nats is not None]
    assert run.perplexity(texts) == pytest.approx(2.718281828 ** (sum(nats) / len(nats)), rel=1e-6)
    assert "several texts" in inspect.getdoc(weft.Run.perplexity)
