"""Number formats: the range of eight bits, the requirements of a device, and the residual stream."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.training.small import CPU
from torch import nn

from weft.errors import ConfigError
from weft.models.base import LanguageModel
from weft.models.build import build as build_model
from weft.models.presets import bert, gpt, llama
from weft.models.transformer import Transformer
from weft.nn.linear import Linear
from weft.recipe.config import Precision
from weft.training import precision
from weft.training.precision import FP8, EightBitLinear, arithmetic, autocast, check_precision, quantise, slow_precision

quiet = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def test_eight_bits_keep_their_digits_over_their_range() -> None:
    """e4m3 has 3 bits of mantissa over a range of 2¹³ below its largest value."""
    exponents = torch.linspace(0, 13, 500)
    x = torch.cat([-(2.0 ** (7.3 - exponents)), 2.0 ** (7.3 - exponents)])[None]
    x8, scale = quantise(x)
    assert x8.dtype == FP8
    relative = ((x8.float() * scale - x) / x).abs()
    assert relative.max() <= 2.0**-4 * 1.001
    assert relative.max() > 2.0**-6  # not better than that either


def test_an_outlier_affects_its_row_alone() -> None:
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
    assert (x8.float() * scale).isnan().any()  # the guard must see it


def eight_bit_copy(linear: nn.Linear) -> EightBitLinear:
    copy = Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    copy.load_state_dict(linear.state_dict())
    return EightBitLinear(copy)


def results(layer: Any, x: torch.Tensor, g: torch.Tensor, format_: Precision, device: torch.device) -> list[Any]:
    """Return a layer's output, and the gradients of its input, weight and bias."""
    inputs = x.to(device, copy=True).requires_grad_()
    with autocast(format_, device):
        y = layer(inputs)
    y.backward(g.to(device, y.dtype))
    trained = inputs, layer.weight, layer.bias
    return [y.float().cpu(), *(tensor.grad.cpu() for tensor in trained if tensor.grad is not None)]


def test_an_eight_bit_layer_is_close_and_its_gradients_too() -> None:
    """In products of 256 random values, errors of 3 (or 2) bits each average out to a few per cent of the result."""
    torch.manual_seed(0)
    exact = nn.Linear(256, 64)
    rough = eight_bit_copy(exact)
    x, g = torch.randn(4, 16, 256), torch.randn(4, 16, 64)
    ours, theirs = results(rough, x, g, "fp8", CPU), results(exact, x, g, "fp32", CPU)
    assert ours[2].dtype == torch.float32
    for value, expected, limit in zip(ours, theirs, (0.04, 0.04, 0.01, 0.01), strict=True):
        assert 0 < (value - expected).norm() / expected.norm() < limit


@quiet
def test_sizes_that_are_no_multiples_of_sixteen_are_not_quantised() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(32, 16)
    layer, x = eight_bit_copy(plain), torch.randn(3, 5, 32)
    assert torch.equal(layer(x), plain(x))  # outside autocast
    with autocast("fp8", CPU):
        assert torch.equal(layer(x), plain(x))  # 15 rows


def tiny() -> LanguageModel:
    torch.manual_seed(0)
    return build_model(gpt(2, 32, 2, context=16, vocab_size=64))


def test_only_the_layers_inside_blocks_get_eight_bits() -> None:
    model = tiny()
    before = list(model.named_parameters())
    torch.manual_seed(0)
    state = torch.get_rng_state()
    precision.use_eight_bits(model)
    assert torch.equal(torch.get_rng_state(), state)  # no random number is drawn
    assert sum(isinstance(module, EightBitLinear) for module in model.modules()) == 2 * 4
    after = list(model.named_parameters())
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(p is q for (_, p), (_, q) in zip(after, before, strict=True))
    tokens = torch.randint(64, (2, 16))
    assert torch.equal(model(tokens), tiny()(tokens))  # without autocast nothing changes
    with autocast("fp8", CPU):
        features = model.features(tokens)
    exact = tiny().features(tokens)
    assert 0 < (features.float() - exact).norm() / exact.norm() < 0.1


@pytest.mark.gpu
def test_a_gpus_eight_bit_products_are_the_emulated_ones() -> None:
    a8, b8, bias = quantise(torch.randn(32, 64)), quantise(torch.randn(48, 64)), torch.randn(48).bfloat16()
    expected = precision.eight_bit_product(a8, b8, torch.float32, bias=bias.float())
    a, b = ((values.cuda(), scale.cuda()) for values, scale in (a8, b8))
    ours = precision.eight_bit_product(a, b, torch.bfloat16, bias=bias.cuda())
    assert torch.allclose(ours.cpu().float(), expected, rtol=0.01, atol=0.02)


@pytest.mark.gpu
def test_a_gpus_eight_bit_layer_learns_what_the_emulated_one_does() -> None:
    torch.manual_seed(0)
    here = eight_bit_copy(nn.Linear(256, 64))
    there = eight_bit_copy(here).cuda()
    x, g = torch.randn(4, 16, 256), torch.randn(4, 16, 64)
    emulated, products = results(here, x, g, "fp8", CPU), results(there, x, g, "fp8", torch.device("cuda"))
    for expected, ours in zip(emulated, products, strict=True):
        assert (ours - expected).norm() / expected.norm() < 0.01


# ---- devices


def test_eight_bits_need_a_recent_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^precision = 'fp8': needs a GPU with eight-bit products"):
        check_precision("fp8", CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ConfigError, match=r"^precision = 'fp8': A100 has no eight-bit products .*use bf16$"):
        check_precision("fp8", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_precision("fp8", torch.device("cuda"))


def test_a_cpu_with_slow_narrow_products_gives_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"fp32": 60e9, "bf16": 0.12e9, "fp16": 45e9}
    monkeypatch.setattr(precision, "matmul_rates", lambda *sizes, dtypes: {name: rates[name] for name in dtypes})
    assert slow_precision("fp32", CPU) is None
    assert slow_precision("fp16", CPU) is None
    assert slow_precision("bf16", CPU) == "precision = bf16: this CPU multiplies it 500 times as slowly as fp32"
    assert slow_precision("bf16", torch.device("cuda")) is None
    assert "in fp32" in str(slow_precision("tf32", CPU))
    assert slow_precision("tf32", torch.device("cuda")) is None


@pytest.mark.parametrize(("format_", "short"), [("fp32", False), ("tf32", True)])
def test_switches_are_restored(format_: Precision, short: bool) -> None:
    """cuDNN's switch is that of recurrent products."""
    torch.set_float32_matmul_precision("highest")
    before = torch.backends.cudnn.allow_tf32
    with arithmetic(format_, deterministic=short):
        assert torch.get_float32_matmul_precision() == ("high" if short else "highest")
        assert torch.are_deterministic_algorithms_enabled() is torch.backends.cudnn.allow_tf32 is short
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cudnn.allow_tf32 is before and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("format_", "plain", "used"), [("fp32", True, False), ("fp32", False, True), ("bf16", True, True)]
)
def test_a_plain_arm_computes_fp32_without_onednn(
    format_: Precision, plain: bool, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "_plain_arm", lambda: plain)
    before = torch.backends.mkldnn.enabled
    with arithmetic(format_, deterministic=False):
        assert torch.backends.mkldnn.enabled is (used and before)
    assert torch.backends.mkldnn.enabled is before


def test_a_trained_model_reads_in_fp32_where_its_format_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"fp32": 60e9, "bf16": 0.12e9}
    monkeypatch.setattr(precision, "matmul_rates", lambda *sizes, dtypes: rates)
    with precision.reading("bf16", CPU):
        assert not torch.is_autocast_enabled("cpu")
    rates["bf16"] = 200e9
    with precision.reading("bf16", CPU):
        assert torch.is_autocast_enabled("cpu")


# ---- the residual stream


@quiet
@pytest.mark.parametrize("build", [gpt, llama, bert])
@pytest.mark.parametrize(("format_", "stream"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", None)])
def test_the_residual_stream_is_bf16_under_bf16_alone(
    build: Callable[..., Any], format_: Precision, stream: torch.dtype | None
) -> None:
    """bf16 has the range of fp32; fp16 does not, so the stream stays in fp32."""
    sizes = {"layers": 2, "d_model": 32, "heads": 2, "context": 16, "vocab_size": 64}
    model = build_model(build(**sizes, **({"d_ff": 48} if build is llama else {})))
    assert isinstance(model, Transformer)
    stack, seen = model.decoder or model.encoder, list[torch.dtype]()
    assert stack is not None
    for block in stack.blocks:
        block.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    with autocast(format_, CPU):
        model.features(torch.randint(64, (1, 16)))
    assert seen == [stream or torch.float32] * 2
