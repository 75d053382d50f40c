"""Steps of fixed shape give what the plain ones give: the same tokens, row by row."""

import pytest
import torch
from tests.decode.small import VOCAB, decoder
from tests.pairwise import each_once

from weft.decode.config import Sampling
from weft.decode.fast import cuda_graphs as graphs
from weft.decode.fast.cuda_graphs import GraphStep
from weft.decode.fast.stepper import Stepper, cuda_fast_path, llama_like, shape_is_fixed
from weft.decode.generate import generate
from weft.decode.prompt import Prompt
from weft.errors import ModelError
from weft.models.build import build
from weft.models.config import Recurrent
from weft.models.presets import llama
from weft.models.transformer import Transformer
from weft.nn.config import Attention, Gated, LayerNorm, RMSNorm
from weft.nn.position_config import ALiBi, DynamicNTK, Learned, Rotary

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [3]]


MODELS = {
    "rotary": decoder(),
    "learned": decoder(position=Learned(), norm=LayerNorm(), context=24),
    "shared, window": decoder(attention=Attention(heads=4, kv_heads=2, window=5)),
    "alibi": decoder(position=ALiBi()),
}
SETTINGS = {
    "greedy": [Sampling(temperature=0.0, max_tokens=20)] * 3,
    "mixed": [
        Sampling(max_tokens=20, top_k=10),
        Sampling(temperature=0.0, max_tokens=9),
        Sampling(temperature=0.7, top_p=0.9, min_p=0.01, typical_p=0.95, max_tokens=18, seed=3),
    ],
    "sampled alike": [Sampling(max_tokens=12, temperature=1.3, top_k=12)] * 3,
}


@torch.inference_mode()
def ahead(
    model: Transformer, settings: list[Sampling], prompts: list[Prompt] | None = None
) -> list[tuple[int, int, str | None]]:
    """What `generate` does where there is a GPU, without capture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "runs_ahead", True)
        return [(chunk.row, chunk.id, chunk.finish) for chunk in generate(model, prompts or PROMPTS, settings)]


@pytest.mark.parametrize(("name", "how"), each_once(MODELS, SETTINGS))
def test_choosing_on_the_device_writes_the_same(name: str, how: str) -> None:
    model, settings = MODELS[name], SETTINGS[how]
    plain = [(token.row, token.id, token.finish) for token in generate(model, PROMPTS, settings)]
    assert ahead(model, settings) == plain


def test_stops_and_ends_cut_what_ran_ahead() -> None:
    model, settings = MODELS["rotary"], SETTINGS["greedy"]
    free = ahead(model, settings)
    first = [id for row, id, _ in free if row == 0]
    stop_ids = [frozenset(), frozenset({free[7][1]}), frozenset()]
    prompts = [Prompt(ids, eos_id=first[4], stop_ids=stop) for ids, stop in zip(PROMPTS, stop_ids, strict=True)]
    cut = ahead(model, settings, prompts)
    plain = [(token.row, token.id, token.finish) for token in generate(model, prompts, settings)]
    assert cut == plain
    assert {finish for _, _, finish in cut} >= {"eos", "stop"}
    assert len(cut) < len(free)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_fixed_shape_equals_a_plain_one_over_buckets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "FIRST_BUCKET", 4)  # 4, 8, 16, and the capacity of 22
    model = MODELS[name]
    prompt = torch.randint(VOCAB, (3, 5))
    lengths = torch.tensor([5, 2, 3])
    with torch.inference_mode():
        plain, fixed = model.start(3, 22), model.start(3, 22)
        model.advance(prompt, plain, lengths)
        model.advance(prompt, fixed, lengths)
        step = GraphStep(model, fixed, None)
        for _ in range(17):
            tokens = torch.randint(VOCAB, (3,))
            torch.testing.assert_close(step(tokens), model.step(tokens.unsqueeze(1), plain)[:, -1])
        assert fixed.lengths.tolist() == plain.lengths.tolist()
        index = torch.tensor([2, 0])
        fixed.reorder(index)
        plain.reorder(index)
        fixed.truncate(9)
        plain.truncate(9)
        tokens = torch.randint(VOCAB, (2,))
        expected = model.step(tokens.unsqueeze(1), plain)[:, -1]
        torch.testing.assert_close(GraphStep(model, fixed, None)(tokens), expected)


def test_a_full_row_stays_within_its_capacity() -> None:
    model = MODELS["rotary"]
    with torch.inference_mode():
        state = model.start(2, 6)
        model.advance(torch.randint(VOCAB, (2, 5)), state, torch.tensor([5, 1]))
        step = GraphStep(model, state, None)
        for _ in range(4):
            logits = step(torch.tensor([1, 2]))
    assert torch.isfinite(logits[1]).all()
    assert state.lengths.tolist() == [6, 5]


def test_damaged_weights_are_an_error() -> None:
    model = decoder()
    with torch.no_grad():
        model.decoder.norm.weight.fill_(torch.nan)  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="NaN"):
        ahead(model, SETTINGS["greedy"])


def test_which_models_have_steps_of_fixed_shape_and_which_are_llamas() -> None:
    model = MODELS["rotary"]
    assert shape_is_fixed(model, model.start(1, 64), 64)
    stretched = decoder(position=Rotary(scaling=DynamicNTK(factor=2.0)))
    assert shape_is_fixed(stretched, stretched.start(1, 16), 16)
    assert not shape_is_fixed(stretched, stretched.start(1, 16), 17)
    recurrent = build(Recurrent(vocab_size=VOCAB, d_model=8)).eval()
    assert not shape_is_fixed(recurrent, recurrent.start(1, 8), 8)
    config = llama(2, 64, 2, d_ff=96)
    assert llama_like(config)
    assert llama_like(config.replace(position=Rotary(base=5e5)))
    for change in (
        {"placement": "post"},
        {"norm": LayerNorm()},
        {"norm": RMSNorm(offset=1.0)},
        {"attention": Attention(heads=2, window=8)},
        {"attention": Attention(heads=2, bias="qkv")},
        {"feedforward": Gated(d_ff=96, activation="gelu")},
        {"position": Rotary(pairs="adjacent")},
        {"residual": False},
    ):
        assert not llama_like(config.replace(**change)), change


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_kernels_equal_the_plain_step_on_a_gpu(kv_heads: int, batch: int) -> None:
    torch.manual_seed(0)
    model = build(llama(2, 256, 4, d_ff=352, vocab_size=300, kv_heads=kv_heads)).eval().cuda().bfloat16()
    lengths = torch.tensor([150, 9, 70][:batch], device="cuda")
    prompt = torch.randint(300, (batch, 150), device="cuda")
    with torch.inference_mode():
        plain, fixed = model.start(batch, 200), Stepper(model, batch, 150, 200)
        given = lengths if batch > 1 else None
        expected = model.advance(prompt, plain, given)[:, :9]
        torch.testing.assert_close(fixed.read(prompt, given)[:, :9], expected, atol=0.05, rtol=0.05)
        assert cuda_fast_path(model, fixed.state) is not None
        for _ in range(30):
            tokens = torch.randint(300, (batch,), device="cuda")
            logits = model.step(tokens.unsqueeze(1), plain)[:, -1].float()
            assert float((fixed.step(tokens).float() - logits).abs().max()) < 0.03 * float(logits.abs().max())
