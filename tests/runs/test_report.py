"""The report: one page that needs nothing from elsewhere, whatever the run went through."""

import os
import re
import signal
from collections.abc import Sequence
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch
from tests.training.small import change_steps, train

from weft.data.batch import Batch
from weft.runs.lines import read_lines
from weft.runs.report import write_report
from weft.training import evaluation
from weft.training.step import OptimisationStep


def charts(html: str) -> list[str]:
    """Every chart of a page; what is cut at the edges of one stands in an <svg> of its own inside."""
    return re.findall(r"<svg [^>]*role=.*?</svg>(?=<svg [^>]*role=|</div>)", html, re.DOTALL)


def test_a_finished_run_has_a_page_with_its_curves(tmp_path, recipe, corpus, evaluate) -> None:  # type: ignore[no-untyped-def]
    result = train(
        recipe(), tmp_path / "run", corpus=corpus, evaluate=evaluate, quiet=True,
        command="weft train x --data <&>.txt",
    )  # fmt: skip
    result.run.event("result", bits_per_byte=1.25, baseline_bits_per_byte=4.5, samples=["<b>not bold</b> & so on"])
    html = write_report(result.run).read_text()
    HTMLParser().feed(html)
    assert "<h1>run</h1>" in html and f"recipe {result.run.recipe().name}, started" in html
    assert "1.250" in html
    assert "characters alone: 4.500" in html
    assert "&lt;b&gt;not bold&lt;/b&gt; &amp; so on" in html
    assert "weft train x --data &lt;&amp;&gt;.txt" in html
    assert "[model.attention]" in html
    assert not re.search(r"<script [^>]*src|<link|https?://", html)
    drawn = charts(html)
    assert len(drawn) == 5  # two of the loss, rate, norm, speed
    for svg in drawn:
        ElementTree.fromstring(svg)


def test_what_went_wrong_and_what_it_cost_are_on_the_page(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    settings = recipe("optimizer.lr=3.0", "steps=30", "log.every=1", "schedule.warmup=1", "guard.patience=3")
    result = train(settings, tmp_path / "run", corpus=corpus, quiet=True)
    result.run.event("samples", step=10, texts=["a <b>"])
    (rollback, *_) = [line for line in read_lines(result.run.events) if line["event"] == "rollback"]
    assert rollback["abandoned"][-1] == [rollback["step"], rollback["loss"]]
    html = write_report(result.run).read_text()
    assert 'class="mark"><title>rolled back to here from step ' in html
    assert ">abandoned<" in html
    assert "When training went wrong" in html
    assert "continued with 0.5 of the learning rate" in html
    parameters = sum(p.numel() for p in result.model.parameters())
    assert (
        f'<td>parameters</td><td class="n">{parameters:,}</td><td class="n">{parameters:,}</td>' in html
    )  # predicted, measured
    assert "step 10</td><td>a &lt;b&gt;" in html


def test_time_is_predicted_where_the_device_is_known(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    run = train(recipe("log.every=1"), tmp_path / "run", corpus=corpus, quiet=True).run
    html = write_report(run).read_text()
    assert '<td>time in steps</td><td class="n"></td><td class="n">' in html
    run.event("start", device="NVIDIA H200", processes=1)
    assert re.search(
        r"<td>time in steps</td><td class=\"n\">[\d.e-]+ seconds at 40% of the peak<", write_report(run).read_text()
    )


def test_memory_is_predicted_for_the_rows_that_were_found_to_fit(  # type: ignore[no-untyped-def]
    tmp_path, recipe, corpus, monkeypatch
) -> None:
    def little_memory(number: int, step: OptimisationStep, parts: Sequence[Batch]) -> None:
        if len(parts[0].tokens) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    many = recipe("steps=1", "batch.size=16", "batch.micro=2")
    expected = write_report(train(many, tmp_path / "two", corpus=corpus, quiet=True).run).read_text()
    change_steps(monkeypatch, little_memory)
    auto = recipe("steps=1", "batch.size=16", "batch.micro=auto")
    found = write_report(train(auto, tmp_path / "auto", corpus=corpus, quiet=True).run).read_text()
    row = re.compile(r'<tr><td>memory</td><td class="n">(.*?)</td>')
    assert row.search(found)[1] == row.search(expected)[1]  # type: ignore[index]


def test_a_run_that_never_logged_has_a_page_too(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    result = train(recipe("steps=1"), tmp_path / "run", corpus=corpus, quiet=True)
    for file in (result.run.metrics, result.run.timings, result.run.events):
        file.unlink()
    assert "not finished" in write_report(result.run).read_text()


def test_the_baseline_is_in_the_chart_of_the_loss(tmp_path, recipe, corpus, evaluate) -> None:  # type: ignore[no-untyped-def]
    run = train(recipe(), tmp_path / "run", corpus=corpus, evaluate=evaluate, quiet=True).run
    run.event("result", loss=3.0, bits_per_byte=2.0, baseline_bits_per_byte=4.0, samples=[])
    (loss, *_) = charts(write_report(run).read_text())
    assert ">characters 6<" in loss  # as many nats a token as the loss has for each bit per byte


def test_a_curve_begins_with_its_second_point(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    """Of a single evaluation the value is told."""
    settings = recipe("log.every=1", "evaluate.every=12")
    once = train(settings, tmp_path / "once", corpus=corpus, evaluate=lambda model: {"loss": 2.125}, quiet=True).run
    (loss, *_) = charts(write_report(once).read_text())
    assert ">held out 2.125<" in loss and "<title>" not in loss
    settings = recipe("log.every=1", "evaluate.every=6")
    twice = train(settings, tmp_path / "twice", corpus=corpus, evaluate=lambda model: {"loss": 2.125}, quiet=True).run
    (loss, *_) = charts(write_report(twice).read_text())
    assert ">held out<" in loss and loss.count("<title>") == 2


def test_no_control_byte_reaches_the_page(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    run = train(recipe("steps=1"), tmp_path / "run", corpus=corpus, quiet=True).run
    every = "".join(map(chr, range(0xA0))) + "\u202e"
    run.event("samples", step=1, texts=[every])
    run.event("result", samples=[every], table=[["text", "actual", "predicted"], [every, "a", "b"]])
    page = write_report(run).read_bytes().decode("utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", page)
    assert page.count(r"\x1b") == 3


def test_examples_are_shown_side_by_side(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    run = train(recipe("steps=1"), tmp_path / "run", corpus=corpus, quiet=True).run
    run.event("result", table=[["source", "reference", "output"], ["one <1>", "eins", "zwei"]])
    page = write_report(run).read_text()
    assert ">Held-out examples</h2>" in page
    assert ">reference</th>" in page
    assert re.search(r"one &lt;1&gt;</th><td[^>]*>eins</td><td[^>]*>zwei</td>", page)
    run.event("result", table=[["text", "actual", "predicted", "probability"], ["dull", "bad", "good", "99.0%"]])
    assert ">Mistakes it was surest of</h2>" in write_report(run).read_text()


def test_the_accuracy_is_drawn(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    accuracy = {"loss": 1.0, "accuracy": 0.5}
    run = train(recipe(), tmp_path / "run", corpus=corpus, evaluate=lambda model: accuracy, quiet=True).run
    assert 'aria-label="Accuracy, held out"' in write_report(run).read_text()


def test_the_page_is_there_while_a_run_trains_and_when_it_is_stopped(  # type: ignore[no-untyped-def]
    tmp_path, recipe, corpus, monkeypatch
) -> None:
    page, seen = tmp_path / "run/report.html", list[str]()

    def look(number: int, step: OptimisationStep, parts: Sequence[Batch]) -> None:
        if number == 5:  # the evaluation after step 4 has passed
            seen.append(page.read_text())
        if number == 7:
            os.kill(os.getpid(), signal.SIGINT)

    change_steps(monkeypatch, look)
    settings = recipe("log.every=1")
    with pytest.raises(KeyboardInterrupt):
        train(settings, page.parent, corpus=corpus, evaluate=lambda model: {"loss": 1.5}, quiet=True)
    assert "not finished: at step 4 of 12" in seen[0]
    assert "<b>1.500</b>loss, held out, at step 4" in seen[0]
    assert "not finished: interrupted after step 7 of 12" in page.read_text()


def test_a_page_that_cannot_be_written_ends_no_run(tmp_path, recipe, corpus, evaluate, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def broken(run: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(evaluation, "write_report", broken)
    result = train(recipe(), tmp_path / "run", corpus=corpus, evaluate=evaluate, quiet=True)
    assert result.steps == 12
    failed = [line["reason"] for line in read_lines(result.run.events) if line["event"] == "report failed"]
    assert failed[0] == "ValueError: a bug"


def test_whatever_a_run_from_elsewhere_says_is_text(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    result = train(recipe(), tmp_path / "run", corpus=corpus, quiet=True)
    evil = "<img src=x onerror=alert(1)>\"'&"
    run = result.run
    run.event("start", time=evil, device=evil, command=evil, corpus=[evil], weft=evil, choices=[[evil, evil]])
    run.event("rollback", step=3, to=1, since=evil, rate=0.5, tries=1, abandoned=[])
    run.event("discarded", steps=[evil])
    run.event("samples", step=evil, texts=[evil, evil])
    run.event("result", samples=[evil], labels=[evil], matrix=[[1]])
    html = write_report(run).read_text()
    assert "<img" not in html
    assert html.count("&lt;img src=x onerror=alert(1)&gt;&#34;&#39;&amp;") >= 9  # a time of day is cut short
