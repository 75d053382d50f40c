"""Which expert reads which token: the view has the router's choice, and other views show the mixture."""

import pytest
import torch
from tests.explain.test_lens import TOKENIZER, read

from weft.costs.count import count
from weft.errors import DataError, ModelError
from weft.explain.anatomy.anatomy import anatomy
from weft.explain.capture import capture
from weft.explain.experts import experts
from weft.explain.graph.graph import PRODUCTS, graph
from weft.explain.step.step import step
from weft.models.build import build
from weft.models.presets import preset

DENSE = {"kind": "gated", "d_ff": 40}
INNER = {"kind": "experts", "experts": 4, "d_ff": 16, "first_dense": 1, "dense": DENSE, "shared": "gated"}
MOE = preset("moe-tiny").replace(layers=3, d_model=32, vocab_size=TOKENIZER.vocab_size, feedforward=INNER)


def test_the_view_has_the_choice_of_each_token() -> None:
    torch.manual_seed(0)
    model, text = build(MOE).eval(), "to be or not"
    found = experts(read(model, text))
    assert found.layers == ("layer 1", "layer 2") and "".join(token.text for token in found.tokens) == text
    ids = torch.tensor([TOKENIZER.encode(text)])
    state: list[torch.Tensor] = []
    block = model.decoder.blocks[2]
    handle = block.feedforward.router.register_forward_hook(lambda module, args, logits: state.append(logits))
    model(ids)
    handle.remove()
    probabilities = state[0][0].softmax(-1)
    top = probabilities.topk(2)
    assert found.chosen[1].tolist() == top.indices.tolist()
    expected = (top.values / top.values.sum(-1, keepdim=True)).flatten()
    assert found.weights[1].flatten().tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert found.load.sum() == pytest.approx(4.0)  # two layers, two experts per token
    assert "of the tokens" in (found.text() or "") and found.figure().axes


def test_no_token_and_no_number_are_refused() -> None:
    model = build(MOE).eval()
    with pytest.raises(DataError, match="the text is empty"):
        experts(read(model, ""))
    torch.nn.init.constant_(model.decoder.blocks[1].feedforward.router.weight, torch.nan)
    with pytest.raises(DataError, match="router's weights are NaN"):
        experts(read(model, "to be"))


def test_the_stage_has_the_router_and_what_each_expert_adds() -> None:
    torch.manual_seed(0)
    model, text = build(MOE).eval(), "to be or not"
    found, view = step(read(model, text), layer=2), experts(read(model, text))
    assert found.threads is not None and found.threads["block"]["feedforward"] is None
    drawn = found.threads["block"]["experts"]
    assert drawn["chosen"] == view.chosen[1][-1].tolist()
    assert drawn["weights"] == pytest.approx(view.weights[1][-1].tolist(), rel=1e-4)
    assert sum(drawn["probabilities"]) == pytest.approx(1.0, rel=1e-3)
    with capture(model, "decoder.2.feedforward") as captured:
        model(torch.tensor([TOKENIZER.encode(text)]))
    parts = torch.tensor([*drawn["outputs"], drawn["shared"]["output"]])
    assert torch.allclose(parts.sum(0), captured["decoder.2.feedforward"][0, -1], atol=1e-4)
    assert 0 < drawn["shared"]["weight"] < 1
    dense = step(read(model, text), layer=0).threads
    assert dense is not None and dense["block"]["experts"] is None and dense["block"]["feedforward"]["hidden"]


def test_the_anatomy_counts_dense_layers_and_mixtures() -> None:
    found = anatomy(MOE)
    assert sum(column.parameters for column in found.columns) == count(MOE).parameters
    names = {part.name for block in found.columns[0].parts for part in block.parts}
    assert {"feed-forward", "mixture of experts"} <= names


def test_a_step_shows_the_routers_choice() -> None:
    torch.manual_seed(0)
    found = step(read(build(MOE).eval(), "to be"), text="to be", layer=2)
    text = found.text() or ""
    assert "Router" in text and "Experts" in text


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ModelError, match="no mixture of experts"):
        experts(read(build(preset("llama-tiny").replace(layers=1, vocab_size=TOKENIZER.vocab_size))))


def test_a_mixture_without_weights_has_a_graph_with_every_expert() -> None:
    with torch.device("meta"):
        model = build(MOE)
    found = graph(model, torch.arange(8)[None])
    products = [node for node in found.nodes if node.function in PRODUCTS and "experts" in found.calls[node.call].path]
    assert len(products) == 2 * 4 * 2  # layers, experts, products
    assert {node.shape[0] for node in products} == {4}  # which tokens an expert reads is not known: each reads as many
