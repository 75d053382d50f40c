"""Word vectors as runs: trained, resumed, exported, imported, and asked for neighbours and analogies."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.command import Cli
from tests.spread import spread

import weft as package
from weft.errors import ConfigError, DataError, TokenizerError
from weft.evaluate.analogies import Question, analogies, read_questions
from weft.explain.neighbours import signed_words

TOPICS = ("king queen castle crown throne", "boat river water fish net")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(TOPICS[n % 2].split(), 12)) + " ." for n in range(400)]
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("\n\n".join(lines))
    return path


SMALL = {"model.d_model": 12, "deterministic": True, "steps": 4, "checkpoint.every": 2}


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "words"
    package.train(
        "word2vec",
        data=str(corpus),
        run=path,
        changes={**SMALL, "steps": 10, "model.subsample": 0, "model.lr": 0.1},
        log=lambda line: None,
    )
    return path


def vectors(run: Path) -> torch.Tensor:
    return package.load(run).model.get_parameter("embedding.weight").detach()


@pytest.mark.parametrize("preset", spread(["word2vec", "cbow", "glove"], 1))
def test_a_resumed_run_equals_an_uninterrupted_one(preset: str, corpus: Path, tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for path, steps in ((whole, 4), (resumed, 2)):
        changes = (
            {**SMALL, "steps": steps, "model.min_lr": 0.025} if preset == "word2vec" else {**SMALL, "steps": steps}
        )
        changes |= {"model.lr": 0.05, "model.min_lr": 0.05} if preset == "cbow" else {}
        package.train(preset, data=str(corpus), run=path, changes=changes, log=lambda line: None)
    package.resume(resumed, changes={"steps": 4}, log=lambda line: None)
    assert torch.equal(vectors(whole), vectors(resumed))
    metrics = [(path / "metrics.jsonl").read_text() for path in (whole, resumed)]
    assert metrics[0] == metrics[1]
    assert len(metrics[0].splitlines()) == 4


def test_a_finished_run_is_unchanged_by_resuming(run: Path) -> None:
    before = vectors(run)
    package.resume(run, log=lambda line: None)
    assert torch.equal(before, vectors(run))


def test_neighbours_are_of_the_same_topic(cli: Cli, run: Path) -> None:
    answer = cli.json("neighbours", run, "king", "--top", "4")
    assert {near["text"] for near in answer["neighbours"]} == set(TOPICS[0].split()) - {"king"}
    summed = cli.json("neighbours", run, "king - queen + river", "--top", "3")
    assert {near["text"] for near in summed["neighbours"]} <= {*TOPICS[0].split(), *TOPICS[1].split(), "."}
    assert not {near["text"] for near in summed["neighbours"]} & {"king", "queen", "river"}


def test_vectors_of_a_text_are_the_means_of_its_words(run: Path) -> None:
    loaded = package.load(run)
    table = vectors(run)[loaded.tokenizer.encode("king boat")].mean(dim=0).numpy()
    np.testing.assert_allclose(loaded.embed(["king boat"], normalise=False)[0], table, rtol=1e-5, atol=1e-7)


def test_a_map_and_analogies_from_the_command_line(cli: Cli, run: Path, tmp_path: Path) -> None:
    cli("neighbours", run, "king", "--map", tmp_path / "map.svg")
    assert "queen" in (tmp_path / "map.svg").read_text()
    questions = tmp_path / "q.txt"
    questions.write_text(": topics\nking queen boat river\nking queen boat zebra\n")
    *sections, total = cli.json_lines("neighbours", run, "--questions", questions, "--json")
    assert [each["section"] for each in sections] == ["topics"]
    assert (total["answered"], total["left_out"]) == (1, 1)


@pytest.mark.parametrize("form", ["word2vec", "word2vec-binary", "glove"])
def test_an_export_imports_as_a_run(cli: Cli, form: str, run: Path, tmp_path: Path) -> None:
    file = tmp_path / ("v.bin" if form == "word2vec-binary" else "v.txt")
    cli("export", run, file, "--to", form)
    cli("import", file, tmp_path / "back")
    both = [cli.json("neighbours", path, "boat") for path in (run, tmp_path / "back")]
    near = [[(each["text"], each["cosine"]) for each in answer["neighbours"]] for answer in both]
    assert near[0] == near[1]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("neighbours", "{run}", "zebra"), "'zebra' is not in the vocabulary"),
        (("neighbours", "{run}", "king - - queen"), "expected words joined by"),
        (("neighbours", "{run}", "king + zebra"), "'zebra' is not in the vocabulary"),
        (("neighbours", "{run}"), "give one of"),
        (("evaluate", "{run}"), "weft neighbours RUN --pairs"),
        (("evaluate", "{run}", "--data", "{text}"), "weft neighbours RUN --pairs"),
        (("generate", "{run}", "--prompt", "king"), "a table of word vectors"),
        (("explain", "{run}", "--only", "graph", "--text", "king"), "predict no tokens"),
        (("explain", "{run}", "--only", "step", "--text", "king queen"), "no step to follow"),
        (("explain", "{run}", "--only", "gradients", "--text", "king queen"), "no layers to show"),
        (("explain", "glove", "--only", "gradients"), "no layers or time steps"),
        (("neighbours", "{run}", "king - king"), "add up to zero"),
        (("explain", "{run}", "--only", "saliency", "--text", "king queen"), "saliency needs a language model"),
        (("explain", "{run}", "--only", "growth"), "only looks values up"),
        (("train", "{run}", "--data", "{text}"), "is trained from scratch"),
        (("train", "word2vec", "--data", "{text}", "optimizer.lr=1"), "model.lr"),
        (("train", "glove", "--data", "{text}", "evaluate.patience=1"), "evaluate.patience"),
        (("compare", "word2vec", "gpt-tiny", "--data", "{text}", "--minutes", "1"), "only next-token models"),
    ],
)
def test_what_word_vectors_cannot_do_is_refused(
    cli: Cli, command: tuple[str, ...], message: str, *, run: Path, corpus: Path, tmp_path: Path
) -> None:
    with contextlib.chdir(tmp_path):
        assert message in cli.refused(*(word.format(run=run, text=corpus) for word in command))


def test_a_text_without_frequent_words_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three")
    changes = {"tokenizer": {"kind": "word", "min_count": 2}}
    with pytest.raises(TokenizerError, match="min_count = 2: no word occurs this often"):
        package.train("word2vec", data=str(tmp_path / "a.txt"), run=tmp_path / "run", changes=changes)
    assert not (tmp_path / "run" / "config.toml").exists()
    for text in ("one " * 30, "one two three"):
        (tmp_path / "a.txt").write_text(text)
        with pytest.raises(DataError, match="too few to learn vectors from"):
            package.train("word2vec", data=str(tmp_path / "a.txt"), run=tmp_path / "run")
        assert not (tmp_path / "run" / "config.toml").exists()


def test_plans_presets_and_anatomy_know_word_vectors(cli: Cli) -> None:
    assert "819,200" in cli("plan", "word2vec")
    assert "cbow" in cli("presets")
    assert "weighted least squares" in cli("explain", "glove", "--only", "anatomy")


def test_words_with_signs() -> None:
    assert signed_words("king") == [(1, "king")]
    assert signed_words("new york") == [(1, "new york")]
    assert signed_words("king - man + woman") == [(1, "king"), (-1, "man"), (1, "woman")]
    assert signed_words("- man") == [(-1, "man")]


def test_analogies_by_hand(tmp_path: Path) -> None:
    """Four words on a rectangle, and one far away."""
    table = torch.tensor([[1.0, 1.0], [1.0, -1.0], [2.0, 1.0], [2.1, -1.2], [-1.0, 0.0]])
    ids = {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4}
    questions = [
        Question("s", ("a", "b", "c", "d")),
        Question("t", ("a", "b", "c", "e")),
        Question("t", ("a", "b", "c", "?")),
    ]
    first, second, total = analogies(questions, table, ids.get)
    assert first == ("s", 1, 1, 0)
    assert second == ("t", 0, 1, 1)
    assert total == ("total", 1, 2, 1)
    file = tmp_path / "questions.txt"
    file.write_text(": capitals\nAthens Greece Oslo Norway\n")
    assert read_questions(str(file)) == [Question("capitals", ("Athens", "Greece", "Oslo", "Norway"))]


def test_parallel_layouts_are_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trained by one process"):
        package.train("glove", data=str(corpus), run=tmp_path / "run", changes={"parallel.tensor": 2})
