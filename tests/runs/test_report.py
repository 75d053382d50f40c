"""The report: one self-contained page, whatever happened in the run."""

import os
import re
import signal
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from tests.runs.conftest import TrainRun
from tests.training.small import change_steps

from weft.data.batch import Batch
from weft.runs.lines import read_lines
from weft.runs.report import write_report
from weft.training import evaluation
from weft.training.step import OptimisationStep


def charts(html: str) -> list[str]:
    """Return every chart of a page; parts that are clipped at its edges are in a nested <svg>."""
    return re.findall(r"<svg [^>]*role=.*?</svg>(?=<svg [^>]*role=|</div>)", html, re.DOTALL)


def test_a_finished_run_has_a_page_with_its_curves(train_run: TrainRun) -> None:
    result = train_run(evaluate=True, command="weft train x --data <&>.txt")
    result.run.event("result", bits_per_byte=1.25, baseline_bits_per_byte=4.5, samples=["<b>not bold</b> & so on"])
    html = write_report(result.run).read_text()
    HTMLParser().feed(html)
    assert "<h1>run</h1>" in html and f"recipe {result.run.recipe().name}, started" in html
    assert "1.250" in html and "character frequencies alone: 4.500" in html and "[model.attention]" in html
    assert "&lt;b&gt;not bold&lt;/b&gt; &amp; so on" in html and "weft train x --data &lt;&amp;&gt;.txt" in html
    assert not re.search(r"<script [^>]*src|<link|https?://", html)
    drawn = charts(html)
    assert len(drawn) == 5  # two of the loss, learning rate, norm, speed
    for svg in drawn:
        ElementTree.fromstring(svg)


def test_rollbacks_and_costs_are_on_the_page(train_run: TrainRun) -> None:
    result = train_run("optimizer.lr=3.0", "steps=30", "log.every=1", "schedule.warmup=1", "guard.patience=3")
    result.run.event("samples", step=10, texts=["a <b>"])
    (rollback, *_) = [line for line in read_lines(result.run.events) if line["event"] == "rollback"]
    assert rollback["abandoned"][-1] == [rollback["step"], rollback["loss"]]
    html = write_report(result.run).read_text()
    assert 'class="mark"><title>rolled back to here from step ' in html and ">abandoned<" in html
    assert "Discarded updates and rollbacks" in html and "continued with 0.5 of the learning rate" in html
    rate = [line["rate"] for line in read_lines(result.run.events) if line["event"] == "rollback"][-1]
    assert f"the learning rate was cut to {rate:.3g} of optimizer.lr, from 3 to {3 * rate:.3g}." in html
    parameters = sum(p.numel() for p in result.model.parameters())
    predicted = measured = f'<td class="n">{parameters:,}</td>'
    assert f"<td>parameters</td>{predicted}{measured}" in html
    assert "step 10</td><td>a &lt;b&gt;" in html


def test_time_is_predicted_if_the_device_is_known(train_run: TrainRun) -> None:
    run = train_run("log.every=1").run
    assert '<td>time in steps</td><td class="n"></td><td class="n">' in write_report(run).read_text()
    run.event("start", device="NVIDIA H200", processes=1)
    time = r"<td>time in steps</td><td class=\"n\">[\d.e-]+ seconds at 40% of the peak<"
    assert re.search(time, write_report(run).read_text())


def test_memory_is_predicted_for_the_micro_batch_that_fits(
    train_run: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def little_memory(number: int, step: OptimisationStep, parts: Sequence[Batch]) -> None:
        if len(parts[0].tokens) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def memory(micro: str) -> list[str]:
        page = write_report(train_run("steps=1", "batch.size=16", f"batch.micro={micro}", name=micro).run).read_text()
        return re.findall(r'<tr><td>memory</td><td class="n">(.*?)</td>', page)

    expected = memory("2")
    change_steps(monkeypatch, little_memory)
    assert memory("auto") == expected != []


def test_a_run_without_logs_has_a_page(train_run: TrainRun) -> None:
    result = train_run("steps=1")
    for file in (result.run.metrics, result.run.timings, result.run.events):
        file.unlink()
    assert "not finished" in write_report(result.run).read_text()


def test_the_baseline_and_the_accuracy_are_drawn(train_run: TrainRun) -> None:
    run = train_run(evaluate={"loss": 1.0, "accuracy": 0.5}).run
    run.event("result", loss=3.0, bits_per_byte=2.0, baseline_bits_per_byte=4.0, samples=[])
    page = write_report(run).read_text()
    assert ">character frequencies 6<" in charts(page)[0]  # 4 bits per byte at 1.5 nats per token each
    assert 'aria-label="Accuracy, held out"' in page


@pytest.mark.parametrize(("every", "legend", "points"), [(12, "held out 2.125", 0), (6, "held out", 2)])
def test_a_single_evaluation_is_shown_as_a_value(train_run: TrainRun, every: int, legend: str, points: int) -> None:
    run = train_run("log.every=1", f"evaluate.every={every}", evaluate={"loss": 2.125}).run
    (loss, *_) = charts(write_report(run).read_text())
    assert f">{legend}<" in loss and loss.count("<title>") == points


def test_no_control_character_reaches_the_page(train_run: TrainRun) -> None:
    run = train_run("steps=1").run
    text = "".join(map(chr, range(0xA0))) + "\u202e"
    run.event("samples", step=1, texts=[text])
    run.event("result", samples=[text], table=[["text", "actual", "predicted"], [text, "a", "b"]])
    page = write_report(run).read_bytes().decode("utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", page)
    assert page.count(r"\x1b") == 3


def test_examples_are_shown_side_by_side(train_run: TrainRun) -> None:
    run = train_run("steps=1").run
    run.event("result", table=[["source", "reference", "output"], ["one <1>", "eins", "zwei"]])
    page = write_report(run).read_text()
    assert ">Held-out examples</h2>" in page and ">reference</th>" in page
    assert re.search(r"one &lt;1&gt;</th><td[^>]*>eins</td><td[^>]*>zwei</td>", page)
    run.event("result", table=[["text", "actual", "predicted", "probability"], ["dull", "bad", "good", "99.0%"]])
    assert ">Most confident mistakes</h2>" in write_report(run).read_text()


def test_the_page_exists_during_training_and_after_an_interruption(
    tmp_path: Path, train_run: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, pages = tmp_path / "run/report.html", list[str]()

    def look(number: int, step: OptimisationStep, parts: Sequence[Batch]) -> None:
        if number == 5:  # the evaluation after step 4 has passed
            pages.append(page.read_text())
        if number == 7:
            os.kill(os.getpid(), signal.SIGINT)

    change_steps(monkeypatch, look)
    with pytest.raises(KeyboardInterrupt):
        train_run("log.every=1", evaluate={"loss": 1.5})
    assert "not finished: at step 4 of 12" in pages[0]
    assert "<b>1.500</b>loss, held out, at step 4" in pages[0]
    assert "not finished: interrupted after step 7 of 12" in page.read_text()


def test_a_page_that_cannot_be_written_does_not_end_the_run(
    train_run: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(run: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(evaluation, "write_report", broken)
    result = train_run(evaluate=True)
    assert result.steps == 12
    failed = [line["reason"] for line in read_lines(result.run.events) if line["event"] == "report failed"]
    assert failed[0] == "ValueError: a bug"


def test_values_of_an_untrusted_run_are_escaped(train_run: TrainRun) -> None:
    run, evil = train_run().run, "<img src=x onerror=alert(1)>\"'&"
    run.event("start", time=evil, device=evil, command=evil, corpus=[evil], weft=evil, choices=[[evil, evil]])
    run.event("rollback", step=3, to=1, since=evil, rate=0.5, tries=1, abandoned=[])
    run.event("discarded", steps=[evil])
    run.event("samples", step=evil, texts=[evil, evil])
    run.event("result", samples=[evil], labels=[evil], matrix=[[1]])
    html = write_report(run).read_text()
    assert "<img" not in html
    assert html.count("&lt;img src=x onerror=alert(1)&gt;&#34;&#39;&amp;") >= 9  # the time is truncated
