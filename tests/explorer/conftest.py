"""The Explorer in Chromium, over small runs of every kind. A page that logs an error, or asks another host, fails."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.explain.browser import CHROMIUM
from tests.serve.serving import RUNS, Served, served

WORDS = "A tale is told, and then another one.\n"
VIEWPORT = {"width": 1280, "height": 900}


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items:
        if {"page", "browser"} & set(item.fixturenames) and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the small runs: bahdanau, classify, gpt, lstm, masked-next, ngram, pairs and others."""
    folder = tmp_path_factory.mktemp("explorer") / "runs"
    shutil.copytree(RUNS, folder)
    return folder


@pytest.fixture(scope="session")
def server(runs: Path) -> Iterator[Served]:
    with served(runs) as it:
        yield it


@pytest.fixture
def page(browser: Any, server: Served) -> Iterator[Any]:
    """An empty page; `goto` with an address of `at`."""
    context = browser.new_context(viewport=VIEWPORT, accept_downloads=True, reduced_motion="reduce")
    opened = context.new_page()
    problems: list[str] = []
    opened.on("console", lambda message: problems.append(message.text) if _wrong(message) else None)
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("request", lambda request: None if _own(request.url) else problems.append(f"asked {request.url}"))
    opened.set_default_timeout(20_000)
    yield opened
    context.close()
    assert not problems, problems


@pytest.fixture
def at(server: Served) -> Callable[..., str]:
    """The address of a view: at("attention", model="gpt", text="A tale")."""
    return lambda path, **state: f"{server.url}/#/{path}?{urlencode(state)}"


def problems_of(page: Any) -> list[str]:
    """What the page says went wrong."""
    return list(page.locator(".problem").all_inner_texts())


def _wrong(message: Any) -> bool:
    # Chromium logs it when the server refuses a text, or a model whose base is not here; neither is a fault
    refused = "status of 400" in message.text or "status of 409" in message.text
    return message.type == "error" and not refused


def _own(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "blob:http://127.0.0.1:", "data:"))
