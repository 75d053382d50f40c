"""The view of runs: curves that are read, zoomed, overlaid and grow, and runs that come and go."""

import fcntl
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.explorer.reading import saved_svg
from tests.serve.serving import RUNS, Served, served

from weft.config import read_toml
from weft.runs.folder import RunFolder
from weft.runs.lines import checked_line, checked_lines

HOSTILE = "<img src=x onerror=alert(1)>"


def line(step: int, scale: float = 1.0) -> dict[str, Any]:
    return {"step": step, "loss": scale * (1 + 4 / step), "lr": 0.01 / step, "tokens": 64 * step, "epoch": 0.1}


def made(folder: Path, scale: float = 1.0, steps: int = 60) -> RunFolder:
    """A run that has logged so many steps, one of them held out, gone back once and written twice."""
    run = RunFolder(Path(shutil.copytree(RUNS / "gpt", folder)))
    lines = [line(step, scale) for step in range(1, steps + 1)]
    lines.insert(30, {"step": 30, "validation_loss": scale * 1.2, "validation_bits_per_byte": scale * 0.5})
    run.metrics.write_text(checked_lines(lines))
    timed = [{"step": n, "seconds": 0.5, "steps": 1, "tokens_per_second": 128.0} for n in range(1, steps + 1)]
    run.timings.write_text(checked_lines(timed))
    run.events.unlink()
    run.event("start", device="a test")
    run.event("evaluation", step=30, loss=1.2)
    run.event("samples", step=30, texts=["once upon"])
    run.event("rollback", step=45, since=42, to=40, rate=0.5, tries=1)
    run.event("samples", step=60, texts=["a time"])
    run.event("finish", step=max(run.steps()), seconds=1.0)
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("view") / "runs"
    made(folder / "first")
    other = made(folder / "second", 0.9)
    text = other.config.read_text()
    assert read_toml(other.config)["seed"] == 0
    other.config.write_text(text.replace("seed = 0", "seed = 5", 1))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with served(folder) as it:
        yield it


def told(page: Any) -> str:
    """What the first chart says of the place that is read."""
    return f"{page.locator('.plot-at').first.inner_text()} {page.locator('.plot-legend').first.inner_text()}"


def test_a_curve_is_read_zoomed_and_comes_back_with_its_address(page: Any, at: Callable[..., str]) -> None:
    page.goto(at("runs", runs="first"))
    chart = page.locator(".chart").first
    chart.focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    assert "step 4" in told(page) and f"{1 + 4 / 4:.4g}" in told(page)
    assert page.locator(".plot-at").nth(2).inner_text() == "step 4"  # one place in all charts
    assert "training 2" in page.locator(".plot [aria-live]").first.text_content()
    assert page.locator(".chart").first.locator(".mark:not(.small) title").text_content().startswith("rolled back")
    box = chart.bounding_box()
    page.mouse.move(box["x"] + 150, box["y"] + 90)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 90, steps=4)
    page.mouse.up()
    assert "zoom=" in page.url
    page.get_by_label("Horizontal axis").select_option("time")
    assert "zoom=" not in page.url and page.get_by_text("training time").count() > 2
    page.locator(".chart").first.focus()
    page.keyboard.press("+")
    page.get_by_label("Smoothing").fill("0.5")
    page.get_by_label("log y").check()
    assert {"x=time", "smooth=0.5", "logy=1"} <= set(page.url.split("?")[1].split("&")) and "zoom=" in page.url
    page.locator(".chart .faint").first.wait_for(state="attached")
    drawn = "[...document.querySelectorAll('.chart polyline')].map(each => each.getAttribute('points')).join()"
    before = page.evaluate(drawn)
    page.reload()
    page.locator(".chart .faint").first.wait_for(state="attached")
    assert page.evaluate(drawn) == before
    page.get_by_role("button", name="Reset zoom").click()
    assert "zoom=" not in page.url
    page.locator(".chart").first.focus()
    for _ in range(80):  # until nothing can be told apart any more
        page.keyboard.press("+")
    page.keyboard.press("0")
    assert "zoom=" not in page.url


def test_the_menu_of_models_chooses_the_run(page: Any, at: Callable[..., str]) -> None:
    chosen = page.locator(".runs-scroll input:checked")
    for name in ("first", "second"):
        page.goto(at("runs", model=name))
        chosen.wait_for()
        assert chosen.evaluate_all("boxes => boxes.map(box => box.value)") == [name]
    page.get_by_label("Model").select_option("first")
    page.wait_for_function("() => document.querySelector('.runs-scroll input:checked')?.value === 'first'")
    assert chosen.count() == 1


def test_several_are_overlaid_and_compared(page: Any, at: Callable[..., str]) -> None:
    page.goto(at("runs", runs="first"))
    page.get_by_role("checkbox", name="second").check()
    button = page.locator(".plot-legend").first.get_by_role("button", name="second", exact=True)
    button.wait_for()
    lines = page.locator(".chart").first.locator("polyline.line")
    assert lines.count() == 2 and "runs=first%2Csecond" in page.url  # held out, each has one point
    button.click()
    assert lines.count() == 1 and button.get_attribute("aria-pressed") == "false" and "hide=second" in page.url
    table = page.get_by_role("table").filter(has_text="setting")
    assert table.locator("tbody tr").all_inner_texts() == ["seed\t0\t5"]
    assert page.locator(".tools code").inner_text() == "weft runs diff runs/first runs/second"
    page.get_by_label("Step").fill("0")
    assert page.locator(".runs-text pre").all_inner_texts() == ["once upon", "once upon"] and "at=30" in page.url
    text = saved_svg(page)
    assert text.count("<polyline") > 10 and "first, held out" in text and "var(--" not in text
    page.get_by_label("Find").fill("seco")
    page.get_by_text("1 of 2 runs").wait_for()
    assert page.locator(".runs-table tbody tr").count() == 1


def test_a_run_that_trains_moves_and_one_that_goes_is_told(page: Any, at: Callable[..., str], folder: Path) -> None:
    run = made(folder / HOSTILE, steps=5)
    with open(run.path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        page.goto(at("runs"))
        row = page.locator(".runs-table tr.marked")  # what trains now is shown unasked
        assert HOSTILE in row.inner_text() and "running" in row.inner_text()
        with open(run.metrics, "a") as file:
            file.write(checked_line(line(50), 7))
        page.get_by_text("50 / ").wait_for()
        page.locator(".chart").first.focus()
        page.keyboard.press("ArrowLeft")
        assert "step 50" in told(page)
        lock.close()
        shutil.rmtree(run.path)
        page.get_by_text("no such run on this server, or no longer").first.wait_for()
        assert page.locator(".chart polyline.line").count() > 0  # what was known of it stays
    assert page.locator("img").count() == 0


def test_a_folder_without_runs_says_how_to_train_one(page: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with served(tmp_path / "empty", may_be_empty=True) as it:
        page.goto(f"{it.url}/#/runs")
        page.get_by_text("weft train gpt-tiny --data book.txt").wait_for()
        assert page.locator(".chart").count() == 0


def test_it_fits_a_phone(page: Any, at: Callable[..., str]) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(at("runs", runs="first,second"))
    page.locator(".chart").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    small = "[...document.querySelectorAll('.view button, .view input')].filter(each => each.offsetHeight)"
    assert page.evaluate(f"{small}.filter(each => each.closest('label, .field, div').offsetHeight < 24).length") == 0


DRAWN = """async count => {
  const { mount } = await import("/web/chart.js");
  const place = document.body.appendChild(document.createElement("div"));
  const x = Array.from({ length: count }, (_, n) => n + 1), y = x.map(n => n === 123457 ? 99 : 3 + Math.sin(n / 9000));
  const chart = mount(place, { title: "many", x: {}, y: {}, series: [{ name: "a", x, y }] });
  const times = Array.from({ length: 6 }, (_, n) => {
    const began = performance.now();
    chart.zoom([1000 + n, count - 1000]);
    return performance.now() - began;
  });
  const took = Math.min(...times), line = place.querySelector("polyline.line").getAttribute("points").split(" ");
  const heights = line.map(each => Number(each.split(",")[1]));
  return { took, points: line.length, spike: heights.filter(each => each < Math.max(...heights) - 100).length };
}"""


def test_many_points_are_drawn_at_once_and_no_spike_is_lost(page: Any, at: Callable[..., str]) -> None:
    page.goto(at("runs"))
    found = page.evaluate(DRAWN, 300_000)
    assert found["took"] < 150 and found["points"] < 6000 and found["spike"] == 1


SMOOTHED = """async ([values, weight]) => (await import("/web/chart_axes.js")).smooth(values, weight)"""


def test_smoothing_has_no_bias_towards_its_beginning(page: Any, at: Callable[..., str]) -> None:
    page.goto(at("runs"))
    assert page.evaluate(SMOOTHED, [[4.0] * 5, 0.9]) == pytest.approx([4.0] * 5)
    values, weight = [1.0, None, 3.0, 2.0], 0.5
    known = [value for value in values if value is not None]
    last = sum(weight**age * value for age, value in enumerate(reversed(known))) / sum(weight**age for age in range(3))
    found = page.evaluate(SMOOTHED, [values, weight])
    assert found[1] is None and math.isclose(found[3], last)
