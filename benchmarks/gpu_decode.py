"""Time decoding of a 7B LLaMA with random bf16 weights on one GPU; --transformers also times transformers.

    python benchmarks/gpu_decode.py [--parts check bf16 int8 int4 batch batch8 prefill context tune] [--transformers]
                                    [--experts] [--out FILE] [--tiny]

check    small models: the CUDA fast path and the general captured step against the plain step
bf16     batch 1, a prompt of 128, 200 new tokens, greedy
int8     as bf16, with 8-bit weights; int4 with 4-bit weights
batch    batch 32, bf16; batch8 with 8-bit weights
prefill  a prompt of 8,192 tokens, as a fraction of bf16's nominal 989 TFLOP/s
context  milliseconds per token after 1k, 4k and 16k tokens
tune     tiles of the matrix–vector kernel and attention shapes, each in a chain of 24 launches over fresh weights

--experts decodes a mixture instead, of 16 layers of d 2048 with 8 of 64 experts of d_ff 1024 chosen (1.3 of 6.9 B
parameters active), and takes the parts bf16, batch, context and tune; its peer is transformers' Mixtral.

The limit of a step is the time to read its weights and KV cache once, at 4.0 TB/s. --tiny checks the script with a
small model; without a GPU only the parts that have a CPU path run. Times with --tiny mean nothing.
"""

import argparse
import gc
import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

from weft.costs.memory import cache_bytes
from weft.decode.config import Sampling
from weft.decode.fast.cuda import CUDAFastPath
from weft.decode.fast.cuda_graphs import DeviceSampler, GraphStep
from weft.decode.fast.quantize import quantize
from weft.decode.fast.stepper import Stepper
from weft.decode.generate import generate
from weft.models.build import build as build_model
from weft.models.config import Decoder
from weft.models.presets import gpt, llama
from weft.nn.config import Experts
from weft.nn.experts import ExpertLayers
from weft.nn.experts import Experts as Mixture

BANDWIDTH = 4.0e12  # bytes per second of GPU memory
PEAK = 989e12  # nominal FLOPs per second in bf16
PROMPT, NEW = 128, 200  # tokens
PDL = True  # programmatic dependent launch, which the tuned GPUs have
SMALL = [(2, 512, 2), (1, 1024, 4), (4, 1024, 4), (8, 1024, 4), (4, 2048, 4), (8, 2048, 8), (4, 4096, 8)]
CANDIDATE_TILES = {  # by bits; for 4 bits, columns are counted in groups of 32
    16: [*SMALL, (1, 2048, 4), (8, 2048, 4), (1, 4096, 8)],
    8: [*SMALL, (4, 512, 2), (2, 1024, 4), (2, 2048, 4), (4, 2048, 8), (2, 4096, 8)],
    4: [(2, 64, 2), (2, 128, 4), (4, 32, 1), (4, 64, 2), (4, 64, 1), (4, 128, 4), (8, 32, 1), (8, 64, 2), (8, 128, 4)],
}
MIXTURE_TILES = [
    (16, 256, 4),
    (16, 512, 8),
    (8, 512, 4),
    (8, 256, 2),
    (32, 256, 8),
    (32, 128, 4),
    (16, 128, 2),
    (4, 512, 4),
]
ATTENTION_SHAPES = ((2, 64), (1, 64), (4, 64), (2, 32))  # programs per multiprocessor, keys per block
PARTS = ("check", "bf16", "int8", "int4", "batch", "batch8", "prefill", "context")


class Bench:
    def __init__(self, options: argparse.Namespace):
        self.tiny: bool = options.tiny
        self.bits: list[int] = options.bits
        self.out: Path | None = options.out
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.rounds = 1 if options.tiny else 3
        self.config = llama(2, 128, 4, d_ff=256, vocab_size=256) if options.tiny else llama(32, 4096, 32, d_ff=11008)
        if options.experts:
            mixture = Experts(experts=8, d_ff=64) if options.tiny else Experts(experts=64, chosen=8, d_ff=1024)
            dense = self.config if options.tiny else llama(16, 2048, 16, d_ff=1024, vocab_size=50304)
            self.config = dense.replace(feedforward=mixture)
        self.model: Any = None
        self.kind: str | None = None

    def log(self, part: str, line: str, **metrics: Any) -> None:
        print(f"{part:14} {line}", flush=True)
        if self.out is not None:
            with open(self.out, "a", encoding="utf-8") as file:
                file.write(json.dumps({"part": part, **metrics}) + "\n")

    def load(self, kind: str) -> Any:
        """Build the model with weights of this dtype, and drop the previous one."""
        if self.kind != kind:
            self.model = None
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self.model = build(self.config, self.device, self.dtype)
            if kind != "bf16":
                start = time.perf_counter()
                quantize(self.model, kind)
                self.sync()
                print(f"{'':14} quantized in {time.perf_counter() - start:.1f} s", flush=True)
                gc.collect()
            self.kind = kind
        return self.model

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def read_bytes(self, batch: int, context: float) -> float:
        """Bytes a decode step reads: the KV cache and all weights except the embedding and experts not chosen."""
        table, mixture = self.model.embedding.weight, self.config.feedforward
        weights = weight_bytes(self.model) - table.numel() * table.element_size()
        if isinstance(mixture, Experts):  # each row chooses at random
            unread = (1 - mixture.chosen / mixture.experts) ** batch
            weights -= unread * sum(
                weight_bytes(each) for each in self.model.modules() if isinstance(each, ExpertLayers)
            )
        return weights + batch * context * self.token_bytes

    @property
    def token_bytes(self) -> int:
        return cache_bytes(self.config, "bf16" if self.device.type == "cuda" else "fp32")

    @property
    def wide_bytes(self) -> int:
        """Peak bytes of activations per prompt token: a gated layer, its input and its output."""
        inner = self.config.feedforward
        chosen = inner.chosen if isinstance(inner, Experts) else 1
        return 2 * (2 * self.config.d_model + 3 * chosen * inner.d_ff)


def weight_bytes(model: Any) -> int:
    """Bytes of a model's parameters and buffers, each tensor counted once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


def build(config: Decoder, device: torch.device, dtype: torch.dtype) -> Any:
    """Build a model with random weights directly on `device` in `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return build_model(config).eval()
    finally:
        torch.set_default_dtype(before)


# ---- parts


def check(bench: Bench) -> None:
    """Check the captured steps against the plain step on small models, for one row and three of unequal length."""
    shapes = {
        "llama": llama(4, 512, 8, d_ff=1408, vocab_size=1000),
        "llama, shared": llama(4, 512, 8, d_ff=1408, vocab_size=1000, kv_heads=2, tied=True),
        "gpt": gpt(4, 256, 4, context=512, vocab_size=1000),
    }
    for name, config in shapes.items():
        for width in ("bf16", "int8", "int4"):
            torch.manual_seed(0)
            model = build(config, bench.device, bench.dtype)
            if width != "bf16":
                quantize(model, width)
            for batch in (1, 3):
                try:
                    worst, path = compare_logits(bench, model, batch)
                except Exception as error:
                    traceback.print_exc()
                    bench.log("check", f"{name} {width} batch {batch}: {error!r:.200}", error=repr(error))
                    disable_overlap(bench)
                    continue
                verdict = "fine" if worst < 0.03 else "WRONG"
                if verdict == "WRONG" and path == "fast path":
                    disable_overlap(bench)
                line = f"{name:14} {width} batch {batch}: {path:9} {worst:.4f} of the largest logit off, {verdict}"
                bench.log("check", line, model=name, width=width, batch=batch, path=path, off=worst)


def disable_overlap(bench: Bench) -> None:
    """Disable overlapping kernels from here on, to find out whether they caused the failure."""
    from weft.decode.fast import kernels

    if bench.device.type == "cuda" and kernels.has_pdl(bench.device):
        kernels.has_pdl = lambda device: False
        bench.log("check", "kernels no longer overlap from here on", pdl=False)


@torch.inference_mode()
def compare_logits(bench: Bench, model: Any, batch: int) -> tuple[float, str]:
    """Largest difference of logits over a prompt and 40 steps, as a fraction of the largest logit, and the path."""
    lengths = torch.tensor([200, 17, 129][:batch], device=bench.device)
    prompt = torch.randint(1000, (batch, 200), device=bench.device)
    plain, captured = model.start(batch, 360), Stepper(model, batch, prompt_tokens=200, limit=360)
    ragged = lengths if batch > 1 else None
    expected = model.head(model.advance(prompt, plain, ragged)[:, :17])
    actual = model.head(captured.read(prompt, ragged)[:, :17])
    worst = float((expected - actual).abs().max() / expected.abs().max())
    for _ in range(40):
        tokens = torch.randint(1000, (batch,), device=bench.device)
        a, b = model.step(tokens.unsqueeze(1), plain)[:, -1].float(), captured.step(tokens).float()
        worst = max(worst, float((a - b).abs().max() / a.abs().max()))
    return worst, "fast path" if CUDAFastPath.fits(model, captured.state) else "general"


def decoding(bench: Bench, part: str, kind: str, batch: int) -> None:
    """Time whole calls of `generate`; the first compiles and captures."""
    model = bench.load(kind)
    prompt, new = (8, 4) if bench.tiny else (PROMPT, NEW)
    prompts = torch.randint(bench.config.vocab_size, (batch, prompt)).tolist()
    settings = Sampling(temperature=0.0, max_tokens=new)

    def once() -> tuple[float, float]:
        bench.sync()
        start = time.perf_counter()
        first = 0.0
        for token in generate(model, prompts, settings):
            first = first or time.perf_counter() - start
            last = token
        assert last.finish == "length"
        bench.sync()
        return time.perf_counter() - start, first

    compile_time, _ = once()
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [once() for _ in range(bench.rounds)]
    whole = min(t for t, _ in times)
    steps = step_seconds(bench, model, batch, prompt, prompt + new)
    limit = bench.read_bytes(batch, prompt + new / 2) / BANDWIDTH
    metrics: dict[str, Any] = {
        "tokens_per_second": batch * new / whole,
        "spread": [batch * new / t for t, _ in times],
        "step_ms": steps * 1e3,
        "limit_ms": limit * 1e3,
        "first_call_s": compile_time,
    }
    line = (
        f"{batch * new / whole:8.1f} tok/s with the prompt, first call {compile_time:.1f} s; "
        f"a step {steps * 1e3:.3f} ms = {batch / steps:.1f} tok/s, {limit / steps:.0%} of the bandwidth"
    )
    if bench.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        predicted = weight_bytes(model) + batch * (prompt + new) * bench.token_bytes + batch * prompt * bench.wide_bytes
        metrics |= {"peak_bytes": peak, "predicted_bytes": predicted}
        line += f"; peak {peak / 1e9:.2f} GB, predicted {predicted / 1e9:.2f}"
    bench.log(part, line, **metrics)


@torch.inference_mode()
def step_seconds(bench: Bench, model: Any, batch: int, context: int, capacity: int) -> float:
    """Seconds of one captured greedy step after `context` tokens; the KV cache holds zeros."""
    state = model.start(batch, capacity + 8)
    state.advance(context)
    rngs = [torch.Generator() for _ in range(batch)]
    repeats = min(capacity - context, 8 if bench.tiny else 64)
    settings = [Sampling(temperature=0.0)] * batch
    sampler = DeviceSampler(settings, rngs, steps=3 * repeats, vocab_size=bench.config.vocab_size, device=bench.device)
    step = GraphStep(model, state, sampler)
    step()
    best = float("inf")
    for _ in range(2):
        state.lengths.fill_(context)
        state.longest = context
        bench.sync()
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        bench.sync()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


@torch.inference_mode()
def prefill(bench: Bench) -> None:
    model, config = bench.load("bf16"), bench.config
    length = 64 if bench.tiny else 8192
    tokens = torch.randint(config.vocab_size, (1, length), device=bench.device)
    inside = sum(p.numel() for p in model.decoder.parameters() if p.dim() == 2)
    products, scores = 2 * inside * length, 2 * length**2 * config.d_model * config.layers
    stepper = Stepper(model, 1, prompt_tokens=length, limit=length + 1)
    times = []
    for number in range(1 if bench.tiny else 4):
        stepper.truncate(0)
        bench.sync()
        start = time.perf_counter()
        features = stepper.read(tokens)
        model.head(features[:, -1:])
        bench.sync()
        if number or bench.tiny:
            times.append(time.perf_counter() - start)
    best = min(times)
    rate = (products + scores) / best
    line = f"{best * 1e3:.1f} ms, {length / best:,.0f} tok/s, {rate / 1e12:.0f} TFLOP/s = {rate / PEAK:.1%}"
    bench.log("prefill", line, seconds=best, mfu=rate / PEAK, mfu_without_scores=products / best / PEAK)


def context(bench: Bench) -> None:
    model = bench.load("bf16")
    for length in (16, 64) if bench.tiny else (1024, 4096, 16384):
        seconds = step_seconds(bench, model, 1, length, length + 64)
        limit = bench.read_bytes(1, length) / BANDWIDTH
        line = f"{length:6d} tokens before: {seconds * 1e3:.3f} ms per token, {limit / seconds:.0%} of the bandwidth"
        bench.log("context", line, context=length, step_ms=seconds * 1e3, limit_ms=limit * 1e3)


# ---- the matrix–vector kernel


def chain_seconds(launch: Callable[[int], Any], count: int = 24) -> float:
    """Mean seconds per launch, of `count` captured in a row and replayed."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(count):
            launch(number)
    best = float("inf")
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(4):
            graph.replay()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / 4 / count)
    return best


@torch.inference_mode()
def tune(bench: Bench) -> None:
    """Rank tiles for each matrix and shapes of attention; the following parts use the best ones.

    `fast/tiles.toml` stores the printed `TILES`, `fast/attend.py` the printed `PROGRAMS_PER_SM, KEY_BLOCK`.
    """
    from weft.decode.fast import attend, kernels

    D, inner = bench.config.d_model, bench.config.feedforward
    shapes = {"qkv": (3 * D, D), "out": (D, D), "head": (bench.config.vocab_size, D)}
    if isinstance(inner, Experts):
        shapes["router"] = inner.experts, D
        tune_mixture(bench, inner)
    else:
        shapes |= {"gate_up": (2 * inner.d_ff, D), "down": (D, inner.d_ff)}
    best: dict[tuple[int, int, int], Any] = {}
    for bits in bench.bits:
        for name, (N, K) in shapes.items():
            if bits == 4 and name == "head":  # the head keeps 8 bits
                continue
            gated = name == "gate_up"
            results = matvec_seconds(bench.device, N, K, bits, gated, name in ("qkv", "gate_up", "head"))
            ranked = sorted(results.items(), key=lambda item: item[1])
            shown = "  ".join(f"{_tile(key)} {seconds * 1e6:.1f}" for key, seconds in ranked)
            limit = N * K * (5 if bits == 4 else bits) / 8 / BANDWIDTH  # with scales, 4-bit weights take 5 bits each
            line = f"{name}, {bits} bits: limit {limit * 1e6:.1f} µs; {shown}"
            microseconds = {_tile(key): seconds * 1e6 for key, seconds in ranked}
            bench.log("tune", line, matrix=name, bits=bits, microseconds=microseconds)
            best[N // 2 if gated else N, K, bits] = next(key for key, _ in ranked if key is not None)
            torch.cuda.empty_cache()
    bench.log("tune", f"TILES = {best}", tiles={str(key): value for key, value in best.items()})
    kernels.TILES.update(best)
    for bits in (16, 8):
        pairs = sorted(attention_seconds(bench, bits).items(), key=lambda item: item[1])
        shown = "  ".join(f"{c}/{b} {seconds * 1e6:.1f}" for (c, b), seconds in pairs)
        line = f"attention over {PROMPT + NEW // 2} and out, {bits} bits: programs/block {shown}"
        bench.log("tune", line, bits=bits, microseconds={str(key): seconds * 1e6 for key, seconds in pairs})
        if pairs and bits == 16:
            attend.PROGRAMS_PER_SM, attend.KEY_BLOCK = pairs[0][0]
            bench.log("tune", f"PROGRAMS_PER_SM, KEY_BLOCK = {pairs[0][0]}", attention=pairs[0][0])


def tune_mixture(bench: Bench, settings: Experts) -> None:
    """Rank tiles of the experts' two products, one after the other."""
    from weft.decode.fast import kernels_experts

    norm = torch.nn.RMSNorm(bench.config.d_model, 1e-5, device=bench.device, dtype=torch.bfloat16)
    x = torch.randn(1, bench.config.d_model, device=bench.device, dtype=torch.bfloat16)
    layers = []
    for _ in range(3):
        layer = Mixture(settings, bench.config.d_model, None).to(bench.device, torch.bfloat16)
        layers.append(layer.requires_grad_(False))
        for parameter in layer.parameters():
            parameter.normal_(std=0.02)
    best = [kernels_experts.GATE_UP_TILE, kernels_experts.DOWN_TILE]
    for product, (N, K) in enumerate(((settings.d_ff, len(x[0])), (len(x[0]), settings.d_ff))):
        results = {}
        for tile in [*CANDIDATE_TILES[16], *MIXTURE_TILES]:
            tiles: Any = (tile, best[1]) if product == 0 else (best[0], tile)
            try:
                results[tile] = chain_seconds(
                    lambda n, tiles=tiles: kernels_experts.mixture(
                        layers[n % 3], x, norm, residual=x, pdl=PDL, tiles=tiles
                    )
                )
            except Exception as error:
                print(f"{tile}: {error!r:.200}", flush=True)
        ranked = sorted(results.items(), key=lambda item: item[1])
        best[product] = ranked[0][0]
        limit = settings.chosen * 3 * settings.d_ff * len(x[0]) * 2 / BANDWIDTH
        shown = "  ".join(f"{_tile(key)} {seconds * 1e6:.1f}" for key, seconds in ranked)
        bench.log("tune", f"mixture, product {product + 1} ({N}, {K}): limit of all {limit * 1e6:.1f} µs; {shown}")


def _tile(tile: tuple[int, int, int] | None) -> str:
    return "library" if tile is None else f"{tile[0]}×{tile[1]}/{tile[2]}"


def many_weights(device: torch.device, N: int, K: int, bits: int) -> tuple[list[Tensor], Tensor | None]:
    """Copies of a weight that exceed the GPU's cache together, and their scales if quantised."""
    copies = max(3, 400_000_000 // (N * K))
    weights = [torch.randn(N, K, device=device, dtype=torch.bfloat16) for _ in range(copies)]
    if bits == 16:
        return weights, None
    if bits == 8:
        return [w.to(torch.int8) for w in weights], torch.ones(N, device=device)
    return [w.view(torch.uint8)[:, : K // 2].contiguous() for w in weights], torch.ones(
        N, K // 32, device=device, dtype=torch.int32
    )


def matvec_seconds(
    device: torch.device, N: int, K: int, bits: int, gated: bool, normalised: bool
) -> dict[tuple[int, int, int] | None, float]:
    """Seconds of a matrix–vector product by tile; None is torch's."""
    from weft.decode.fast import kernels

    weights, scale = many_weights(device, N, K, bits)
    gain = torch.ones(K, device=device, dtype=torch.bfloat16) if normalised else None
    x = torch.randn(1, K, device=device, dtype=torch.bfloat16)
    rows = N // 2 if gated else N
    y = torch.zeros(1, rows, device=device, dtype=torch.bfloat16)
    results: dict[tuple[int, int, int] | None, float] = {}
    if bits == 16:
        results[None] = chain_seconds(lambda n: torch.nn.functional.linear(x, weights[n % len(weights)]))
    for tile in CANDIDATE_TILES[bits]:
        if rows % tile[0] or tile[0] * tile[1] * (16 if bits == 4 else 1) > (8192 if gated else 16384):
            continue

        def launch(n: int, tile: tuple[int, int, int] = tile) -> Tensor:
            return kernels.matvec(x, weights[n % len(weights)], scale, gain, 1e-5, None, gated, y, PDL, tile)

        try:
            results[tile] = chain_seconds(launch)
        except Exception as error:
            print(f"{tile}: {error!r:.200}", flush=True)
    return results


def attention_seconds(bench: Bench, bits: int) -> dict[tuple[int, int], float]:
    """Seconds of attention and its output projection, by programs per multiprocessor and keys per block."""
    from weft.decode.fast import attend, kernels

    heads, D, device = bench.config.attention.heads, bench.config.d_model, bench.device
    weights, scale = many_weights(device, D, D, bits)
    keys = PROMPT + NEW // 2
    options = {"device": device, "dtype": torch.bfloat16}
    cache = torch.randn(2, 1, heads, keys + 1, D // heads, **options)  # type: ignore[call-overload]
    qkv, mixed, x = (torch.randn(1, width, **options) for width in (3 * D, D, D))  # type: ignore[call-overload]
    angles = torch.ones(2, keys + 1, D // heads // 2, device=device).unbind(0)
    lengths = torch.full((1,), keys, device=device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    results: dict[tuple[int, int], float] = {}
    for programs, block in ATTENTION_SHAPES:
        attention = attend.DecodeAttention(1, heads, heads, D // heads, device, programs * processors, False)
        attention.block = block

        def launch(n: int, attention: Any = attention) -> Tensor:
            weight = weights[n % len(weights)]
            attention(qkv, angles, cache[0], cache[1], lengths, 0.1, mixed, PDL)
            return kernels.matvec(mixed, weight, scale, None, 0.0, x, False, x, PDL)

        try:
            results[programs, block] = chain_seconds(launch)
        except Exception as error:
            print(f"{programs}/{block}: {error!r:.200}", flush=True)
    return results


# ---- the peer


def peers(bench: Bench) -> None:
    """Time transformers with a dynamic cache and with a static one, for which it compiles."""
    import transformers

    ours = bench.config
    bench.model, bench.kind = None, None
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    mixture = ours.feedforward if isinstance(ours.feedforward, Experts) else None
    kind, own, ways = transformers.LlamaConfig, {}, {}
    if mixture is not None:
        kind, own = transformers.MixtralConfig, {"num_local_experts": mixture.experts}
        own["num_experts_per_tok"], ways = mixture.chosen, {"experts_implementation": "grouped_mm"}
    config = kind(
        **own,
        vocab_size=ours.vocab_size,
        hidden_size=ours.d_model,
        intermediate_size=ours.feedforward.d_ff,
        num_hidden_layers=ours.layers,
        num_attention_heads=ours.attention.heads,
        num_key_value_heads=ours.attention.groups,
        max_position_embeddings=ours.context,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    torch.set_default_dtype(bench.dtype)
    with torch.device(bench.device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=bench.dtype, **ways
        ).eval()
    torch.set_default_dtype(torch.float32)
    prompt, new = (8, 4) if bench.tiny else (PROMPT, NEW)
    for name, batch, cache in (("dynamic", 1, None), ("static", 1, "static"), ("dynamic", 32, None)):
        tokens = torch.randint(1, ours.vocab_size, (batch, prompt), device=bench.device)
        times = []
        for _ in range(2):
            bench.sync()
            start = time.perf_counter()
            model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                min_new_tokens=new,
                max_new_tokens=new,
                cache_implementation=cache,
            )
            bench.sync()
            times.append(time.perf_counter() - start)
        rate = batch * new / min(times)
        line = f"{name} cache, batch {batch}: {rate:.1f} tok/s (first call {times[0]:.1f} s)"
        bench.log("transformers", line, cache=name, batch=batch, tokens_per_second=rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=[*PARTS, "tune"])
    parser.add_argument("--bits", type=int, nargs="*", default=list(CANDIDATE_TILES), help="tune: bits per weight")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--experts", action="store_true", help="a mixture of experts instead of LLaMA-7B's shape")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    bench = Bench(options)
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}", flush=True)
    torch.manual_seed(0)
    work: dict[str, Callable[[], None]] = {
        "check": lambda: check(bench),
        "tune": lambda: tune(bench),
        "bf16": lambda: decoding(bench, "bf16", "bf16", 1),
        "batch": lambda: decoding(bench, "batch 32", "bf16", 4 if bench.tiny else 32),
        "prefill": lambda: prefill(bench),
        "context": lambda: context(bench),
        "int8": lambda: decoding(bench, "int8", "int8", 1),
        "batch8": lambda: decoding(bench, "int8, batch 32", "int8", 4 if bench.tiny else 32),
        "int4": lambda: decoding(bench, "int4", "int4", 1),
    }
    for part, measure in work.items():
        if part in options.parts:
            start = time.perf_counter()
            try:
                measure()
            except Exception as error:  # continue with the next part
                traceback.print_exc()
                bench.log(part, f"failed: {error!r:.300}", error=repr(error))
            print(f"{'':14} {part} took {time.perf_counter() - start:.1f} s", flush=True)
    if options.transformers:
        peers(bench)


if __name__ == "__main__":
    main()
