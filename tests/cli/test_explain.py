"""`weft explain`: the views of every kind of model, the lectures' facts, and invalid options."""

import html
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.command import Cli, Patch
from tests.spread import slow

import weft
from weft.api import reading
from weft.cli.main import run
from weft.data.shards import Shards, Tokens
from weft.decode.config import Branching
from weft.decode.translate import Translator
from weft.errors import DataError, WeftError
from weft.explain.attention.maps import AttentionMaps
from weft.explain.gradients import GradientHistory, GradientNorms
from weft.explain.surprise import Surprise
from weft.explain.views import VIEWS

RUNS = Path(__file__).parent.parent / "api" / "runs-0.1"
TEXT = "the cat sat"
# the views that a kind of model does not have
LACKING = {
    "gpt": {"likelihood", "neurons"},
    "bahdanau": {"cache", "lens", "likelihood", "positions", "neurons"},
    "pairs": {"cache", "likelihood", "neurons"},
    "masked-next": {"cache", "likelihood", "search", "neurons"},
    "classify": {"cache", "likelihood", "search", "surprise", "lens", "saliency", "neurons"},
    "lstm": {"attention", "cache", "heads", "lens", "likelihood", "positions", "neurons"},
    "ngram": set(VIEWS)
    - {"anatomy", "surprise", "search", "step", "activations", "graph", "precision", "training", "likelihood"},
}
LACKING = {
    name: views | {"patch", "probe", "experts"} for name, views in LACKING.items()
}  # they need two texts, labels, or a mixture
Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("name", [name if name == "ngram" else slow(name) for name in LACKING])
def test_views_of_every_kind_of_model(name: str) -> None:
    """A view that a model does not have is refused in one line."""
    explain = weft.load(RUNS / name).explain
    lacking: dict[str, str] = {}
    for view in VIEWS:
        try:
            picture = getattr(explain, view)()
            assert picture.text() or picture.figure().axes
        except WeftError as error:
            lacking[view] = str(error)
    assert lacking.keys() == LACKING[name] and not any("\n" in line for line in lacking.values())


@pytest.mark.slow
def test_a_view_as_a_figure_and_all_on_one_page(cli: Cli, tmp_path: Path) -> None:
    run_, page = str(RUNS / "lstm"), tmp_path / "all.html"
    assert run(["explain", run_, "--only", "surprise", "--text", TEXT, "--out", str(tmp_path / "a.svg")]) == 0
    assert (tmp_path / "a.svg").read_text().count("<svg") == 1
    assert cli("explain", run_, "--text", "the <b>cat</b> sat", "--out", page).splitlines()[-1] == f"lstm: {page}"
    text = page.read_text()
    assert text.count("<section") == len(VIEWS) - len(LACKING["lstm"])
    assert "<b>cat</b>" not in text and "https://" not in text
    assert text.count("http://") == text.count("http://www.w3.org")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["transformer", "--only", "positions"], "1  0.8415   0.5403   0.0100  1.0000"),  # F6
        (["llama-tiny", "--only", "positions"], "m − n only"),  # F7
        (["gpt2", "--only", "costs"], "39.8%"),  # F16; for the slide's sizes see weft plan --lecture opt
        (["mlp", "--backward"], "g_a = g_z ⊙ z ⊙ (1 − z)"),  # F24
        (["gpt2", "--only", "anatomy"], "d_k = 64"),  # F26
        (["transformer", "--only", "gradients"], "no norm    no"),  # F27
        (["transformer", "--only", "schedule", "steps=10", "schedule.kind=noam"], "10"),
        (["gpt3-175b", "--only", "anatomy"], "174,604,259,328"),
    ],
)
def test_facts_of_the_lectures(words: list[str], expected: str, cli: Cli) -> None:
    assert expected in cli("explain", *words)


def test_a_head_and_a_word(cli: Cli, tmp_path: Path) -> None:
    command = ["explain", RUNS / "gpt", "--only", "attention", "--text", TEXT]
    for options, name in ((["--layer", "0", "--head", "0"], "head.png"), (["--word", "cat"], "word.pdf")):
        cli(*command, *options, "--out", tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    graph = ["--only", "graph", "--shapes", "--open", "decoder.0"]
    cli("explain", RUNS / "gpt", *graph, "--out", tmp_path / "g.dot")
    assert (tmp_path / "g.dot").read_text().startswith("digraph")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{gpt}", "--only", "attention", "--layer", "9", "--head", "0"], "--layer 9: this model has"),
        (["{gpt}", "--only", "attention", "--layer", "0", "--head", "7"], "--head 7: this model has"),
        (["{gpt}", "--only", "attention", "--layer", "0"], "--layer 0: give --head as well"),
        (["{gpt}", "--only", "attention", "--text", TEXT, "--word", "dog"], "dog"),
        (["{gpt}", "--only", "surprise", "--text", "cat " * 500], "the model reads"),
        (["{gpt}", "--only", "surprise", "--text", ""], "empty"),
        (["{gpt}", "--layer", "0"], "--layer 0: needs --only attention or step"),
        (["{gpt}", "--only", "costs", "--shapes"], "--shapes: needs --only graph"),
        (["{gpt}", "--only", "surprise", "--place", "3"], "--place 3: needs --only saliency or step"),
        (["{gpt}", "--only", "saliency", "--text", TEXT, "--place", "99"], "place = 99: the model reads"),
        (["{gpt}", "--only", "search", "beams=99"], "beams"),
        (["{gpt}", "--only", "search", "width=3"], "width"),
        (["{gpt}", "--only", "costs", "--text", TEXT], "--text: the view 'costs' shows no text"),
        (["{gpt}", "--only", "attention", "--target", TEXT], "target: "),
        (["{gpt}", "model.layers=3"], "a run is shown as it is"),
        (["{gpt}", "--out", "a.png"], "a.png: expected a file name ending in .html"),
        (["{gpt}", "--only", "costs", "--out", "a.jpg"], "a.jpg: expected a file name ending in"),
        (["{gpt}", "--only", "heat"], "--only"),
        (["{ngram}", "--only", "attention"], "a model of kind 'ngram' has no attention"),
        (["gpt2", "--only", "attention"], "'gpt2' has no weights yet"),
        (["gpt-tiny", "--only", "schedule"], "steps=1000 optimizer.lr=3e-4"),
        (["gtp2"], "gtp2"),
        (["mlp", "--only", "costs"], "mlp, the lectures' small network, has only a graph"),
    ],
)
def test_invalid_options_are_one_line(
    words: list[str], message: str, cli: Cli, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word.format(gpt=RUNS / "gpt", ngram=RUNS / "ngram") for word in words]
    assert message in cli.refused("explain", *words)
    assert not list(tmp_path.iterdir())


def test_a_position_and_a_search(cli: Cli) -> None:
    def shown(view: str, *words: str) -> str:
        return cli("explain", RUNS / "gpt", "--only", view, "--text", TEXT, *words).strip()

    explain = weft.load(RUNS / "gpt").explain
    assert shown("saliency", "--place", "2") == explain.saliency(TEXT, place=2).text()
    step = explain.step(TEXT, place=2, layer=0).text() or ""
    assert shown("step", "--place", "2", "--layer", "0") == step.strip()
    trees = explain.search(TEXT, settings=Branching(beams=2, depth=5, top_k=1))
    assert shown("search", "beams=2", "depth=5", "top_k=1") == trees.text()
    # samples with top_k = 1 equal greedy search
    assert {text.text for text in trees.trees[2].written} == {text.text for text in trees.trees[0].written}


def test_an_empty_translation_ends(monkeypatch: Patch) -> None:
    monkeypatch.setattr(reading, "translation", lambda model, objective, text: "")
    found = weft.load(RUNS / "pairs").explain.surprise("a b")
    assert len(found.tokens) == 1 and not found.tokens[0].text  # the end-of-text token
    with pytest.raises(DataError, match="empty"):
        weft.load(RUNS / "pairs").explain.surprise("a b", target="")


@pytest.mark.parametrize("name", ["gpt", slow("masked-next"), slow("pairs"), "classify"])
def test_a_view_without_a_text_shows_held_out_data(name: str, cli: Cli) -> None:
    objective = weft.load(RUNS / name).objective
    held_out = " ".join(objective.excerpt("validation", 40).split())
    assert held_out and held_out != " ".join(objective.excerpt("train", 40).split())
    shown = " ".join(cli("explain", RUNS / name, "--only", "weights").split())
    assert "The text (from the held-out data): “" in shown
    assert held_out.startswith(shown.rpartition("“")[2].removesuffix("”.").removesuffix("…"))
    for text, notes in ((None, 1), ("the cat", 0)):
        page = weft.load(RUNS / name).explain.attention(text)._repr_html_()
        assert html.unescape(page).count("The text (from the held-out data)") == notes


@pytest.mark.parametrize("name", ["gpt", "pairs"])
def test_explain_writes_nothing_into_a_run(name: str, tmp_path: Path) -> None:
    shutil.copytree(RUNS / name, tmp_path / "run", ignore=shutil.ignore_patterns(".*"))
    before = sorted(tmp_path.rglob("*"))
    assert "held-out" in weft.load(tmp_path / "run").explain.own_text()[1]
    assert sorted(tmp_path.rglob("*")) == before


def test_the_text_without_held_out_data(tmp_path: Path, monkeypatch: Patch) -> None:
    shutil.copytree(RUNS / "gpt", tmp_path / "run", symlinks=True)
    explain = weft.load(tmp_path / "run").explain
    with pytest.MonkeyPatch.context() as patch:
        tokens = Shards.tokens
        patch.setattr(Shards, "tokens", lambda self, side: tokens(self, side) if side == "train" else Tokens([], []))
        text, origin = explain.own_text()
        assert text == explain.objective.excerpt("train", 40)[: len(text)] and "nothing was held out" in origin  # type: ignore[union-attr]
    shutil.rmtree(tmp_path / "run" / "data")
    again = weft.load(tmp_path / "run").explain
    assert again.own_text()[1] == "an example, as the run's data is not here"
    monkeypatch.setattr("weft.api.explain.VIEWS", ("costs",))
    assert "; the text (an example, as" in again.all().about
    assert again.all("the cat").title == "run" and "; the text: “the cat”" in again.all("the cat").about


def test_a_long_text_is_continued_from_its_end() -> None:
    ngram = weft.load(RUNS / "ngram")
    text = "the cat sat on the mat. " * 10
    greedy = ngram.explain.search(text).trees[0]
    assert greedy.written[0].text == ngram.generate(text, temperature=0, max_tokens=3)


@pytest.mark.slow
def test_a_page_draws_each_view_and_translates_once(tmp_path: Path, monkeypatch: Patch) -> None:
    drawn: list[str] = []

    def record(kind: type, method: str, title: str) -> None:
        function = getattr(kind, method)

        def recorded(*args: Any) -> Any:
            drawn.append(title)
            return function(*args)

        monkeypatch.setattr(kind, method, recorded)

    record(AttentionMaps, "html", "attention")
    record(Surprise, "html", "surprise")
    record(Translator, "translate", "translation")
    page = weft.load(RUNS / "pairs").explain.all()
    assert drawn == ["translation"]
    page.save(tmp_path / "page.html")
    assert sorted(drawn) == ["attention", "surprise", "translation"]


def test_gradients_at_the_checkpoints_of_a_run(tmp_path: Path) -> None:
    """An imported model has no first weights."""
    shutil.copytree(RUNS / "gpt", tmp_path / "run", symlinks=True)
    history = weft.load(tmp_path / "run").explain.gradients(TEXT)
    assert isinstance(history, GradientHistory)
    assert next(iter(history.stages)) == "at first" and list(history.stages)[-1] == "best"
    assert history.stages["best"].loss != history.stages["at first"].loss
    (tmp_path / "run" / "origin").mkdir()
    assert isinstance(weft.load(tmp_path / "run").explain.gradients(TEXT), GradientNorms)
