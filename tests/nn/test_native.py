"""Attention and GELU of a training step in C are as exact as PyTorch's, and are used only where they fit."""

import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.pairwise import pairwise
from tests.spread import slow
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.native import compiler
from weft.nn import native
from weft.nn.activations import gelu, gelu_tanh
from weft.nn.attention_paths import _fused, fast_attention
from weft.nn.linear import Linear
from weft.nn.mask import AttentionMask, Mask
from weft.nn.position import Position
from weft.nn.scaled_dot_product import QKV, reference_attention

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """With more threads than heads, PyTorch's attention is used."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def heads(time: int, source: int, d_head: int, shared: int = 1, rows: int = 2) -> QKV:
    """Four query heads, and keys and values that `shared` of them share, in the memory layout of a layer."""
    torch.manual_seed(time)
    q, k, v = (torch.randn(rows, n, h, d_head) for n, h in ((time, 4), (source, 4 // shared), (source, 4 // shared)))
    return QKV(*(x.transpose(1, 2).requires_grad_() for x in (q, k, v)))


def mask(causal: bool, qkv: QKV) -> AttentionMask:
    queries, keys = (torch.arange(x.shape[2])[None] for x in qkv[:2])
    return AttentionMask(Mask(causal), Position(), queries, keys=keys)


def output_and_gradients(function: Callable[[QKV], Tensor], qkv: QKV, upstream: Tensor) -> list[Tensor]:
    out = function(qkv)
    return [out.detach(), *torch.autograd.grad(out, qkv, upstream.to(out.dtype))]


def check_attention(sizes: tuple[int, int], d_head: int, shared: int, causal: bool) -> None:
    """Compare the errors of C and of PyTorch against float64."""
    qkv, scale = heads(*sizes, d_head, shared), 1.5 * d_head**-0.5
    upstream = torch.randn(2, sizes[0], 4, d_head).transpose(1, 2)
    assert native.attention_fits(*qkv)
    double = QKV(*(x.detach().double().requires_grad_() for x in qkv))
    seen = torch.ones(sizes, dtype=torch.bool).tril() if causal else None
    exact = output_and_gradients(lambda qkv: reference_attention(qkv, scale, seen)[0], double, upstream)
    ours = output_and_gradients(lambda qkv: fast_attention(qkv, scale, mask(causal, qkv)), qkv, upstream)
    torchs = output_and_gradients(lambda qkv: _fused(qkv, scale, causal=causal), qkv, upstream)
    for found, peer, expected in zip(ours, torchs, exact, strict=True):
        error, peer_error = ((x - expected).norm() / expected.norm() for x in (found, peer))
        assert error <= max(1.2 * peer_error, 2e-7)


TIMES = [(64, 64), (65, 65), (127, 127), (300, 300), (130, 203), (203, 130)]


@needs_compiler
@pytest.mark.parametrize(
    ("sizes", "d_head", "shared", "causal"), pairwise(TIMES, [32, 64, 96], [1, 2, 4], [True, False])
)
def test_attention_equals_the_reference(sizes: tuple[int, int], d_head: int, shared: int, causal: bool) -> None:
    check_attention(sizes, d_head, shared, causal)


@needs_compiler
def test_the_number_of_threads_changes_no_bit() -> None:
    qkv, x = heads(100, 100, 32, 2), torch.randn(50, 300, requires_grad=True)
    upstream, results = torch.randn(2, 4, 100, 32), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert native.attention_fits(*qkv) and native.gelu_fits(x)
        results.append(output_and_gradients(lambda qkv: native.FusedAttention.apply(0.2, True, *qkv), qkv, upstream))
        results[-1] += torch.autograd.grad(gelu(x).square().sum(), x)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@needs_compiler
@pytest.mark.parametrize(("ours", "approximate"), [(gelu, "none"), (gelu_tanh, "tanh")])
@pytest.mark.parametrize("width", [256, 4099, 9001])
def test_gelu_is_as_exact_as_torchs(ours: Callable[[Tensor], Tensor], approximate: str, width: int) -> None:
    x = torch.linspace(-12, 12, width, requires_grad=True)
    assert native.gelu_fits(x)
    double = x.detach().double().requires_grad_()
    expected = F.gelu(double, approximate=approximate)
    (slope,) = torch.autograd.grad(expected.sum(), double)
    y = ours(x)
    (found,) = torch.autograd.grad(y.sum(), x)  # the upstream gradient is one number, expanded
    assert (y - expected).abs().max() < 6e-7 and (found - slope).abs().max() < 5e-7
    tail = (x < -2) & (x > -5)  # where erf is 1 in float32, and 1 − erf would leave nothing of x
    assert torch.allclose(y[tail].double(), expected[tail], rtol=1e-5, atol=0)


@needs_compiler
def test_nan_stays_nan() -> None:
    x = torch.randn(300)
    x[5] = float("nan")
    assert gelu_tanh(x.requires_grad_()).isnan().sum() == 1
    qkv = heads(64, 64, 32)
    with torch.no_grad():
        qkv.q[0, 1, 5] = float("nan")
    nans = native.FusedAttention.apply(0.2, True, *qkv).isnan()
    assert nans[0, 1, 5].all() and nans.sum() == 32


@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5)])
def test_a_bias_has_torchs_gradient(shape: tuple[int, ...]) -> None:
    layer, x = Linear(5, 4), torch.randn(shape, requires_grad=True)
    inputs = x, layer.weight, layer.bias
    ours, torchs = layer(x), F.linear(*inputs)
    upstream = torch.randn_like(torchs)
    assert torch.equal(ours, torchs)
    for one, other in zip(*(torch.autograd.grad(y, inputs, upstream) for y in (ours, torchs)), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    layer.requires_grad_(False)
    one, other = (torch.autograd.grad(y, x, upstream)[0] for y in (layer(x), F.linear(*inputs)))
    assert torch.allclose(one, other, atol=1e-6)


@needs_compiler
def test_where_it_is_not_used() -> None:
    qkv = heads(64, 64, 32)
    assert native.attention_fits(*qkv)
    for change in (torch.Tensor.double, torch.Tensor.detach, lambda x: x.mT.contiguous().mT):
        assert not native.attention_fits(*(change(x) for x in qkv))
    assert not native.attention_fits(*heads(63, 64, 32)) and not native.attention_fits(*heads(64, 64, 48))
    with torch.no_grad():
        assert not native.attention_fits(*qkv)
    with sdpa_kernel(SDPBackend.MATH):
        assert not native.attention_fits(*qkv)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not native.attention_fits(*qkv) and not native.gelu_fits(torch.ones(300, requires_grad=True))
    torch.set_num_threads(9)
    assert not native.attention_fits(*qkv)
    assert not native.gelu_fits(torch.ones(255, requires_grad=True)) and not native.gelu_fits(torch.ones(300))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder without compiled libraries, and a process that has loaded none."""

    def forget() -> None:
        compiler.load.cache_clear()
        native.library.cache_clear()

    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


def test_small_models_compile_nothing(empty_cache: Path) -> None:
    small = heads(16, 16, 32)
    fast_attention(small, 0.2, mask(True, small)).sum().backward()
    gelu(torch.ones(3, 100, requires_grad=True)).sum().backward()
    assert not list(empty_cache.rglob("*"))


def test_torchs_openmp_comes_before_those_of_other_packages() -> None:
    others = ["/site/ctranslate2.libs/libgomp-1.so.1.0.0", "/site/torchvision.libs/libgomp-2.so", "/usr/lib/libomp.so"]
    for torchs in ("/site/torch/lib/libgomp.so.1", "/site/torch.libs/libgomp-3.so.1"):
        assert compiler._torch_first({*others, torchs}, "/site/torch") == [torchs, *others]


@pytest.mark.parametrize("obstacle", ["no compiler", "disabled"])
def test_without_c_torch_is_used(obstacle: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if obstacle == "no compiler":
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CC", raising=False)
    else:
        monkeypatch.setenv("WEFT_NATIVE", "0")
    qkv, x = heads(64, 64, 32), torch.randn(300, requires_grad=True)
    upstream = torch.randn(2, 4, 64, 32)
    ours = output_and_gradients(lambda qkv: fast_attention(qkv, 0.2, mask(True, qkv)), qkv, upstream)
    torchs = output_and_gradients(lambda qkv: _fused(qkv, 0.2, causal=True), qkv, upstream)
    assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))
    assert torch.allclose(gelu(x), F.gelu(x), atol=1e-6)
    assert not list(empty_cache.rglob("*.so"))


@needs_compiler
@pytest.mark.parametrize("flag", {"x86_64": ("-mno-avx", slow("-mno-avx512f"))}.get(platform.machine(), ()))
def test_older_cpus(flag: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "TUNING", (("-march=native", flag, "-O1"),))  # compiles faster
    if native.library() is None:
        pytest.skip("the compiler does not know this flag")
    check_attention((65, 130), 64, 2, True)
