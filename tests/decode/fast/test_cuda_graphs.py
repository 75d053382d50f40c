"""Steps of fixed shape return what plain steps return, row by row."""

import copy
from typing import Any

import pytest
import torch
from tests.decode.fast.helpers import build_transformer, sharpen
from tests.decode.small import VOCAB, decoder
from tests.pairwise import each_once

from weft.decode.config import Sampling
from weft.decode.fast.cuda import CUDAFastPath
from weft.decode.fast.cuda_graphs import GraphStep, has_fixed_shape
from weft.decode.fast.path import is_llama_like, without_experts
from weft.decode.fast.stepper import Stepper
from weft.decode.generate import generate
from weft.decode.prompt import Prompt, Prompts
from weft.errors import ModelError
from weft.models.build import build
from weft.models.config import LayerKind, Recurrent
from weft.models.presets import llama
from weft.models.transformer import Transformer
from weft.nn.config import Attention, Experts, Gated, LayerNorm, RMSNorm
from weft.nn.experts import Experts as MixtureLayer
from weft.nn.position_config import ALiBi, DynamicNTK, Learned, Rotary, Tempered

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [3]]
MODELS = {
    "rotary": decoder(),
    "learned": decoder(position=Learned(), norm=LayerNorm(), context=24),
    "grouped-query, window": decoder(attention=Attention(heads=4, kv_heads=2, window=5)),
    "alibi": decoder(position=ALiBi()),
    "chunks": decoder(pattern=(LayerKind(chunk=5), LayerKind(position=Tempered(interval=3)))),
}
SETTINGS = {
    "greedy": [Sampling(temperature=0.0, max_tokens=20)] * 3,
    "mixed": [
        Sampling(max_tokens=20, top_k=10),
        Sampling(temperature=0.0, max_tokens=9),
        Sampling(temperature=0.7, top_p=0.9, min_p=0.01, typical_p=0.95, max_tokens=18, seed=3),
    ],
    "sampled": [Sampling(max_tokens=12, temperature=1.3, top_k=12)] * 3,
}


Tokens = list[tuple[int, int, str | None]]  # row, id and why the text ends


def tokens_of(model: Transformer, settings: list[Sampling], prompts: Prompts = PROMPTS) -> Tokens:
    return [(chunk.row, chunk.id, chunk.finish) for chunk in generate(model, prompts, settings)]


@torch.inference_mode()
def run_ahead(model: Transformer, settings: list[Sampling], prompts: Prompts = PROMPTS) -> Tokens:
    """Generate as on a GPU, without capturing graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "runs_ahead", True)
        return tokens_of(model, settings, prompts)


@pytest.mark.parametrize(("name", "sampling"), each_once(MODELS, SETTINGS))
def test_choosing_on_the_device_gives_the_same_tokens(name: str, sampling: str) -> None:
    assert run_ahead(MODELS[name], SETTINGS[sampling]) == tokens_of(MODELS[name], SETTINGS[sampling])


def test_tokens_after_a_stop_are_dropped() -> None:
    model, settings = MODELS["rotary"], SETTINGS["greedy"]
    unstopped = run_ahead(model, settings)
    first = [id for row, id, _ in unstopped if row == 0]
    stop_ids = [frozenset(), frozenset({unstopped[7][1]}), frozenset()]
    prompts = [Prompt(ids, eos_id=first[4], stop_ids=stop) for ids, stop in zip(PROMPTS, stop_ids, strict=True)]
    stopped = run_ahead(model, settings, prompts)
    assert stopped == tokens_of(model, settings, prompts)
    assert {finish for _, _, finish in stopped} >= {"eos", "stop"}
    assert len(stopped) < len(unstopped)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_fixed_shape_equals_a_plain_one_over_buckets(name: str) -> None:
    model = MODELS[name]
    prompt = torch.randint(VOCAB, (3, 5))
    lengths = torch.tensor([5, 2, 3])
    with torch.inference_mode():
        plain, fixed = model.start(3, 22), model.start(3, 22)
        model.advance(prompt, plain, lengths)
        model.advance(prompt, fixed, lengths)
        step = GraphStep(model, fixed, min_bucket=4)  # 4, 8, 16, and the capacity of 22
        for _ in range(17):
            tokens = torch.randint(VOCAB, (3,))
            torch.testing.assert_close(step(tokens), model.step(tokens.unsqueeze(1), plain)[:, -1])
        assert fixed.lengths.tolist() == plain.lengths.tolist()
        for state in (fixed, plain):
            state.reorder(torch.tensor([2, 0]))
            state.truncate(9)
        tokens = torch.randint(VOCAB, (2,))
        expected = model.step(tokens.unsqueeze(1), plain)[:, -1]
        torch.testing.assert_close(GraphStep(model, fixed, min_bucket=4)(tokens), expected)


def test_a_full_row_stays_within_its_capacity() -> None:
    model = MODELS["rotary"]
    with torch.inference_mode():
        state = model.start(2, 6)
        model.advance(torch.randint(VOCAB, (2, 5)), state, torch.tensor([5, 1]))
        step = GraphStep(model, state)
        for _ in range(4):
            logits = step(torch.tensor([1, 2]))
    assert torch.isfinite(logits[1]).all()
    assert state.lengths.tolist() == [6, 5]


def test_nan_weights_are_an_error() -> None:
    model = decoder()
    with torch.no_grad():
        model.get_parameter("decoder.norm.weight").fill_(torch.nan)
    with pytest.raises(ModelError, match="NaN"):
        run_ahead(model, SETTINGS["greedy"])


def test_which_models_have_fixed_shapes() -> None:
    model = MODELS["rotary"]
    assert has_fixed_shape(model, model.start(1, 64))
    dynamic = decoder(position=Rotary(scaling=DynamicNTK(factor=2.0)))
    assert has_fixed_shape(dynamic, dynamic.start(1, 16))
    assert not has_fixed_shape(dynamic, dynamic.start(1, 17))
    recurrent = build(Recurrent(vocab_size=VOCAB, d_model=8)).eval()
    assert not has_fixed_shape(recurrent, recurrent.start(1, 8))


def test_which_models_are_llama_like() -> None:
    config = llama(2, 64, 2, d_ff=96)
    assert is_llama_like(config)
    assert is_llama_like(config.replace(position=Rotary(base=5e5)))
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
        assert not is_llama_like(config.replace(**change)), change


def test_which_mixtures_have_fixed_shapes() -> None:
    config = llama(2, 64, 2, d_ff=96).replace(feedforward=Experts(experts=4, d_ff=64))
    assert is_llama_like(without_experts(config))
    assert not is_llama_like(config)
    gelu = Experts(experts=4, d_ff=64, first_dense=1, dense=Gated(d_ff=96, activation="gelu"))
    assert not is_llama_like(without_experts(config.replace(feedforward=gelu)))
    model = build_transformer(config)
    assert not has_fixed_shape(model, model.start(1, 8))  # the host reads the number of tokens of each expert


MIXTURES: dict[str, dict[str, Any]] = {
    "softmax": {"chosen": 2, "renormalised": False},
    "softmax-chosen": {"score": "softmax-chosen", "chosen": 3, "scale": 1.7},
    "sigmoid": {"score": "sigmoid", "chosen": 3, "choice_bias": 0.1, "shared": "added", "shared_d_ff": 96},
    "many": {"experts": 72, "chosen": 8},
    "groups": {"chosen": 2, "groups": 4, "kept_groups": 2},  # for which there is no kernel
    "dense": {"first_dense": 1, "dense": Gated(d_ff=352)},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", MIXTURES)
def test_the_kernels_equal_the_definition_of_a_mixture_on_a_gpu(name: str) -> None:
    from weft.decode.fast import kernels_experts

    torch.manual_seed(0)
    settings = Experts(**{"experts": 8, "d_ff": 352, **MIXTURES[name]})
    if not kernels_experts.fits(settings):
        pytest.skip("no kernel")
    layer = MixtureLayer(settings.replace(shared="none", shared_d_ff=None), 256, None)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    layer = layer.cuda().bfloat16()
    if layer.router.choice_bias is not None:
        layer.router.choice_bias.normal_()
    norm, x = torch.nn.RMSNorm(256, 1e-5).cuda().bfloat16(), torch.randn(1, 256).cuda().bfloat16()
    with torch.inference_mode():
        exact, found = copy.deepcopy(layer).float(), kernels_experts.mixture(layer, x, norm, residual=x)
        expected = x.float() + exact(norm.float()(x.float())[None])[0]
    torch.testing.assert_close(found.float(), expected, atol=0.03, rtol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_captured_mixture_equals_the_plain_step_on_a_gpu(name: str, batch: int) -> None:
    settings = Experts(**{"experts": 8, "d_ff": 352, **MIXTURES[name]})
    config = llama(2, 256, 4, d_ff=352, vocab_size=300).replace(feedforward=settings)
    model = sharpen(build_transformer(config), 2.0).cuda().bfloat16()
    prompt = torch.randint(300, (batch, 20), device="cuda")
    with torch.inference_mode():
        plain, fast = model.start(batch, 60), Stepper(model, batch, prompt_tokens=20, limit=60)
        model.advance(prompt, plain)
        fast.read(prompt)
        assert GraphStep.fits(model, fast.state)
        assert CUDAFastPath.fits(model, fast.state)
        errors = []
        for _ in range(30):
            tokens = torch.randint(300, (batch,), device="cuda")
            logits = model.step(tokens.unsqueeze(1), plain)[:, -1].float()
            errors.append(float((fast.step(tokens).float() - logits).abs().max() / logits.abs().max()))
    assert sorted(errors)[15] < 0.05, errors  # rounding may tip the choice of an expert, but seldom does


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_kernels_equal_the_plain_step_on_a_gpu(kv_heads: int, batch: int) -> None:
    model = build_transformer(llama(2, 256, 4, d_ff=352, vocab_size=300, kv_heads=kv_heads)).cuda().bfloat16()
    lengths = torch.tensor([150, 9, 70], device="cuda") if batch > 1 else None
    prompt = torch.randint(300, (batch, 150), device="cuda")
    with torch.inference_mode():
        plain, fast = model.start(batch, 200), Stepper(model, batch, prompt_tokens=150, limit=200)
        expected = model.advance(prompt, plain, lengths)[:, :9]
        torch.testing.assert_close(fast.read(prompt, lengths)[:, :9], expected, atol=0.05, rtol=0.05)
        assert CUDAFastPath.fits(model, fast.state)
        for _ in range(30):
            tokens = torch.randint(300, (batch,), device="cuda")
            logits = model.step(tokens.unsqueeze(1), plain)[:, -1].float()
            assert float((fast.step(tokens).float() - logits).abs().max()) < 0.03 * float(logits.abs().max())
