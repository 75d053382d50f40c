"""The step and products in C equal the model's."""

import ctypes
import os
import signal
import threading
import time
from itertools import product

import pytest
import torch
from tests.decode.fast.helpers import OLDER_CPUS, amplified
from tests.pairwise import each_once
from torch import Tensor
from torch.nn import functional as F

from weft.decode.config import Sampling
from weft.decode.engine.paging import BlockStore
from weft.decode.fast import matmul, native, quantized_weights, stepper
from weft.decode.fast.native_step import BYTES_PER_THREAD, NativeStep, native_decoder
from weft.decode.fast.path import PlainPath
from weft.decode.generate import generate
from weft.models.config import Decoder
from weft.models.presets import gpt, llama
from weft.models.transformer import Transformer
from weft.native import compiler
from weft.nn.config import Experts, Gated, LayerNorm, Plain, RMSNorm
from weft.nn.position_config import LinearScaling, Rotary, YaRN

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason="no C compiler"),
    pytest.mark.usefixtures("prefer_native"),
]
LLAMA = llama(2, 96, 3, d_ff=160, context=40, vocab_size=50, kv_heads=1)
CONFIGS = {
    "LLaMA": LLAMA,
    "tied": llama(3, 64, 4, d_ff=96, context=40, vocab_size=51, kv_heads=2, tied=True),
    "scaled positions": LLAMA.replace(
        position=Rotary(base=500.0, scaling=LinearScaling(factor=2.0)), embedding_scale=True, norm=RMSNorm(offset=1.0)
    ),
    "GPT-2": gpt(2, 64, 4, context=40, vocab_size=50),
    "relu": gpt(1, 64, 2, context=40, vocab_size=50).replace(feedforward=Plain(d_ff=96, activation="relu")),
    "relu2": LLAMA.replace(feedforward=Plain(d_ff=96, activation="relu2", bias=False)),
    "biased head": LLAMA.replace(head={"kind": "lm", "tied": False, "bias": True}),
    "scaled head": LLAMA.replace(head={"kind": "lm", "tied": False, "bias": True, "scale": 0.5}),
    "mixture": LLAMA.replace(feedforward=Experts(experts=4, chosen=2, d_ff=64)),
    "gated shared experts": LLAMA.replace(
        feedforward=Experts(experts=6, chosen=3, d_ff=32, renormalised=False, shared="gated", shared_d_ff=96)
    ),
    "groups beside a dense layer": LLAMA.replace(
        feedforward=Experts(
            experts=8,
            chosen=3,
            d_ff=32,
            score="sigmoid",
            scale=2.5,
            choice_bias=0.1,
            groups=4,
            kept_groups=2,
            shared="added",
            dense=Gated(d_ff=160),
            first_dense=1,
        )
    ),
    "experts with biases": LLAMA.replace(
        feedforward=Experts(experts=5, d_ff=64, score="softmax-chosen", bias=True, router_bias=True)
    ),
    "weighted inputs": LLAMA.replace(
        feedforward=Experts(experts=4, chosen=1, d_ff=64, score="sigmoid", renormalised=False, weighs="input")
    ),
    "norms of heads": LLAMA.replace(
        attention=LLAMA.attention.replace(qk_norm=RMSNorm(offset=1.0)), feedforward=Experts(experts=4, d_ff=64)
    ),
    "norms of rotated heads": LLAMA.replace(
        attention=LLAMA.attention.replace(qk_norm=LayerNorm(), qk_norm_rotated=True)
    ),
    "norms over all heads": LLAMA.replace(
        attention=LLAMA.attention.replace(qk_norm=RMSNorm(eps=1e-3), qk_norm_over="heads")
    ),
    "a window": LLAMA.replace(attention=LLAMA.attention.replace(window=5)),
    "adjacent pairs of a part": LLAMA.replace(
        position=Rotary(fraction=0.5, pairs="adjacent"), residual_scale=0.3, attention=LLAMA.attention.replace(clip=0.9)
    ),
    "halves of a part": LLAMA.replace(
        position=Rotary(fraction=0.75),
        norm=LayerNorm(gain=False, bias=False),
        feedforward=Experts(experts=4, d_ff=64, shared="added"),
        residual_scale=0.5,
    ),
    "layers that differ": LLAMA.replace(
        layers=3,
        pattern=[{"window": 6}, {"position": {"kind": "rotary", "base": 500.0}}, {"position": {"kind": "none"}}],
    ),
    "GPT-OSS": LLAMA.replace(
        attention=LLAMA.attention.replace(sinks=True, bias="all"),
        pattern=[{"window": 7}, {}],
        position=Rotary(base=150.0, scaling=YaRN(factor=4.0, original_context=10)),
        feedforward=Experts(
            experts=5, d_ff=64, score="softmax-chosen", bias=True, router_bias=True, beta=1.7, limit=0.4, up_offset=1.0
        ),
    ),
    "best groups": LLAMA.replace(
        feedforward=Experts(experts=6, d_ff=32, groups=3, kept_groups=1, group_score="maximum", activation="gelu")
    ),
}
# Neither d_model, d_head nor d_ff is a multiple of a vector's 4, 8 or 16 lanes, or of a panel's 16 rows.
ODD_CONFIGS = {
    "odd LLaMA": llama(2, 90, 5, d_ff=54, context=40, vocab_size=53, kv_heads=1),
    "odd GPT-2": gpt(2, 90, 5, context=40, vocab_size=53),
}


def assert_same(found: Tensor, expected: Tensor, bits: str | None) -> None:
    """Equal up to rounding. Where x is quantised to 8 bits, a tie may be rounded either way."""
    if bits in ("int8", "int4"):
        assert float((found - expected).norm() / expected.norm()) < 0.03
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def decode(model: Transformer, *, bytes_per_thread: int = BYTES_PER_THREAD) -> tuple[list[Tensor], list[Tensor]]:
    """Logits after each of several tokens, and the cache afterwards: by C, and by the model."""
    with torch.inference_mode():
        plain, fast = model.start(1, 30), model.start(1, 30)
        for state in (plain, fast):
            model.advance(torch.arange(1, 6)[None], state)
        assert NativeStep.fits(model, fast)
        step = NativeStep(model, fast)
        step.decoder.bytes_per_thread = bytes_per_thread
        tokens = torch.arange(7, 20)
        expected = [model.step(token.view(1, 1), plain)[:, -1].clone() for token in tokens]
        found = [step(token.view(1)).clone() for token in tokens]
    assert fast.longest == plain.longest and fast.lengths.tolist() == plain.lengths.tolist()
    return [*found, fast.cache.store], [*expected, plain.cache.store]


@pytest.mark.parametrize(
    ("name", "bits"), [*each_once(CONFIGS, [None, "bf16", "int8", "int4"]), *product(ODD_CONFIGS, [None, "bf16"])]
)
def test_equals_the_plain_step(name: str, bits: str | None) -> None:
    model = amplified({**CONFIGS, **ODD_CONFIGS}[name], bits)
    for found, expected in zip(*decode(model), strict=True):
        assert_same(found, expected, bits)


@pytest.mark.parametrize("bits", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("K", [32, 96, 544, 1536])
def test_products_equal_those_of_the_dequantised_weights(bits: matmul.Bits, K: int) -> None:
    weight = torch.randn(37, K, generator=torch.Generator().manual_seed(K)) + 0.2
    x = torch.randn(19, K, generator=torch.Generator().manual_seed(1))
    quantized = {
        "bf16": quantized_weights.Unpacked(weight.bfloat16(), torch.ones(37, 1)),
        "int8": quantized_weights.quantize_rows(weight),
        "int4": quantized_weights.quantize_groups(weight),
    }[bits]
    exact = F.linear(x.double(), quantized.dequantize().double())
    native_matmul = matmul.NativeMatmul(quantized.pack(bits))
    error = (native_matmul(x).double() - exact).norm() / exact.norm()
    assert float(error) < (1e-6 if bits == "bf16" else 0.008)  # with integers x is quantised to 8 bits in blocks
    x[3, 5], x[4, 5] = torch.nan, torch.inf
    found = native_matmul(x)
    assert not found[3:5].isfinite().any() and found[[0, 1, 2, 5]].isfinite().all()


def test_integer_products_of_any_shape() -> None:
    """Compare with float64, for x that 8 bits represent exactly."""
    for N, K in ((1, 32), (15, 64), (16, 96), (17, 32), (37, 544), (100, 96)):
        generator = torch.Generator().manual_seed(N + K)
        x = torch.randint(-127, 128, (15, K), generator=generator).float()
        x[:, ::32] = 127.0  # the largest of each block
        x[2] = 127.0 * torch.randint(0, 2, (K,), generator=generator).mul(2).sub(1)
        x[0] *= 0.25
        weight = torch.randn(N, K, generator=generator) + 0.2
        groups, rows = quantized_weights.quantize_groups(weight), quantized_weights.quantize_rows(weight)
        assert groups.scales.shape[1] == K // 32 and groups.centres is not None
        extreme4 = groups._replace(numbers=torch.where(groups.numbers > 0, 7, -8).to(torch.int8))
        extreme8 = rows._replace(numbers=(rows.numbers.sign() * quantized_weights.MAX_INT8).to(torch.int8))
        cases: list[tuple[matmul.Bits, quantized_weights.Unpacked]] = [("int8", rows), ("int8", extreme8)]
        cases += [("int4", groups), ("int4", extreme4), ("int4", quantized_weights.quantize_symmetric(weight))]
        for bits, quantized in cases:
            w = quantized.dequantize().double()
            native_matmul = matmul.NativeMatmul(quantized.pack(bits))
            found = native_matmul(x)
            assert all(torch.equal(found[row], native_matmul(x[row : row + 1])[0]) for row in range(len(x)))
            error = (found.double() - F.linear(x.double(), w)).abs()
            assert bool((error <= 1e-6 * F.linear(x.double().abs(), w.abs())).all()), (bits, N, K, float(error.max()))


@pytest.mark.slow
@pytest.mark.parametrize("older_cpu", OLDER_CPUS, indirect=True)
def test_integer_products_on_older_cpus(older_cpu: None) -> None:
    test_integer_products_of_any_shape()


@pytest.mark.parametrize(("N", "K"), [(8, 16), (9, 48), (37, 512), (23, 1040), (150, 528)])
def test_gemm_equals_torch(N: int, K: int) -> None:
    generator = torch.Generator().manual_seed(N)
    weight, bias, x = (torch.randn(shape, generator=generator) for shape in ((N, K), (N,), (100, K)))
    for threads in (1, 2):
        for rows in (*range(1, 18), 25, 41, 100):
            for added in (bias, None):
                matrix = native.matrix(weight, weight.shape, bias=added)
                y = native.gemm(matrix, x[:rows], torch.full((rows, N), torch.nan), threads=threads)
                torch.testing.assert_close(y, F.linear(x[:rows], weight, added), rtol=1e-5, atol=1e-4)


def test_shapes_are_checked_before_c_is_called() -> None:
    weight = torch.randn(16, 32)
    matrix = native.matrix(weight, weight.shape)
    with pytest.raises(AssertionError):
        native.multiply(matrix, torch.randn(2, 31))
    with pytest.raises(AssertionError):
        native.gemm(matrix, torch.randn(2, 32), torch.empty(2, 15))
    with pytest.raises(AssertionError):
        native.logsumexp(torch.randn(2, 8).t())


def test_structs_have_the_sizes_that_c_has() -> None:
    class Longer(ctypes.Structure):
        _fields_ = (("pointers", ctypes.c_void_p * 9),)

    with pytest.raises(AssertionError, match=r"step\.c"):
        compiler.load(native.SOURCE, "a step", (Longer, native.CNorm, native.CLayer, native.CModel, native.CBatch))


def test_panels_are_sixteen_interleaved_rows() -> None:
    rows = torch.randint(0, 256, (20, 32), dtype=torch.uint8)
    panels = native.interleave_rows(rows)
    assert panels.dtype == torch.uint8 and panels.numel() == 32 * 32
    words = panels.view(2, 8, 16, 4)  # four bytes of each row, then the next four
    assert torch.equal(words.transpose(1, 2).reshape(32, 32)[:20], rows) and not words[1, :, 4:].any()
    scales = torch.randn(16, 3).bfloat16()
    assert torch.equal(native.interleave_rows(scales), scales.T[None])


@pytest.mark.parametrize("size", [1, 3, 255, 4099])
def test_logsumexp_equals_torchs(size: int) -> None:
    x = torch.randn(7, size + 2, generator=torch.Generator().manual_seed(0)).mul_(20.0)[:, 1:-1]
    x[1] = -torch.inf
    x[2, : size // 2] = -torch.inf
    x[3] += 1000.0
    x[4, -1] = torch.nan
    found, expected = native.logsumexp(x), x.double().logsumexp(dim=-1, keepdim=True).float()
    torch.testing.assert_close(found[:4], expected[:4], rtol=3e-7, atol=2e-6)
    torch.testing.assert_close(found[5:], expected[5:], rtol=3e-7, atol=2e-6)
    assert not found[4].isfinite()


def test_the_number_of_threads_changes_no_bit() -> None:
    model = amplified(CONFIGS["tied"], "int4")
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 1, 5):
            torch.set_num_threads(threads)
            results.append(decode(model, bytes_per_thread=1)[0])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def exit_code(pid: int) -> int:
    """Wait for a child process, and kill it if it hangs."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        finished, status = os.waitpid(pid, os.WNOHANG)
        if finished:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_forked_while_another_thread_is_in_c_has_its_own_pool() -> None:
    weight = quantized_weights.quantize_rows(torch.randn(4096, 512)).pack("int8")
    native_matmul, x, stop = matmul.NativeMatmul(weight), torch.randn(8, 512), threading.Event()
    matrix = native_matmul.matrix()
    expected = native.multiply(matrix, x, 2).numpy().tobytes()

    def multiply_until_stopped() -> None:
        while not stop.is_set():
            native.multiply(matrix, x, 2)

    thread = threading.Thread(target=multiply_until_stopped)
    thread.start()
    try:
        for _ in range(10):
            pid = os.fork()
            if not pid:  # torch's OpenMP threads don't survive a fork, so only C is called here
                os._exit(native.multiply(matrix, x, 2).numpy().tobytes() != expected)
            assert exit_code(pid) == 0
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(("name", "bits"), each_once(CONFIGS, [None, "bf16", "int8", "int4"]))
def test_texts_in_blocks_equal_a_single_text_to_the_bit(name: str, bits: str | None) -> None:
    model = amplified(CONFIGS[name], bits)
    lengths, size = [3, 11, 1, 7, 4], 4
    texts = [torch.arange(1, 40)[number : number + length] for number, length in enumerate(lengths)]
    store = BlockStore(model, 20, size)
    decoder = native_decoder(model, store)
    assert decoder is not None
    # no text's blocks are adjacent
    tables = torch.tensor([[(number + 5 * block) % 20 for block in range(4)] for number in range(5)])
    expected = []
    with torch.inference_mode():
        for text, table in zip(texts, tables, strict=True):
            state = model.start(1, 16)
            model.advance(text[None], state)
            for block, number in enumerate(table.tolist()):
                store.data[:, number] = state.cache.store[:, :, 0, :, block * size :][:, :, :, :size]
            step = NativeStep(model, state)
            expected.append(torch.stack([step(torch.tensor([7 + n])).clone() for n in range(3)]))
        positions, tokens = torch.tensor(lengths), torch.full((5, 1), 7)
        embedded = [model.embed(tokens + n, model.embedding)[:, 0] for n in range(3)]
        found = [decoder.head(decoder(x, positions + n, tables)) for n, x in enumerate(embedded)]
    assert torch.equal(torch.stack(found, dim=1), torch.stack(expected)[:, :, 0])


def test_generate_uses_it_for_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = amplified(CONFIGS["GPT-2"]), list[str]()

    class Counted(NativeStep):
        def __call__(self, tokens: Tensor) -> Tensor:
            calls.append("step")
            return super().__call__(tokens)

        def read(self, tokens: Tensor, lengths: Tensor | None) -> Tensor:
            calls.append("read")
            return super().read(tokens, lengths)

    def text(*paths: type) -> list[int]:
        monkeypatch.setattr(stepper, "STEP_PATHS", paths)
        monkeypatch.setattr(stepper, "PREFILL_PATHS", paths)
        return [token.id for token in generate(model, [[1, 2, 3]], Sampling(temperature=0.0, max_tokens=9))]

    assert text(Counted, PlainPath) == text(PlainPath)
    assert calls == ["read", *["step"] * 8]


def test_unsupported_models_and_states() -> None:
    def fits(config: Decoder, batch: int = 1) -> bool:
        model = amplified(config)
        return NativeStep.fits(model, model.start(batch, 8))

    assert fits(LLAMA) and not fits(LLAMA, batch=2)
    norms = ({"qk_norm": RMSNorm(), "qk_norm_over": "each-head"},)
    plain, unsupported = LLAMA.attention, ({"softcap": 4.0}, {"d_v": 5}, *norms)
    changes: list[dict[str, object]] = [{"attention": plain.replace(**each)} for each in unsupported]
    changes += [{"placement": "post"}, {"residual": False}, {"position": {"kind": "alibi"}}]
    changes += [{"pattern": [{"chunk": 4}, {}]}, {"position": {"kind": "concatenated"}}]
    changes += [{"feedforward": Experts(experts=4, d_ff=64, score="sparse-mixer")}]
    for change in changes:
        assert not fits(LLAMA.replace(**change)), change
