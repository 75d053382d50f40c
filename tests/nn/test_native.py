"""What a training step does in C gives what the formulas give, as exactly as PyTorch, and only where it should."""

import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.pairwise import pairwise
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

compiled = pytest.mark.skipif(native.library() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Few heads leave some threads of a large machine without any, and are PyTorch's then."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SIZES = [(64, 64), (65, 65), (127, 127), (300, 300), (130, 203), (203, 130)]  # queries and keys


def heads(time: int, source: int, d_head: int, shared: int = 1, rows: int = 2) -> QKV:
    """Four heads of queries that lie in one matrix with keys and values, as a layer has them."""
    torch.manual_seed(time)
    q, k, v = (torch.randn(rows, n, h, d_head) for n, h in ((time, 4), (source, 4 // shared), (source, 4 // shared)))
    return QKV(*(x.transpose(1, 2).requires_grad_() for x in (q, k, v)))


def mask(causal: bool, qkv: QKV) -> AttentionMask:
    queries, keys = (torch.arange(x.shape[2])[None] for x in qkv[:2])
    return AttentionMask(Mask(causal), Position(), queries, keys=keys)


def gradients(function: Callable[[QKV], Tensor], qkv: QKV, upstream: Tensor) -> list[Tensor]:
    """What comes out, and the gradients."""
    out = function(qkv)
    return [out.detach(), *torch.autograd.grad(out, qkv, upstream.to(out.dtype))]


@compiled
@pytest.mark.parametrize(
    ("sizes", "d_head", "shared", "causal"),
    pairwise(
        [(64, 64), (65, 65), (127, 127), (300, 300), (130, 203), (203, 130)], [32, 64, 96], [1, 2, 4], [True, False]
    ),
)
def test_attention_is_the_formulas(sizes: tuple[int, int], d_head: int, shared: int, causal: bool) -> None:
    qkv, scale = heads(*sizes, d_head, shared), 1.5 * d_head**-0.5
    upstream = torch.randn(2, sizes[0], 4, d_head).transpose(1, 2)
    assert native.attention_fits(*qkv)
    exactly = QKV(*(x.detach().double().requires_grad_() for x in qkv))
    seen = torch.ones(sizes, dtype=torch.bool).tril() if causal else None
    expected = gradients(lambda qkv: reference_attention(qkv, scale, seen)[0], exactly, upstream)
    ours = gradients(lambda qkv: fast_attention(qkv, scale, mask(causal, qkv)), qkv, upstream)
    theirs = gradients(lambda qkv: _fused(qkv, scale, causal=causal), qkv, upstream)
    for found, peer, wanted in zip(ours, theirs, expected, strict=True):
        off, allowed = ((x - wanted).norm() / wanted.norm() for x in (found, peer))
        assert off <= max(1.2 * allowed, 2e-7)


@compiled
def test_the_number_of_threads_changes_no_bit() -> None:
    qkv, x = heads(100, 100, 32, 2), torch.randn(50, 300, requires_grad=True)
    upstream, found = torch.randn(2, 4, 100, 32), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert native.attention_fits(*qkv) and native.gelu_fits(x)
        found.append(gradients(lambda qkv: native.FusedAttention.apply(0.2, True, *qkv), qkv, upstream))
        found[-1] += torch.autograd.grad(gelu(x).square().sum(), x)
    for other in found[1:]:
        assert all(torch.equal(one, again) for one, again in zip(found[0], other, strict=True))


@compiled
@pytest.mark.parametrize(("ours", "approximate"), [(gelu, "none"), (gelu_tanh, "tanh")])
@pytest.mark.parametrize("width", [256, 4099, 9001])
def test_gelu_is_as_exact_as_torchs(ours: Callable[[Tensor], Tensor], approximate: str, width: int) -> None:
    x = torch.linspace(-12, 12, width, requires_grad=True)
    assert native.gelu_fits(x)
    exactly = x.detach().double().requires_grad_()
    expected = F.gelu(exactly, approximate=approximate)
    (slope,) = torch.autograd.grad(expected.sum(), exactly)
    y = ours(x)
    (found,) = torch.autograd.grad(y.sum(), x)  # an upstream gradient that is one number, expanded
    assert (y - expected).abs().max() < 6e-7 and (found - slope).abs().max() < 5e-7
    tiny = (x < -2) & (x > -5)  # where erf is 1 in float32, and nothing is left of x by 1 − erf
    assert torch.allclose(y[tiny].double(), expected[tiny], rtol=1e-5, atol=0)


@compiled
def test_what_is_not_a_number_stays_so() -> None:
    x = torch.randn(300)
    x[5] = float("nan")
    y = gelu_tanh(x.requires_grad_())
    assert y.isnan().sum() == 1
    qkv = heads(64, 64, 32)
    with torch.no_grad():
        qkv.q[0, 1, 5] = float("nan")
    bad = native.FusedAttention.apply(0.2, True, *qkv).isnan()
    assert bad[0, 1, 5].all() and bad.sum() == 32


@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5)])
def test_a_bias_learns_what_torchs_does(shape: tuple[int, ...]) -> None:
    layer, x = Linear(5, 4), torch.randn(shape, requires_grad=True)
    given = x, layer.weight, layer.bias
    ours, theirs = layer(x), F.linear(*given)
    upstream = torch.randn_like(theirs)
    assert torch.equal(ours, theirs)
    for one, other in zip(*(torch.autograd.grad(y, given, upstream) for y in (ours, theirs)), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    layer.requires_grad_(False)
    one, other = (torch.autograd.grad(y, x, upstream)[0] for y in (layer(x), F.linear(*given)))
    assert torch.allclose(one, other, atol=1e-6)


@compiled
def test_all_else_goes_its_way() -> None:
    qkv, small = heads(64, 64, 32), heads(63, 64, 32)
    assert native.attention_fits(*qkv)
    assert not native.attention_fits(*small)
    assert not native.attention_fits(*heads(64, 64, 48))
    assert not native.attention_fits(*(x.double() for x in qkv))
    assert not native.attention_fits(*(x.detach() for x in qkv))
    assert not native.attention_fits(*(x.mT.contiguous().mT for x in qkv))
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
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache with nothing in it, and a process that has compiled nothing."""

    def forget() -> None:
        compiler.load.cache_clear()
        native.library.cache_clear()

    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


def test_small_models_compile_nothing(fresh: Path) -> None:
    small = heads(16, 16, 32)
    fast_attention(small, 0.2, mask(True, small)).sum().backward()
    gelu(torch.ones(3, 100, requires_grad=True)).sum().backward()
    assert not list(fresh.rglob("*"))


def test_threads_are_those_of_torch_and_not_of_a_package_beside_it() -> None:
    others = ["/site/ctranslate2.libs/libgomp-1.so.1.0.0", "/site/torchvision.libs/libgomp-2.so", "/usr/lib/libomp.so"]
    for ours in ("/site/torch/lib/libgomp.so.1", "/site/torch.libs/libgomp-3.so.1"):
        assert compiler._torch_first({*others, ours}, "/site/torch") == [ours, *others]


@pytest.mark.parametrize("obstacle", ["no compiler", "not wanted"])
def test_without_a_compiler_torch_computes_it(obstacle: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if obstacle == "no compiler":
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CC", raising=False)
    else:
        monkeypatch.setenv("WEFT_NATIVE", "0")
    qkv, x = heads(64, 64, 32), torch.randn(300, requires_grad=True)
    upstream = torch.randn(2, 4, 64, 32)
    ours = gradients(lambda qkv: fast_attention(qkv, 0.2, mask(True, qkv)), qkv, upstream)
    theirs = gradients(lambda qkv: _fused(qkv, 0.2, causal=True), qkv, upstream)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert torch.allclose(gelu(x), F.gelu(x), atol=1e-6)
    assert not list(fresh.rglob("*.so"))


@compiled
@pytest.mark.parametrize("flag", {"x86_64": ("-mno-avx512f", "-mno-avx")}.get(platform.machine(), ()))
def test_processors_that_know_less(flag: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "TUNING", (("-march=native", flag),))
    if native.library() is None:
        pytest.skip("a compiler without this flag")
    test_attention_is_the_formulas((65, 130), 64, 2, True)
