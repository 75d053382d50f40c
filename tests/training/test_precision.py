"""Number formats: what eight bits can hold, what a device must have, and what runs along the skip connections."""

import pytest
import torch
from torch import nn

from weft.errors import ConfigError
from weft.models.base import LanguageModel
from weft.models.build import build as build_model
from weft.models.presets import bert, gpt, llama
from weft.training import precision
from weft.training.precision import (
    EIGHT,
    EightBitLinear,
    arithmetic,
    autocast,
    check_precision,
    quantise,
    reading,
    slow_precision,
    use_eight_bits,
)

CPU = torch.device("cpu")
quiet = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def test_eight_bits_keep_their_digits_over_their_range() -> None:
    """e4m3: 3 bits after the point over a range of 2¹³ below the largest number."""
    exponents = torch.linspace(0, 13, 500)
    x = torch.cat([-(2.0 ** (7.3 - exponents)), 2.0 ** (7.3 - exponents)])[None]
    x8, scale = quantise(x)
    assert x8.dtype == EIGHT
    relative = ((x8.float() * scale - x) / x).abs()
    assert relative.max() <= 2.0**-4 * 1.001
    assert relative.max() > 2.0**-6  # and no more than that


def test_a_large_number_costs_its_own_row_alone() -> None:
    x = torch.randn(3, 64)
    x[1, 5] = 1e6
    x8, scale = quantise(x)
    error = (x8.float() * scale - x).norm(dim=1) / x.norm(dim=1)
    assert error[[0, 2]].max() < 0.04
    assert scale.flatten()[1] > 1e4 * scale.flatten()[[0, 2]].max()


def test_eight_bits_of_zeros_and_of_nan() -> None:
    x8, scale = quantise(torch.zeros(1, 4))
    assert torch.equal(x8.float() * scale, torch.zeros(1, 4))
    x8, scale = quantise(torch.tensor([[1.0, float("nan")]]))
    assert (x8.float() * scale).isnan().any()  # it must not be hidden from the guard


def eight_bit_copy(linear: nn.Linear) -> EightBitLinear:
    copy = EightBitLinear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    copy.load_state_dict(linear.state_dict())
    return copy


def test_an_eight_bit_layer_is_close_and_its_gradients_too() -> None:
    """Products of 256 random numbers: errors of 3 (or 2) bits each average out to a few per cent of the result."""
    torch.manual_seed(0)
    exact = nn.Linear(256, 64)
    rough = eight_bit_copy(exact)
    x, g = torch.randn(4, 16, 256), torch.randn(4, 16, 64)
    results = []
    for layer, context in ((exact, autocast("fp32", CPU)), (rough, autocast("fp8", CPU))):
        inputs = x.clone().requires_grad_()
        with context:
            y = layer(inputs)
        y.backward(g.to(y.dtype))
        results.append((y.float(), inputs.grad, layer.weight.grad, layer.bias.grad))
    assert rough.weight.grad.dtype == torch.float32
    for (ours, expected), most in zip(zip(*reversed(results), strict=True), (0.04, 0.04, 0.01, 0.01), strict=True):
        assert 0 < (ours - expected).norm() / expected.norm() < most


@quiet
def test_what_does_not_fit_sixteens_is_not_quantised() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(32, 16)
    layer, x = eight_bit_copy(plain), torch.randn(3, 5, 32)
    assert torch.equal(layer(x), plain(x))  # outside of autocast
    with autocast("fp8", CPU):
        assert torch.equal(layer(x), plain(x))  # 15 rows


def tiny() -> LanguageModel:
    torch.manual_seed(0)
    return build_model(gpt(2, 32, 2, context=16, vocab_size=64))


def test_only_the_layers_inside_blocks_get_eight_bits() -> None:
    model = tiny()
    before = dict(model.named_parameters())
    use_eight_bits(model)
    assert sum(isinstance(module, EightBitLinear) for module in model.modules()) == 2 * 4
    assert all(p is before[name] for name, p in model.named_parameters())
    tokens = torch.randint(64, (2, 16))
    assert torch.equal(model(tokens), tiny()(tokens))  # without autocast nothing has changed
    with autocast("fp8", CPU):
        features = model.features(tokens)
    exact = tiny().features(tokens)
    assert 0 < (features.float() - exact).norm() / exact.norm() < 0.1


@pytest.mark.gpu
def test_a_gpus_eight_bit_products_are_the_emulated_ones() -> None:
    a8, b8, bias = quantise(torch.randn(32, 64)), quantise(torch.randn(48, 64)), torch.randn(48).bfloat16()
    expected = precision.eight_bit_product(a8, b8, torch.float32, bias.float())
    on_gpu = [tuple(t.cuda() for t in pair) for pair in (a8, b8)]
    ours = precision.eight_bit_product(*on_gpu, torch.bfloat16, bias.cuda())
    assert torch.allclose(ours.cpu().float(), expected, rtol=0.01, atol=0.02)


@pytest.mark.gpu
def test_a_gpus_eight_bit_layer_learns_what_the_emulated_one_does() -> None:
    torch.manual_seed(0)
    here = eight_bit_copy(nn.Linear(256, 64))
    there = eight_bit_copy(here).cuda()
    x, g = torch.randn(4, 16, 256), torch.randn(4, 16, 64)
    results = []
    for layer, device in ((here, CPU), (there, torch.device("cuda"))):
        inputs = x.to(device, copy=True).requires_grad_()
        with autocast("fp8", device):
            y = layer(inputs)
        y.backward(g.to(device, y.dtype))
        results.append([t.cpu().float() for t in (y, inputs.grad, layer.weight.grad, layer.bias.grad)])
    for ours, expected in zip(*results, strict=True):
        assert (ours - expected).norm() / expected.norm() < 0.01


# ---- what a device can do


def test_eight_bits_need_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"^precision = 'fp8': needs a GPU with eight-bit products"):
        check_precision("fp8", CPU)


def test_an_old_gpu_has_no_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ConfigError, match=r"^precision = 'fp8': A100 has no eight-bit products .*use bf16$"):
        check_precision("fp8", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_precision("fp8", torch.device("cuda"))


def test_a_processor_with_slow_narrow_products_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"fp32": 60e9, "bf16": 0.12e9, "fp16": 45e9}
    monkeypatch.setattr(
        precision, "matmul_rates", lambda *sizes, dtypes: {format_: rates[format_] for format_ in dtypes}
    )
    assert slow_precision("fp32", CPU) is None
    assert slow_precision("fp16", CPU) is None
    assert slow_precision("bf16", CPU) == "precision = bf16: this processor multiplies it 500 times as slowly as fp32"
    assert slow_precision("bf16", torch.device("cuda")) is None
    assert "in fp32" in str(slow_precision("tf32", CPU))
    assert slow_precision("tf32", torch.device("cuda")) is None


def test_switches_are_put_back() -> None:
    torch.set_float32_matmul_precision("highest")
    with arithmetic("tf32", deterministic=True):
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("format", "plain", "used"), [("fp32", True, False), ("fp32", False, True), ("bf16", True, True)]
)
def test_a_plain_arm_forms_fp32_without_onednn(
    format: str, plain: bool, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "_plain_arm", lambda: plain)
    before = torch.backends.mkldnn.enabled
    with arithmetic(format, deterministic=False):  # type: ignore[arg-type]
        assert torch.backends.mkldnn.enabled is (used and before)
    assert torch.backends.mkldnn.enabled is before


def test_a_trained_model_reads_in_fp32_where_its_format_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"fp32": 60e9, "bf16": 0.12e9}
    monkeypatch.setattr(precision, "matmul_rates", lambda *sizes, dtypes: rates)
    with reading("bf16", CPU):
        assert not torch.is_autocast_enabled("cpu")
    rates["bf16"] = 200e9
    with reading("bf16", CPU):
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(("format", "short"), [("fp32", False), ("tf32", True)])
def test_recurrent_products_are_as_short_as_the_others(format: str, short: bool) -> None:
    before = torch.backends.cudnn.allow_tf32
    with arithmetic(format, deterministic=False):  # type: ignore[arg-type]
        assert torch.backends.cudnn.allow_tf32 is short
    assert torch.backends.cudnn.allow_tf32 is before


# ---- along the skip connections


@quiet
@pytest.mark.parametrize("build", [gpt, llama, bert])
@pytest.mark.parametrize(("format", "stream"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", None)])
def test_what_runs_between_blocks_is_as_narrow_as_bf16_allows(build, format, stream) -> None:  # type: ignore[no-untyped-def]
    """bf16 has the range of fp32; fp16 has not, and stays wide."""
    sizes = {"layers": 2, "d_model": 32, "heads": 2, "context": 16, "vocab_size": 64}
    model = build_model(build(**sizes, **({"d_ff": 48} if build is llama else {})))
    stack = model.encoder if model.decoder is None else model.decoder
    seen = []
    for block in stack.blocks:
        block.register_forward_pre_hook(lambda module, given: seen.append(given[0].dtype))
    with autocast(format, CPU):
        model.features(torch.randint(64, (1, 16)))
    assert seen == [stream or torch.float32] * 2
