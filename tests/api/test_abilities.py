"""Abilities of causal, masked and encoder–decoder runs against plain loops, over time, and mistakes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.command import Cli

import weft
from weft.api.abilities import _spelled
from weft.errors import ConfigError
from weft.evaluate.abilities.result import answer_value
from weft.evaluate.abilities.tasks import TASKS, Ability, AbilitySpeller
from weft.explain.reading import SourceTokens

RUNS = Path(__file__).parent / "runs-0.1"


@pytest.mark.parametrize("name", ["gpt", "lstm", "ngram"])
def test_causal_models_are_asked_for_the_likeliest_candidate(name: str) -> None:
    run, task = weft.load(RUNS / name), TASKS["counting"]
    (found,) = run.abilities(["counting"], distances=[4], questions=6).curves
    if found.skipped:
        pytest.skip(found.skipped)
    speller = AbilitySpeller([run.tokenizer])
    values = []
    for question in speller.questions(task, 4, items=6, seed=0):
        _, context, candidates = _spelled(run.objective, speller.form(task), question)
        with torch.no_grad():
            row = run.model.eval()(torch.tensor([list(context)]))[0, -1].log_softmax(-1)
        values.append(answer_value([float(row[ids[0]]) for ids in candidates]))
    assert found.points[0].accuracy == pytest.approx(sum(values) / 6)


def test_an_encoder_decoder_reads_the_source_and_continues_the_target() -> None:
    run = weft.load(RUNS / "pairs")
    result = run.abilities(["reversal", "brackets"], questions=5)
    curves = {each.task.name: each for each in result.curves}
    assert "no tokens for" in curves["brackets"].skipped
    assert [point.distance for point in curves["reversal"].points] == [4, 6, 8]
    remark = "reversal: distance 12 left out, longer than the vocabulary's 13 symbols of one token allow."
    assert remark in result.remarks
    speller, task, values = AbilitySpeller([run.tokenizer]), TASKS["reversal"], []
    for question in speller.questions(task, 4, items=5, seed=0):
        source, context, candidates = _spelled(run.objective, speller.form(task), question)
        inputs = SourceTokens(torch.tensor([list(source)]))
        with torch.no_grad():
            row = run.model.eval()(torch.tensor([list(context)]), source=inputs)[0, -1].log_softmax(-1)
        values.append(answer_value([float(row[ids[0]]) for ids in candidates]))
    assert curves["reversal"].points[0].accuracy == pytest.approx(sum(values) / 5)


def test_a_masked_model_fills_the_last_position() -> None:
    result = weft.load(RUNS / "masked-next").abilities(questions=4)
    asked = [each for each in result.curves if not each.skipped]
    assert all(0 <= point.accuracy <= 1 for each in asked for point in each.points)
    assert len(result.tables()[0].rows) == len(TASKS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("abilities") / "run"
    changes = {"model.d_model": 16, "model.layers": 1, "batch.length": 32, "model.context": 32, "steps": 6}
    changes |= {
        "checkpoint.every": 2,
        "checkpoint.keep": 5,
        "evaluate.every": 2,
        "batch.size": 4,
        "model.attention.heads": 2,
    }
    weft.train("gpt-tiny", data="builtin:stories", run=path, changes=changes, log=lambda _: None)
    return path


def test_the_command_writes_table_page_and_json(trained: Path, cli: Cli, tmp_path: Path) -> None:
    words = ("evaluate", trained, "--abilities", "--limit", 2)
    table = cli(*words, "--only", "induction,agreement")
    assert "induction" in table and "agreement" in table and "25%" in table
    found = cli.json(*words)
    assert [each["name"] for each in found["abilities"]] == list(TASKS)
    assert {each["ceiling"] for each in found["abilities"]} == {1.0}
    again = weft.load(trained).abilities(questions=2).record()
    assert json.loads(json.dumps(again)) == found
    cli(*words, "--out", tmp_path / "page.html", "--figure", tmp_path / "curves.svg")
    assert "Abilities" in (tmp_path / "page.html").read_text() and (tmp_path / "curves.svg").stat().st_size


def test_accuracy_at_every_checkpoint(trained: Path, cli: Cli, tmp_path: Path) -> None:
    words = ("evaluate", trained, "--abilities", "--only", "induction", "--limit", 4, "--distances", 4)
    found = cli.json(*words, "--checkpoints", "all")
    assert found["steps"] == [2, 4, 6] and all(found["losses"])
    last = cli.json("evaluate", trained, "--abilities", "--only", "induction", "--limit", 4, "--distances", 4)
    assert found["curves"][0]["accuracies"][-1]["accuracy"] == last["abilities"][0]["accuracy"]
    (tmp_path / "pairs.tsv").write_text("good\tbad\nthe cat sits\tthe cat sit\n")
    pairs = cli.json("evaluate", trained, "--pairs", tmp_path / "pairs.tsv", "--checkpoints", "2,6")
    assert pairs["steps"] == [2, 6] and pairs["curves"][0]["name"] == "all pairs"
    assert "checkpoints of run" in cli(*words, "--checkpoints", "all", "--out", tmp_path / "time.html")


def test_mistakes_are_one_line(trained: Path, cli: Cli, tmp_path: Path) -> None:
    words = ("evaluate", trained, "--abilities")
    assert "did you mean 'induction'" in cli.refused(*words, "--only", "inducton")
    assert "more than the context" in cli.refused(*words, "--only", "induction", "--distances", 500)
    unit = "distance 1: for 'copying' it is the length of the string, at least 4"
    assert unit in cli.refused(*words, "--only", "copying", "--distances", 1)
    assert "no such checkpoint; it has 3" in cli.refused(*words, "--checkpoints", "3")
    assert "expected numbers" in cli.refused(*words, "--checkpoints", "first")
    assert "--data book.txt: not available with --abilities" in cli.refused(*words, "--data", "book.txt")
    assert "--only" in cli.refused("evaluate", trained, "--only", "sums")
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy, symlinks=True)
    shutil.rmtree(copy / "checkpoints/step-00000002")
    assert "no such checkpoint" in cli.refused("evaluate", copy, "--abilities", "--checkpoints", "2")
    with pytest.raises(ConfigError, match="no such ability"):
        weft.load(trained).abilities(["flying"])
    run: Any = weft.load(trained)
    with pytest.raises(ConfigError, match="questions = 0: expected 1 or more"):
        run.abilities(["copying"], questions=0)
    for steps in ("best", list[int]()):
        with pytest.raises(ConfigError, match=r"checkpoints = .*: expected 'all', or a list of steps"):
            run.over_time(lambda run: run.abilities(["copying"]), steps)
    with pytest.raises(ConfigError, match=r"measure returned a value of type float, expected run.abilities"):
        run.over_time(lambda run: run.perplexity("the cat"), [2])


def test_a_distance_that_does_not_fit_is_refused_before_all_questions_are_made(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[int]()
    questions = AbilitySpeller.questions

    def counted(self: AbilitySpeller, task: Ability, distance: int, *, items: int, seed: int) -> Any:
        made.append(items)
        return questions(self, task, distance, items=items, seed=seed)

    monkeypatch.setattr(AbilitySpeller, "questions", counted)
    with pytest.raises(ConfigError, match="more than the context"):
        weft.load(trained).abilities(["copying"], distances=[2000])
    assert made == [1]
