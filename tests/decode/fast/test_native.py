"""The step in C gives what `model.step` gives, and is compiled, kept and left out as it should be."""

import multiprocessing
import os
import platform
import stat
from pathlib import Path

import pytest
import torch
from tests.pairwise import each_once
from torch import Tensor
from torch.nn import functional as F

from weft.decode.config import Sampling
from weft.decode.engine.paging import BlockStore
from weft.decode.fast import native, native_step, products, rounding, stepper
from weft.decode.fast.native_step import NativeStep
from weft.decode.fast.quantize import quantize
from weft.decode.generate import generate
from weft.models.build import build
from weft.models.config import Decoder
from weft.models.presets import gpt, llama
from weft.models.transformer import Transformer
from weft.native import compiler
from weft.nn.config import Plain, RMSNorm
from weft.nn.position_config import LinearScaling, Rotary

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def by_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "FIRST_CREDIT", 0.0)  # whatever the clock says on a busy machine


LLAMA = llama(2, 96, 3, d_ff=160, context=40, vocab_size=50, kv_heads=1)
CONFIGS = {
    "LLaMA": LLAMA,
    "tied": llama(3, 64, 4, d_ff=96, context=40, vocab_size=51, kv_heads=2, tied=True),
    "stretched, scaled": LLAMA.replace(
        position=Rotary(base=500.0, scaling=LinearScaling(factor=2.0)), embedding_scale=True, norm=RMSNorm(offset=1.0)
    ),
    "GPT-2": gpt(2, 64, 4, context=40, vocab_size=50),
    "relu": gpt(1, 64, 2, context=40, vocab_size=50).replace(feedforward=Plain(d_ff=96, activation="relu")),
    "biased head": LLAMA.replace(head={"kind": "lm", "tied": False, "bias": True}),
    "scaled head": LLAMA.replace(head={"kind": "lm", "tied": False, "bias": True, "scale": 0.5}),
}


def built(config: Decoder) -> Transformer:
    torch.manual_seed(0)
    model = build(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.ndim > 1 else parameter.add_(torch.rand_like(parameter))
    return model


def same(one: Tensor, other: Tensor, bits: str | None) -> None:
    """Equal but for rounding; where x is rounded to 8 bits, what is half-way may go either way."""
    if bits in ("int8", "int4"):
        assert float((other - one).norm() / one.norm()) < 0.03
    else:
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


def steps(model: Transformer, prompt: Tensor, tokens: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Logits after each of `tokens`, by the model and by the step in C, with what their caches hold."""
    with torch.inference_mode():
        plain, ours = model.start(1, 30), model.start(1, 30)
        for state in (plain, ours):
            model.advance(prompt, state)
        assert stepper.native_path_fits(model, ours)
        step = NativeStep(model, ours)
        expected = [model.step(token.view(1, 1), plain)[:, -1].clone() for token in tokens]
        found = [step(token.view(1)).clone() for token in tokens]
    assert ours.longest == plain.longest and ours.lengths.tolist() == plain.lengths.tolist()
    return [*expected, plain.cache.store], [*found, ours.cache.store]


@pytest.mark.parametrize(("name", "bits"), each_once(CONFIGS, [None, "bf16", "int8", "int4"]))
def test_it_equals_the_plain_step(name: str, bits: str | None) -> None:
    model = built(CONFIGS[name])
    if bits is not None:
        quantize(model, bits)  # by the same products
    expected, found = steps(model, torch.arange(1, 6)[None], torch.arange(7, 20))
    for one, other in zip(expected, found, strict=True):
        same(one, other, bits)


@pytest.mark.parametrize("bits", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("K", [32, 96, 544, 1536])
def test_products_are_those_of_the_weights(bits: products.Bits, K: int) -> None:
    weight = torch.randn(37, K, generator=torch.Generator().manual_seed(K)) + 0.2
    x = torch.randn(19, K, generator=torch.Generator().manual_seed(1))
    rounded = {
        "bf16": rounding.Groups(weight.bfloat16(), torch.ones(37, 1)),
        "int8": rounding.quantize_rows(weight),
        "int4": rounding.quantize_groups(weight),
    }[bits]
    exact = F.linear(x.double(), rounded.dequantize().double())
    product = products.Native(rounding.Packed.of(rounded, bits))
    off = (product(x).double() - exact).norm() / exact.norm()
    assert float(off) < (1e-6 if bits == "bf16" else 0.008)  # whole numbers: x is rounded to 8 bits in blocks
    damaged = x.clone()
    damaged[3, 5] = float("nan")
    damaged[4, 5] = float("inf")
    found = product(damaged)
    assert not found[3:5].isfinite().any() and found[[0, 1, 2, 5]].isfinite().all()


def check_products_of_whole_numbers() -> None:
    """Against the plain product in float64, with an x that rounding to 8 bits leaves as it is."""
    for N, K in ((1, 32), (15, 64), (16, 96), (17, 32), (37, 544), (100, 96)):
        generator = torch.Generator().manual_seed(N + K)
        x = torch.randint(-127, 128, (15, K), generator=generator).float()
        x[:, ::32] = 127.0  # the largest of each block
        x[2] = 127.0 * torch.randint(0, 2, (K,), generator=generator).mul(2).sub(1)
        x[0] *= 0.25
        weight = torch.randn(N, K, generator=generator) + 0.2
        groups = rounding.quantize_groups(weight)
        assert groups.scales.shape[1] == K // 32 and groups.centres is not None
        most = groups._replace(numbers=torch.where(groups.numbers > 0, 7, -8).to(torch.int8))
        rows = rounding.quantize_rows(weight)
        largest = rows._replace(numbers=(rows.numbers.sign() * rounding.MAX_INT8).to(torch.int8))
        cases: list[tuple[products.Bits, rounding.Groups]] = [("int8", rows), ("int8", largest), ("int4", groups)]
        cases += [("int4", most), ("int4", rounding.quantize_around_zero(weight))]
        for bits, rounded in cases:
            w = rounded.dequantize().double()
            product = products.Native(rounding.Packed.of(rounded, bits))
            found = product(x)
            assert all(torch.equal(found[row], product(x[row : row + 1])[0]) for row in range(len(x)))
            off = (found.double() - F.linear(x.double(), w)).abs()
            assert bool((off <= 1e-6 * F.linear(x.double().abs(), w.abs())).all()), (bits, N, K, float(off.max()))


def test_products_of_whole_numbers_of_any_shape() -> None:
    check_products_of_whole_numbers()


@pytest.mark.parametrize(("N", "K"), [(8, 16), (9, 48), (37, 512), (23, 1040), (150, 528)])
def test_many_rows_at_once_are_the_plain_product(N: int, K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(N)
    weight, bias, x = (torch.randn(shape, generator=generator) for shape in ((N, K), (N,), (100, K)))
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for rows in (*range(1, 18), 25, 41, 100):
            for added in (bias, None):
                found = native.matrix(weight, weight.shape, bias=added)
                y = native.multiply_many(found, x[:rows], torch.full((rows, N), torch.nan))
                torch.testing.assert_close(y, F.linear(x[:rows], weight, added), rtol=1e-5, atol=1e-4)


def test_bands_are_sixteen_rows_interleaved() -> None:
    rows = torch.randint(0, 256, (20, 32), dtype=torch.uint8)
    bands = native.in_bands(rows)
    assert bands.dtype == torch.uint8 and bands.numel() == 32 * 32
    found = bands.view(2, 8, 16, 4)  # four bytes of each row, and then the next four
    assert torch.equal(found.transpose(1, 2).reshape(32, 32)[:20], rows) and not found[1, :, 4:].any()
    scales = torch.randn(16, 3).bfloat16()
    assert torch.equal(native.in_bands(scales), scales.T[None])


@pytest.mark.parametrize("size", [1, 3, 255, 4099])
def test_normalisers_are_those_of_torch(size: int) -> None:
    x = torch.randn(7, size + 2, generator=torch.Generator().manual_seed(0)).mul_(20.0)[:, 1:-1]
    x[1] = -torch.inf
    x[2, : size // 2] = -torch.inf
    x[3] += 1000.0
    x[4, -1] = torch.nan
    found, expected = native.log_totals(x), x.double().logsumexp(dim=-1, keepdim=True).float()
    torch.testing.assert_close(found[:4], expected[:4], rtol=3e-7, atol=2e-6)
    torch.testing.assert_close(found[5:], expected[5:], rtol=3e-7, atol=2e-6)
    assert not found[4].isfinite()  # refused, either way


def test_rows_of_a_gated_layer_that_fill_no_band() -> None:
    model = built(llama(1, 96, 3, d_ff=90, context=40, vocab_size=50, kv_heads=1))
    for one, other in zip(*steps(model, torch.arange(1, 6)[None], torch.arange(7, 10)), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_step, "BYTES_A_THREAD", 1)  # small as the model is
    model = built(CONFIGS["tied"])
    quantize(model, "int4")
    kept = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 1, 5):
            torch.set_num_threads(threads)
            results.append(steps(model, torch.arange(1, 4)[None], torch.arange(7, 12))[1])
    finally:
        torch.set_num_threads(kept)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(("name", "bits"), each_once(CONFIGS, [None, "bf16", "int8", "int4"]))
def test_texts_in_blocks_are_those_of_one_alone_to_the_bit(name: str, bits: str | None) -> None:
    model = built(CONFIGS[name])
    if bits is not None:
        quantize(model, bits)
    lengths, size = [3, 11, 1, 7, 4], 4
    texts = [torch.arange(1, 40)[number : number + length] for number, length in enumerate(lengths)]
    store = BlockStore(model, 20, size)
    rows = stepper.native_rows(model, store)
    assert rows is not None
    # each text's blocks, none beside another
    tables = torch.tensor([[(number + 5 * place) % 20 for place in range(4)] for number in range(5)])
    expected = []
    with torch.inference_mode():
        for text, table in zip(texts, tables, strict=True):
            state = model.start(1, 16)
            model.advance(text[None], state)
            for block, number in enumerate(table.tolist()):
                store.data[:, number] = state.cache.store[:, :, 0, :, block * size :][:, :, :, :size]
            step = NativeStep(model, state)
            expected.append(torch.stack([step(torch.tensor([7 + place])).clone() for place in range(3)]))
        places, seven = torch.tensor(lengths), torch.full((5, 1), 7)
        read = [model.embed(seven + place, model.embedding)[:, 0] for place in range(3)]
        found = [rows.head(rows(x, places + place, tables)) for place, x in enumerate(read)]
    assert torch.equal(torch.stack(found, dim=1), torch.stack(expected)[:, :, 0])


def _in_a_child(config: Decoder, queue: "multiprocessing.Queue[list[float]]") -> None:
    torch.set_num_threads(1)  # torch's own threads don't survive a fork
    queue.put(steps(built(config), torch.arange(1, 4)[None], torch.arange(7, 10))[1][0].tolist())


def test_a_forked_process_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_step.NativeRows, "threads", lambda step, rows: 2)
    here = steps(built(LLAMA), torch.arange(1, 4)[None], torch.arange(7, 10))[1][0].tolist()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_a_child, args=(LLAMA, queue), daemon=True)
    child.start()
    assert queue.get(timeout=60) == here
    child.join()


def test_generate_takes_it_for_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model, taken = built(CONFIGS["GPT-2"]), []
    for name in ("read", "__call__"):
        plainly = getattr(NativeStep, name)
        counted = lambda *given, name=name, plainly=plainly: taken.append(name) or plainly(*given)  # noqa: E731
        monkeypatch.setattr(NativeStep, name, counted)
    settings = Sampling(temperature=0.0, max_tokens=9)
    ours = [token.id for token in generate(model, [[1, 2, 3]], settings)]
    assert taken == ["read", *["__call__"] * 8]
    monkeypatch.setattr(stepper, "native_reads", lambda model, state, tokens: False)
    assert [token.id for token in generate(model, [[1, 2, 3]], settings)] == ours
    assert len(taken) == 9


def test_what_it_is_not_written_for() -> None:
    def fits(config: Decoder, batch: int = 1) -> bool:
        model = built(config)
        return stepper.native_path_fits(model, model.start(batch, 8))

    assert fits(LLAMA)
    assert not fits(LLAMA, batch=2)
    attention = LLAMA.attention
    assert not fits(LLAMA.replace(attention=attention.model_copy(update={"window": 4}).model_dump()))
    assert not fits(LLAMA.replace(attention=attention.model_copy(update={"qk_norm": RMSNorm()}).model_dump()))
    assert not fits(LLAMA.replace(placement="post"))
    assert not fits(LLAMA.replace(residual=False))
    assert not fits(LLAMA.replace(position={"kind": "alibi"}))


# ---- compiling


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def forget() -> None:
        for known in (compiler.load, native.library, products.works, products.seconds):
            known.cache_clear()

    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


def quickly(*flags: str) -> tuple[str, ...]:
    """Flags of a compiler that takes less time: what it makes is the same but slower."""
    return tuple("-O1" if flag == "-O3" else flag for flag in flags)


def test_what_others_may_write_to_is_compiled_again(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "FLAGS", quickly(*compiler.FLAGS))
    path = compiler.compiled(native.SOURCE, "a step")
    assert path.parent == fresh / "compiled" and [each.name for each in path.parent.iterdir()] == [path.name]
    first = path.stat()
    assert compiler.compiled(native.SOURCE, "a step").stat().st_mtime_ns == first.st_mtime_ns
    path.write_bytes(b"somebody else's")
    path.chmod(0o777)
    assert compiler.compiled(native.SOURCE, "a step").stat().st_size == first.st_size
    assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def damaged(path: Path, how: str) -> None:
    content = path.read_bytes()
    path.unlink()
    match how:
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "empty":
            path.touch()
        case "another program":
            path.write_bytes(Path("/bin/sh").read_bytes())
        case "a link":
            kept = path.with_name("elsewhere.so")
            kept.write_bytes(content)
            path.symlink_to(kept)
        case "a pipe":
            os.mkfifo(path, 0o700)
        case "no end":
            path.symlink_to("/dev/zero")
    if path.is_file() and not path.is_symlink():
        path.chmod(0o700)


@pytest.mark.parametrize("how", ["cut", "empty", "another program", "a link", "a pipe", "no end"])
def test_what_is_damaged_is_compiled_again(how: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_compile", lambda *given: b"a library" * 500)
    path = compiler.compiled(native.SOURCE, "a step")
    content = path.read_bytes()
    damaged(path, how)
    assert compiler.compiled(native.SOURCE, "a step") == path
    assert path.read_bytes() == content and not path.is_symlink()


@pytest.mark.parametrize("how", ["a link", "open to all"])
def test_a_folder_that_others_may_write_to_is_not_trusted(how: str, tmp_path: Path, fresh: Path) -> None:
    folder = tmp_path / "compiled"
    (tmp_path / "other").mkdir()
    if how == "a link":
        folder.symlink_to(tmp_path / "other")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    assert native.library() is None and not list((tmp_path / "other").iterdir())


def older() -> tuple[str, ...]:
    """Flags that leave out what newer processors have, so that what is written for older ones is tried here."""
    x86 = "-mno-avx512vnni", "-mno-avx512f", "-mno-avx2", "-mno-avx"
    return {"x86_64": x86, "aarch64": ("-march=armv8-a",)}.get(platform.machine(), ())


@pytest.mark.parametrize("flag", older())
def test_processors_that_know_less(flag: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native_flags = () if flag.startswith("-march") else ("-march=native",)
    monkeypatch.setattr(compiler, "TUNING", ((*native_flags, flag),))
    monkeypatch.setattr(compiler, "FLAGS", quickly(*compiler.FLAGS))
    if native.library() is None:
        pytest.skip("a compiler without this flag")
    check_products_of_whole_numbers()


@pytest.mark.parametrize("obstacle", ["no compiler", "one that fails", "not wanted"])
def test_without_it_everything_goes_on(obstacle: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if obstacle == "no compiler":
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CC", raising=False)
    elif obstacle == "one that fails":
        monkeypatch.setattr(compiler.shutil, "which", lambda name: "/bin/false")
    else:
        monkeypatch.setenv("WEFT_NATIVE", "0")
    assert native.library() is None and not list(fresh.rglob("*.so"))
    model = built(LLAMA)
    assert not stepper.native_path_fits(model, model.start(1, 8))
    quantize(model, "int8")
    assert not any(isinstance(part, products.Native) for part in model.modules())
    assert len(list(generate(model, [[1, 2]], Sampling(temperature=0.0, max_tokens=4)))) == 4
