"""`weft evaluate` and `weft classify`: metrics, details, predictions, and refused options."""

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from weft.api.load import load
from weft.cli.main import run

Capture = pytest.CaptureFixture[str]
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
def ngram_evaluation(folder: Path) -> tuple[dict[str, Any], str]:
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
    ],
)
def test_options_that_do_not_apply_are_refused(
    folder: Path, name: str, words: list[str], line: str, capsys: Capture
) -> None:
    capsys.readouterr()
    assert run(["evaluate", str(folder / name), *words]) == 2
    err = capsys.readouterr().err
    assert line in err and err.count("\n") == 1


def test_an_unwritable_figure_is_refused_before_the_evaluation(folder: Path, capsys: Capture) -> None:
    capsys.readouterr()
    assert run(["evaluate", str(folder / "labels"), "--figure", str(folder / "book.txt" / "x.png")]) == 2
    shown = capsys.readouterr()
    assert "is not a folder" in shown.err and shown.out == ""


def test_columns_must_have_the_names_of_training(folder: Path, capsys: Capture) -> None:
    (folder / "other.tsv").write_text("comment\tlabel\nthe frog\t1\n")
    (folder / "texts.csv").write_text("comment\nthe frog\n")
    for name, data in (("labels", "other.tsv"), ("masked", "texts.csv")):
        capsys.readouterr()
        assert run(["evaluate", str(folder / name), "--data", str(folder / data)]) == 2
        assert capsys.readouterr().err.endswith("; this run reads 'text', so rename the column\n")


def test_a_run_without_held_out_data_is_evaluated_on_other_text(folder: Path, capsys: Capture) -> None:
    assert run(["evaluate", str(folder / "masked"), "--data", str(folder / "book.txt")]) == 0
    assert "loss" in capsys.readouterr().out


def test_plain_lines_have_no_columns(folder: Path, capsys: Capture) -> None:
    capsys.readouterr()
    assert run(["classify", str(folder / "labels"), str(folder / "lines.txt")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert run(["classify", str(folder / "labels"), str(folder / "lines.txt"), "--column", "nope"]) == 2
    assert "no column 'nope'" in capsys.readouterr().err
    for command in ("classify", "embed"):
        assert run([command, str(folder / "labels"), "--column", "nope"]) == 2
        assert "standard input: one text per line, without a column 'nope'" in capsys.readouterr().err


def test_predicted_numbers_and_tags(tmp_path: Path, capsys: Capture) -> None:
    words = [["the", "frog" if n % 2 else "dog", str(n)] for n in range(24)]
    lines = [
        json.dumps({"text": " ".join(w), "score": n, "words": w, "tags": ["D", "N", "C"]}) for n, w in enumerate(words)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    for objective in ("regress", "tag"):
        options = ["--data", str(tmp_path / "rows.jsonl"), "--run", str(tmp_path / objective), f"objective={objective}"]
        assert run(["train", "bert-tiny", *options, *SMALL, "batch.length=16"]) == 0
    (tmp_path / "new.txt").write_text("the frog 7\nthe dog\n")
    found = {}
    for objective in ("regress", "tag"):
        capsys.readouterr()
        assert run(["classify", str(tmp_path / objective), str(tmp_path / "new.txt")]) == 0
        plain = capsys.readouterr().out.splitlines()
        assert run(["classify", str(tmp_path / objective), str(tmp_path / "new.txt"), "--json"]) == 0
        found[objective] = plain, [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    plain, whole = found["regress"]
    assert plain == [f"{row['score']:.4f}\t{row['text']}" for row in whole]
    assert [row["text"] for row in whole] == ["the frog 7", "the dog"]
    plain, whole = found["tag"]
    assert [row["words"] for row in whole] == [["the", "frog", "7"], ["the", "dog"]]
    assert plain == [" ".join(map("/".join, zip(row["words"], row["tags"], strict=True))) for row in whole]
    same = "\n".join(json.dumps({"text": " ".join(w), "score": 1}) for w in words)
    (tmp_path / "same.jsonl").write_text(same)
    capsys.readouterr()
    assert run(["evaluate", str(tmp_path / "regress"), "--data", str(tmp_path / "same.jsonl"), "--json"]) == 0
    metrics = capsys.readouterr().out
    assert "NaN" not in metrics and json.loads(metrics)["pearson"] is None
    assert run(["classify", str(tmp_path / "tag"), str(tmp_path / "rows.jsonl")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 24
    assert run(["classify", str(tmp_path / "tag"), str(tmp_path / "new.txt"), "--second", "x"]) == 2
    assert "--second x:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_run_that_cannot_generate_names_its_use(folder: Path, command: str, capsys: Capture) -> None:
    capsys.readouterr()
    assert run([command, str(folder / "labels")]) == 2
    shown = capsys.readouterr()
    assert "this run is a classifier; it can't continue a text; use it with weft classify" in shown.err
    assert shown.out == "" and shown.err.count("\n") == 1


def test_the_baseline_is_shown_for_the_runs_own_data(
    folder: Path, ngram_evaluation: tuple[dict[str, Any], str], capsys: Capture
) -> None:
    found, shown = ngram_evaluation
    result = load(folder / "counts").results()["baseline_bits_per_byte"]
    assert f"{result:.4f} bits per byte of character frequencies alone" in " ".join(shown.split())
    assert found["baseline_bits_per_byte"] == result
    capsys.readouterr()
    other = ["--data", str(folder / "lines.txt"), str(folder / "book.txt")]
    assert run(["evaluate", str(folder / "counts"), *other, "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert "baseline_bits_per_byte" not in metrics  # it is known only for the run's own data
    assert metrics["bytes"] == sum((folder / name).stat().st_size for name in ("lines.txt", "book.txt"))


def test_intervals_and_overlap(
    folder: Path, ngram_evaluation: tuple[dict[str, Any], str], tmp_path: Path, capsys: Capture
) -> None:
    found, shown = ngram_evaluation
    low, high = found["intervals"]["bits_per_byte"]
    assert low < found["bits_per_byte"] < high and found["sections"] > 1
    assert f"{low:.4f}–{high:.4f}" in shown and f"over {found['sections']} sections" in shown and "Overlap: " in shown
    (tmp_path / "short.txt").write_text("the dog ran")
    capsys.readouterr()
    assert run(["evaluate", str(folder / "counts"), "--data", str(tmp_path / "short.txt")]) == 0
    shown = capsys.readouterr().out
    assert "No intervals: the text is a single section." in shown and "95 %" not in shown
    text = (folder / "book.txt").read_text()
    (tmp_path / "again.txt").write_text("the river and the dog ran " * 9)
    (tmp_path / "same.txt").write_text(text)
    shares = []
    for name in ("again.txt", "same.txt"):
        assert run(["evaluate", str(folder / "counts"), "--data", str(tmp_path / name), "--json", "--overlap"]) == 0
        shares.append(json.loads(capsys.readouterr().out)["overlap"])
    assert shares[0]["share"] == 0.0 and shares[0]["checked"] > 30
    assert shares[1]["share"] > 0.9 and shares[1]["covered"] > 0.5 * shares[1]["bytes"]


def test_details_of_an_evaluation(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    counts, page = str(folder / "counts"), tmp_path / "page.html"
    capsys.readouterr()
    assert run(["evaluate", counts, "--details", "--out", str(page)]) == 0
    shown = capsys.readouterr().out
    for title in ("Loss by tokens seen before", "Loss by occurrences in the training text", "most surprising passages"):
        assert title in shown and title in page.read_text()
    assert run(["evaluate", counts, "--details", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(each["tokens"] for each in found["by_position"]) == found["tokens"]
    assert sum(each["nats"] for each in found["by_frequency"]) == pytest.approx(found["loss"] * found["tokens"])
    for words, line in (
        (["labels", "--details"], "--details: only for language models; this run is a classifier"),
        (["masked", "--overlap", "--data", "x"], "--overlap: only for language models; this run is"),
        (["counts", "--out", "x.txt"], "x.txt: expected a file name ending in .html"),
        (["counts", "--details", "--stride", "4"], "stride = 4: this run is not evaluated in windows of text"),
    ):
        assert run(["evaluate", str(folder / words[0]), *words[1:]]) == 2
        assert line in capsys.readouterr().err


def test_an_empty_text_is_refused(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    for text, line in (("", "contains no text"), (" \n", "no text at all")):
        (tmp_path / "x.txt").write_text(text)
        capsys.readouterr()
        assert run(["evaluate", str(folder / "counts"), "--data", str(tmp_path / "x.txt")]) == 2
        shown = capsys.readouterr()
        assert line in shown.err and shown.err.count("\n") == 1 and shown.out == ""


def test_damaged_training_data_does_not_prevent_an_evaluation_on_other_data(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    shutil.copytree(folder / "counts", tmp_path / "run")
    words = ["evaluate", str(tmp_path / "run"), "--data", str(folder / "book.txt"), "--details"]
    tokens = next((tmp_path / "run" / "data").glob("train-*.tokens"))
    tokens.write_bytes(bytes(tokens.stat().st_size))
    for line in ("its text can't be read", "this run's training text is not here to compare with"):
        capsys.readouterr()
        assert run(words) == 0
        shown = capsys.readouterr().out
        assert "occurrences" not in shown and "Overlap: " not in shown
        assert run([*words, "--overlap"]) == 2
        assert line in capsys.readouterr().err
        shutil.rmtree(tmp_path / "run" / "data")
        (tmp_path / "run" / "data").mkdir()
