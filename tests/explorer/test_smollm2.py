"""The Explorer on a model that people use: SmolLM2-135M-Instruct, which chats."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.explorer.conftest import problems_of
from tests.explorer.test_every_view import offered, settle
from tests.interop.test_smollm2 import model_file
from tests.serve.serving import Served, served

from weft.api.import_model import import_model

pytestmark = [pytest.mark.weights, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("smollm2") / "smollm2"
    import_model(model_file(), place)
    with served(place, max_tokens=64, rows=4) as it:
        yield it


def test_every_view_opens(page: Any, server: Served) -> None:
    page.set_default_timeout(300_000)
    page.goto(f"{server.url}/#/tokens?model=smollm2")
    views = offered(page)
    assert {"write", "step", "attention", "surprise", "lens", "saliency", "search", "anatomy"} <= set(views)
    for view in views:
        page.goto("about:blank")
        page.goto(f"{server.url}/#/{view}?model=smollm2&text=The+cat+sat+on+the+mat+because+it+was")
        settle(page)
        assert not problems_of(page), (view, problems_of(page))
        assert view == "compare" or page.get_by_role("button", name="Copy link").count() == 1, view
