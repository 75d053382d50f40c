"""Attention over HTTP: packed maps of all heads, and texts with some heads switched off."""

import base64
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.serve.serving import Served

import weft
from weft.explain.attention.maps import attention_maps
from weft.explain.capture import capture, without_head
from weft.models.base import evaluating

TEXT = "A tale is told"


def without(server: Served, model: str, heads: Any, **options: Any) -> dict[str, Any]:
    body = {"model": model, "input": TEXT, "heads": heads, **options}
    return dict(server.json("/v1/explain/without_heads", **body)["without_heads"])


def test_packed_maps_are_the_models(server: Served, runs: Path) -> None:
    maps = server.json("/v1/explain/maps", model="bytes", input=TEXT)["maps"]
    (part,) = maps["parts"]
    read = weft.load(runs / "bytes").explain.reading(TEXT)
    expected = attention_maps(read).part().probabilities
    stored = np.frombuffer(zlib.decompress(base64.b64decode(part["weights"])), np.uint8)
    lower = np.tril_indices(len(read.ids))
    np.testing.assert_allclose((stored.reshape(2, 2, -1) / part["levels"]) ** 2, expected[:, :, *lower], atol=0.003)
    assert part["queries"] == read.pieces
    for head in maps["named"]:
        assert head["names"] and head["kind"] == "decoder" and head["cost"] is None


def test_switching_heads_off_equals_zeroing_their_probabilities(server: Served, runs: Path) -> None:
    whole, found = without(server, "bytes", []), without(server, "bytes", [["decoder", 0, 1], ["decoder", 1, 0]])
    read = weft.load(runs / "bytes").explain.reading(TEXT)
    names = {"decoder.0.attention.probabilities": without_head(1), "decoder.1.attention.probabilities": without_head(0)}
    with evaluating(read.model), torch.no_grad(), capture(read.model, replace=names):
        logits = read.model(read.tokens)[0].log_softmax(-1)
    nats = [-float(logits[index - 1, read.ids[index]]) for index in range(read.before, len(read.ids))]
    assert found["surprise"]["nats"] == pytest.approx(nats, abs=1e-4)
    assert found["surprise"]["nats"] != pytest.approx(whole["surprise"]["nats"], abs=1e-4)
    loaded = weft.load(runs / "bytes")
    assert whole["writes"] == loaded.generate(TEXT, temperature=0.0, max_tokens=30)
    assert without(server, "bytes", []) == whole  # the model itself is unchanged


@pytest.mark.parametrize(
    ("model", "kind"),
    [("pairs", "encoder"), ("pairs", "decoder"), ("pairs", "cross"), ("bahdanau", "cross"), ("masked-next", "encoder")],
)
def test_every_kind_of_attention_can_be_switched_off(server: Served, model: str, kind: str) -> None:
    options = {} if model == "masked-next" else {"target": "one tale"}
    whole, found = without(server, model, [], **options), without(server, model, [[kind, 0, 0]], **options)
    assert len(found["surprise"]["nats"]) == len(whole["surprise"]["nats"])
    assert found["surprise"]["nats"] != whole["surprise"]["nats"]
    assert (found["writes"] is None) == (model == "masked-next")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"heads": [["decoder", 2, 0]]}, "layer 2 of decoder attention: this model has 0 to 1"),
        ({"heads": [["decoder", 0, -1]]}, "head -1 of decoder attention: this model has 0 to 1"),
        ({"heads": [["cross", 0, 0]]}, "'cross': this model has decoder attention"),
        ({"heads": [["sideways", 0, 0]]}, "heads"),
        ({"input": "a" * 5000}, "input: longer than 4000 characters"),
        ({"model": "ngram"}, "no attention"),
        ({"model": "classify"}, "predicts no tokens"),
    ],
)
def test_unknown_heads_are_refused(server: Served, body: dict[str, Any], message: str) -> None:
    assert message in server.refused("/v1/explain/without_heads", {"model": "bytes", "input": TEXT, **body})


def test_an_empty_target_has_no_surprisal(server: Served) -> None:
    found = without(server, "pairs", [["cross", 0, 0]], target="")
    assert found["surprise"] is None and isinstance(found["writes"], str)
