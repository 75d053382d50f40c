"""Patching gives TransformerLens's numbers, on a GPT-2 with random weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.explain.small import IdTokenizer
from tests.interop.hf_models import GPT2, built, saved, theirs

from weft.explain.interventions.sites import nodes, sites
from weft.explain.interventions.swap import PairBatch, Swap, TextPair
from weft.explain.reading import Reading
from weft.interop.hf import hf

CLEAN, CORRUPT, ANSWER, OTHER = (5, 9, 17, 3, 22, 8), (5, 9, 30, 3, 22, 8), 11, 40
CLOSE = 1e-5


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[PairBatch, Any, Any]:
    """A pair of texts read by weft's model, TransformerLens's of the same weights, and its module for patching."""
    lens, patching = pytest.importorskip("transformer_lens"), pytest.importorskip("transformer_lens.patching")
    folder: Path = tmp_path_factory.mktemp("lens") / "gpt2"
    saved(folder, "GPT2LMHeadModel", GPT2)
    model = built(hf.read(folder))
    kind: Any = type(theirs("GPT2LMHeadModel", GPT2))
    other = kind.from_pretrained(folder)
    bridge = lens.TransformerBridge.boot_transformers(str(folder), hf_model=other)
    one, two = (Reading(model, IdTokenizer(), ids) for ids in (CLEAN, CORRUPT))  # type: ignore[arg-type]
    return PairBatch((TextPair(one, two, len(CLEAN) - 1, ANSWER, OTHER).check(),)), bridge, patching


@pytest.mark.slow
def test_logit_differences_after_patching(both: tuple[PairBatch, Any, Any]) -> None:
    batch, bridge, patching = both
    tokens = torch.tensor([CORRUPT])
    _, cache = bridge.run_with_cache(torch.tensor([CLEAN]))
    metric = lambda logits: logits[0, -1, ANSWER] - logits[0, -1, OTHER]  # noqa: E731
    expected = {
        "residual stream": patching.get_act_patch_resid_pre,
        "attention": patching.get_act_patch_attn_out,
        "feed-forward": patching.get_act_patch_mlp_out,
    }
    for site in sites(batch.model):
        values = batch.activations("clean", site.taps)
        layers = site.taps[:2]  # the last residual stream is the output
        variants = [[Swap(tap, position=n)] for tap in layers for n in range(len(CLEAN))]
        ours = torch.stack(list(batch.exchange(variants, values))).view(len(layers), -1)
        theirs = expected[site.kind](bridge, tokens, cache, metric)
        np.testing.assert_allclose(ours, theirs.detach(), atol=CLOSE, rtol=0)
    heads = [node for node in nodes(batch.model) if node.name.startswith("head")]
    values = batch.activations("clean", [tap for node in heads for tap in node.taps])
    ours = torch.stack(list(batch.exchange([[Swap(node.taps[0], node.units)] for node in heads], values)))
    theirs = patching.get_act_patch_attn_head_out_all_pos(bridge, tokens, cache, metric)
    np.testing.assert_allclose(ours.view(2, -1), theirs.detach(), atol=CLOSE, rtol=0)
    assert float(ours.std()) > 100 * CLOSE
