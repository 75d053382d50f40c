"""`weft evaluate` and `weft classify`: metrics, details, predictions, and refused options."""

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.command import Cli

from weft.api.load import load
from weft.cli.main import run

Capture = pytest.CaptureFixture[str]
Shown = tuple[dict[str, Any], str]
SMALL = ["model.layers=1", "model.d_model=16", "model.attention.heads=2", "model.feedforward.d_ff=16", "steps=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier, a masked language model without held-out data, and an n-gram model."""
    folder = tmp_path_factory.mktemp("trained")
    rows = [f"the {'frog' if n % 2 else 'dog'} {n}\t{n % 2}" for n in range(80)]
    (folder / "rows.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    (folder / "lines.txt").write_text("the frog\nthe dog\n")
    (folder / "book.txt").write_text("".join(f"frog {n} sat by the river and the dog ran\n" for n in range(200)))
    rows_, book, none = str(folder / "rows.tsv"), str(folder / "book.txt"), "data.validation.kind=none"
    classify = ["train", "bert-tiny", "--data", rows_, "--run", str(folder / "labels"), "objective=classify"]
    masked = ["train", "bert-tiny", "--data", book, "--run", str(folder / "masked"), "objective=masked", none]
    assert run([*classify, *SMALL, "batch.length=16"]) == 0
    assert run([*masked, *SMALL, "batch.length=16", "batch.size=2"]) == 0
    assert run(["train", "ngram-3", "--data", book, "--run", str(folder / "counts"), "tokenizer=word"]) == 0
    return folder


@pytest.fixture(scope="module")
def ngram_evaluation(folder: Path) -> Shown:
    """The evaluation of the n-gram model as JSON, and as text."""
    shown = []
    for options in (["--json"], []):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert run(["evaluate", str(folder / "counts"), *options]) == 0
        shown.append(out.getvalue())
    return json.loads(shown[0]), shown[1]


@pytest.mark.parametrize(
    ("name", "words", "line"),
    [
        ("labels", ["--stride", "4"], "stride = 4: this run is not evaluated in windows of text"),
        ("counts", ["--stride", "4"], "stride = 4: this run is not evaluated in windows of text"),
        ("labels", ["--targets", "x.txt"], "--targets x.txt: the targets of the lines of --data, which is missing"),
        ("counts", ["--data", "x", "--targets", "y"], "--targets y: this run is a language model, which"),
        ("counts", ["--figure", "x.png"], "--figure x.png: this run is a language model, which has no"),
        ("labels", ["--figure", "x.txt"], "x.txt: expected a file name ending in .svg, .png or .pdf"),
        ("masked", [], "this run has no held-out data; name the data to evaluate on with --data"),
        ("labels", ["--figure", __file__ + "/x.png"], "is not a folder"),
        ("labels", ["--details"], "--details: only for language models; this run is a classifier"),
        ("masked", ["--overlap", "--data", "x"], "--overlap: only for language models; this run is"),
        ("counts", ["--out", "x.txt"], "x.txt: expected a file name ending in .html"),
        ("counts", ["--details", "--stride", "4"], "stride = 4: this run is not evaluated in windows of text"),
    ],
)
def test_options_that_do_not_apply_are_refused(folder: Path, name: str, words: list[str], line: str, cli: Cli) -> None:
    assert line in cli.refused("evaluate", folder / name, *words)


def test_columns_must_have_the_names_of_training(folder: Path, cli: Cli) -> None:
    (folder / "other.tsv").write_text("comment\tlabel\nthe frog\t1\n")
    (folder / "texts.csv").write_text("comment\nthe frog\n")
    for name, data in (("labels", "other.tsv"), ("masked", "texts.csv")):
        line = cli.refused("evaluate", folder / name, "--data", folder / data)
        assert line.endswith("; this run reads 'text', so rename the column")


def test_a_run_without_held_out_data_is_evaluated_on_other_text(folder: Path, cli: Cli) -> None:
    assert "loss" in cli("evaluate", folder / "masked", "--data", folder / "book.txt")


def test_plain_lines_have_no_columns(folder: Path, cli: Cli) -> None:
    assert len(cli("classify", folder / "labels", folder / "lines.txt").splitlines()) == 2
    assert "no column 'nope'" in cli.refused("classify", folder / "labels", folder / "lines.txt", "--column", "nope")
    for command in ("classify", "embed"):
        line = cli.refused(command, folder / "labels", "--column", "nope")
        assert "standard input: one text per line, without a column 'nope'" in line


def test_predicted_numbers_and_tags(tmp_path: Path, cli: Cli) -> None:
    words = [["the", "frog" if n % 2 else "dog", str(n)] for n in range(24)]
    rows = [{"text": " ".join(w), "score": n, "words": w, "tags": ["D", "N", "C"]} for n, w in enumerate(words)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "new.txt").write_text("the frog 7\nthe dog\n")
    found = {}
    for objective in ("regress", "tag"):
        options = ["--data", tmp_path / "rows.jsonl", "--run", tmp_path / objective, f"objective={objective}"]
        cli("train", "bert-tiny", *options, *SMALL, "batch.length=16")
        command = ["classify", tmp_path / objective, tmp_path / "new.txt"]
        found[objective] = cli(*command).splitlines(), cli.json_lines(*command, "--json")
    plain, whole = found["regress"]
    assert plain == [f"{row['score']:.4f}\t{row['text']}" for row in whole]
    assert [row["text"] for row in whole] == ["the frog 7", "the dog"]
    plain, whole = found["tag"]
    assert [row["words"] for row in whole] == [["the", "frog", "7"], ["the", "dog"]]
    assert plain == [" ".join(map("/".join, zip(row["words"], row["tags"], strict=True))) for row in whole]
    same = "\n".join(json.dumps({"text": " ".join(w), "score": 1}) for w in words)
    (tmp_path / "same.jsonl").write_text(same)
    metrics = cli("evaluate", tmp_path / "regress", "--data", tmp_path / "same.jsonl", "--json")
    assert "NaN" not in metrics and json.loads(metrics)["pearson"] is None
    assert len(cli("classify", tmp_path / "tag", tmp_path / "rows.jsonl").splitlines()) == 24
    assert "--second x:" in cli.refused("classify", tmp_path / "tag", tmp_path / "new.txt", "--second", "x")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_run_that_cannot_generate_names_its_use(folder: Path, command: str, cli: Cli) -> None:
    line = cli.refused(command, folder / "labels")
    assert "this run is a classifier; it can't continue a text; use it with weft classify" in line


def test_the_baseline_is_shown_for_the_runs_own_data(folder: Path, ngram_evaluation: Shown, cli: Cli) -> None:
    found, shown = ngram_evaluation
    result = load(folder / "counts").results()["baseline_bits_per_byte"]
    assert f"{result:.4f} bits per byte of character frequencies alone" in " ".join(shown.split())
    assert found["baseline_bits_per_byte"] == result
    metrics = cli.json("evaluate", folder / "counts", "--data", folder / "lines.txt", folder / "book.txt")
    assert "baseline_bits_per_byte" not in metrics and metrics["no_baseline"] == "known only for the run's own data"
    assert metrics["bytes"] == sum((folder / name).stat().st_size for name in ("lines.txt", "book.txt"))


def test_intervals_and_overlap(folder: Path, ngram_evaluation: Shown, tmp_path: Path, cli: Cli) -> None:
    found, shown = ngram_evaluation
    low, high = found["intervals"]["bits_per_byte"]
    assert low < found["bits_per_byte"] < high and found["sections"] > 1
    assert f"{low:.4f}–{high:.4f}" in shown and f"over {found['sections']} sections" in shown and "Overlap: " in shown
    (tmp_path / "short.txt").write_text("the dog ran")
    shown = cli("evaluate", folder / "counts", "--data", tmp_path / "short.txt")
    assert "No intervals: the text is a single section." in shown and "95%" not in shown
    (tmp_path / "other.txt").write_text("the river and the dog ran " * 9)
    other = cli.json("evaluate", folder / "counts", "--data", tmp_path / "other.txt", "--overlap")["overlap"]
    same = cli.json("evaluate", folder / "counts", "--data", folder / "book.txt", "--overlap")["overlap"]
    assert other["share"] == 0.0 and other["checked"] > 30
    assert same["share"] > 0.9 and same["covered"] > 0.5 * same["bytes"]


def test_details_of_an_evaluation(folder: Path, tmp_path: Path, cli: Cli) -> None:
    counts, page = str(folder / "counts"), tmp_path / "page.html"
    shown = cli("evaluate", counts, "--details", "--out", page)
    for title in ("Loss by tokens seen before", "Loss by occurrences in the training text", "most surprising passages"):
        assert title in shown and title in page.read_text()
    found = cli.json("evaluate", counts, "--details")
    assert sum(each["tokens"] for each in found["by_position"]) == found["tokens"]
    assert sum(each["nats"] for each in found["by_frequency"]) == pytest.approx(found["loss"] * found["tokens"])


def test_an_empty_text_is_refused(folder: Path, tmp_path: Path, cli: Cli) -> None:
    for text, line in (("", "contains no text"), (" \n", "no text at all")):
        (tmp_path / "x.txt").write_text(text)
        assert line in cli.refused("evaluate", folder / "counts", "--data", tmp_path / "x.txt")


def test_other_data_is_evaluated_beside_damaged_training_data(folder: Path, tmp_path: Path, cli: Cli) -> None:
    shutil.copytree(folder / "counts", tmp_path / "run")
    words = ["evaluate", str(tmp_path / "run"), "--data", str(folder / "book.txt"), "--details"]
    tokens = next((tmp_path / "run" / "data").glob("train-*.tokens"))
    tokens.write_bytes(bytes(tokens.stat().st_size))
    for line in ("its text can't be read", "this run's training text is not here to compare with"):
        shown = cli(*words)
        assert "occurrences" not in shown and "Overlap: " not in shown
        assert line in cli.refused(*words, "--overlap")
        shutil.rmtree(tmp_path / "run" / "data")
        (tmp_path / "run" / "data").mkdir()
