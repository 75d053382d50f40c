"""Run the engine on many requests of mixed lengths, submitted together; used by `engine.py`."""

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.cuda.green_contexts import GreenContext

from engine_trace import Trace, kernels_of
from weft.decode.config import Sampling
from weft.decode.engine.blocks import BlockManager, Request
from weft.decode.engine.engine import Engine, EngineLimits
from weft.decode.engine.paging import BlockStore, CacheBits, block_bytes
from weft.decode.fast.cuda import PROGRAMS_PER_SM, PromptChunk
from weft.decode.fast.cuda_graphs import paged_graphs
from weft.decode.prompt import Prompt
from weft.decode.text import Completion
from weft.models.base import device_of
from weft.models.transformer import Transformer
from weft.text.tokenizer import Tokenizer

MAX_CHECKED = 16  # texts that are verified with one forward pass each
MIN_UNSHARED = 16  # tokens of a prompt that follow the shared prefix
MEMORY_SHARE = 0.85  # fraction of a GPU's free memory for KV blocks; activations get the rest
Requests = list[tuple[list[int], Sampling]]
Lockstep = Callable[[Transformer, Tokenizer, Requests], list[Completion]]


def run(engine: Engine) -> None:
    """Step until all requests are finished."""
    while engine.step():
        pass


def submit(engine: Engine, tokenizer: Tokenizer, prompt: str | list[int], settings: Sampling) -> Request:
    return engine.submit(Prompt.of(tokenizer, prompt), settings, settings.seed)


def blocks_for(model: Transformer, block_size: int, bits: CacheBits | None = None) -> int:
    """Number of KV blocks that fit a GPU's memory; 2048 on a CPU."""
    table = model.embedding.weight
    if not table.is_cuda:
        return 2048
    free, _ = torch.cuda.mem_get_info(table.device)
    free += torch.cuda.memory_reserved(table.device) - torch.cuda.memory_allocated(table.device)
    return max(1, min(1 << 15, int(MEMORY_SHARE * free) // block_bytes(model, block_size, bits)))


def random_requests(options: argparse.Namespace, vocab_size: int, seed: int) -> Requests:
    """Prompts of random words and sampling settings.

    Prompts begin with the shared prefix, shortened to leave them at least `MIN_UNSHARED` other tokens.
    """
    rng = random.Random(seed)
    prefix = [rng.randrange(8, vocab_size) for _ in range(options.prefix)]
    requests: Requests = []
    for number in range(options.requests):
        prompt = [rng.randrange(8, vocab_size) for _ in range(rng.randint(*options.prompts))]
        shared = max(0, min(options.prefix, len(prompt) - MIN_UNSHARED))
        prompt[:shared] = prefix[:shared]
        temperature = 0.0 if options.greedy or number % 2 else 0.8
        requests.append(
            (prompt, Sampling(max_tokens=rng.randint(*options.answers), temperature=temperature, seed=number))
        )
    return requests


@torch.no_grad()
def make_clear(model: Transformer) -> None:
    """Set weights that clearly prefer one next token, determined by the current token."""
    table = model.embedding.weight
    table.normal_()
    assert isinstance(model.output.weight, torch.Tensor)
    model.output.weight.copy_(table.roll(1, 0) * table.shape[1] ** -0.5)


def load(model: Transformer, tokenizer: Tokenizer, options: argparse.Namespace, lockstep: Lockstep) -> None:
    """Time the requests in the engine, after a warm-up round that compiles, then in lockstep."""
    if options.clear:
        make_clear(model)
    began = time.perf_counter()
    bits = options.quantize_cache
    limits = EngineLimits(blocks_for(model, options.block_size, bits), options.block_size, options.rows, bits=bits)
    engine = Engine(model, tokenizer.vocab_size, limits)
    manager = engine.manager
    print(f"{len(manager.pool.uses):,} blocks of {options.block_size} tokens")
    gpu, words = device_of(model).type == "cuda", engine.vocab_size
    if gpu:
        _timed(engine, tokenizer, random_requests(options, words, 1), None)
        print(f"first use of the engine: {time.perf_counter() - began:.1f} s")
    seed = 1
    for prefill in options.prefill or [engine.scheduler.prefill]:
        engine.scheduler.prefill = prefill
        for mode, stream in _prefill_modes(manager, options):
            print(f"-- {prefill} prompt tokens per step, {mode}")
            if manager.graphs is not None:
                manager.graphs.prefill_stream = stream
            for _ in range(options.rounds):
                seed += 1
                submitted = _round(engine, tokenizer, random_requests(options, words, seed), traced=False)
            _round(engine, tokenizer, random_requests(options, words, 1000 + seed), traced=True)
    if options.profile and gpu:
        _profile(engine, tokenizer, random_requests(options, words, 5000))
    check_greedy(model, submitted)
    texts = [request.completion() for request in submitted]
    requests = random_requests(options, words, seed)
    del engine, manager
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
    if options.batch:
        for _ in range(2 if gpu else 1):  # the first round compiles kernels
            began = time.perf_counter()
            alone = [
                text
                for n in range(0, len(requests), options.batch)
                for text in lockstep(model, tokenizer, requests[n : n + options.batch])
            ]
            seconds = time.perf_counter() - began
        tokens = sum(text.tokens for text in alone)
        same = sum(text == other for text, other in zip(texts, alone, strict=True))
        print(
            f"lockstep, {options.batch} at a time: {tokens / seconds:,.0f} tokens/s; "
            f"{same} of {len(alone)} texts equal the engine's"
        )


def _prefill_modes(manager: BlockManager, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield modes of prefill: a name, and the stream it runs on beside decoding (None: the same stream)."""
    if manager.graphs is None or manager.graphs.prefill_stream is None:
        yield "one after the other", None
        return
    if options.serial:
        yield "one after the other", None
    for processors in options.sms:
        try:
            context = GreenContext.create(num_sms=processors, device_id=0)
            yield f"beside the steps, on {processors} of the GPU's processors", context.Stream()
        except (AttributeError, RuntimeError) as error:
            print(f"-- not on {processors} processors: {error}")
    yield "beside the steps", torch.cuda.Stream()


def _timed(
    engine: Engine, tokenizer: Tokenizer, requests: Requests, trace: Trace | None
) -> tuple[list[Request], float, list[float]]:
    """Submit all requests and run them; return them, the seconds taken, and each one's time to first token."""
    began = time.perf_counter()
    submitted = [submit(engine, tokenizer, *request) for request in requests]
    waiting, first = list(submitted), []
    busy = True
    while busy:
        if trace is not None:
            trace.begin()
        busy = engine.step()
        now = time.perf_counter() - began
        first += [now] * sum(bool(request.chunks) for request in waiting)
        waiting = [request for request in waiting if not request.chunks]
    return submitted, time.perf_counter() - began, first


def _round(engine: Engine, tokenizer: Tokenizer, requests: Requests, traced: bool) -> list[Request]:
    counts = engine.counts
    before = counts.steps, counts.prompt, counts.shared, counts.preempted
    trace = Trace(engine) if traced else None
    submitted, seconds, first = _timed(engine, tokenizer, requests, trace)
    if trace is not None:
        trace.end()
    steps, prompt, shared, preempted = (
        now - then
        for now, then in zip((counts.steps, counts.prompt, counts.shared, counts.preempted), before, strict=True)
    )
    written = sum(request.written for request in submitted)
    ranks = statistics.quantiles(first, n=20) if len(first) > 1 else first * 19
    print(
        f"{'traced: ' if traced else ''}{len(requests)} requests, {prompt:,} prompt tokens read, {shared:,} shared, "
        f"{written:,} written in {seconds:.2f} s: {written / seconds:,.0f} tokens/s; first token after "
        f"{ranks[9]:.2f} s (p50), {ranks[18]:.2f} s (p95); {steps} steps, {written / steps:.0f} written in each; "
        f"{preempted} preempted",
        flush=True,
    )
    if trace is not None:
        manager, model = engine.manager, engine.model
        assert model.decoder is not None
        tensors = [*model.decoder.parameters(), *(buffer for buffer in model.decoder.buffers() if buffer.ndim > 1)]
        weights = sum(tensor.numel() * (2 if tensor.dtype == torch.uint8 else 1) for tensor in tensors)
        read = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        size = manager.pool.block_size
        trace.report(weights, read, block_bytes(model, size, cache_bits(engine)) // size, seconds)
    return submitted


def cache_bits(engine: Engine) -> CacheBits | None:
    """Integer format of an engine's keys and values, or None."""
    return None if engine.manager.store.scales is None else "int8"


def _profile(engine: Engine, tokenizer: Tokenizer, requests: Requests) -> None:
    """List the kernels of steps with prefill chunks, and of steps without."""
    for request in requests:
        submit(engine, tokenizer, *request)

    def steps(count: int) -> Callable[[], None]:
        return lambda: [engine.step() for _ in range(count)] and None

    steps(20)()
    print("  10 steps with prefill:")
    kernels_of(steps(10))
    while any(request.unread > 1 for request in engine.scheduler.running):
        engine.step()
    steps(4)()
    print(f"  10 steps without prefill, {len(engine.scheduler.running)} rows:")
    kernels_of(steps(10))
    run(engine)


@torch.inference_mode()
def check_greedy(model: Transformer, submitted: list[Request]) -> None:
    """Compare greedily decoded tokens with the argmax of one forward pass over the whole text."""
    checked = [request for request in submitted if request.settings.greedy][:MAX_CHECKED]
    tokens = same = 0
    worst = 0.0
    for request in checked:
        prompt, ids = len(request.prompt.ids), torch.tensor([request.ids], device=device_of(model))
        logits = model.head(model.features(ids[:, :-1])[:, prompt - 1 :])[0].float()
        chosen = ids[0, prompt:]
        margin = logits.amax(-1) - logits.gather(-1, chosen[:, None])[:, 0]
        tokens, same = tokens + len(chosen), same + int((margin == 0).sum())
        worst = max(worst, float((margin / logits.std(-1)).max()))
    print(
        f"forward pass over {len(checked)} texts: {same / max(1, tokens):.1%} of {tokens:,} tokens are its likeliest, "
        f"and none is more than {worst:.3f} standard deviations of the logits below it"
    )


# ---- parts


@torch.inference_mode()
def tune(model: Transformer) -> None:
    """Time prefill chunks of several sizes, and decode attention with several tile shapes."""
    graphs = paged_graphs(model, BlockStore(model, 4096, 16), 64)
    if graphs is None or graphs.kernels is None or model.decoder is None:
        print("no kernels for this model here")
        return
    rng, kernels = random.Random(0), graphs.kernels
    graphs.update_tables({(slot, n): slot * 64 + n for slot in range(64) for n in range(64)})
    weights = sum(parameter.numel() for parameter in model.decoder.parameters())
    for tokens, texts in ((512, 1), (1024, 1), (1024, 4), (2048, 4), (4096, 8), (8192, 16)):
        chunks = [PromptChunk(slot, 0, [rng.randrange(200) for _ in range(tokens // texts)]) for slot in range(texts)]
        seconds = _seconds(partial(kernels.read, chunks))
        speed = 2e-12 * weights * tokens / seconds
        print(f"chunks, {tokens} tokens of {texts} texts: {1e3 * seconds:.2f} ms, {speed:.0f} TFLOP/s")
    groups, d_head = kernels.kv_heads, kernels.d_head
    del graphs
    for rows in (256, 64):
        lengths = torch.tensor([rng.randint(32, 1280) for _ in range(rows)], device="cuda")
        qkv = torch.randn(rows, (kernels.heads + 2 * groups) * d_head, device="cuda").to(kernels.dtype)
        out = torch.empty(rows, kernels.heads * d_head, device="cuda", dtype=kernels.dtype)
        angles = tuple(torch.rand(2048, d_head // 2, device="cuda") for _ in range(2))
        slots = torch.arange(rows, device="cuda")
        bytes_read = 2 * int(lengths.sum()) * groups * d_head * out.element_size()
        results: list[tuple[float, str]] = []
        for page in (16, 32, 64):
            width = 2048 // page
            store = torch.randn(rows * width, 2, groups, page, d_head, device="cuda", dtype=kernels.dtype)
            tables = torch.randperm(rows * width, device="cuda").view(rows, width).int()
            for block in (32, 64, 128):
                for warps, stages in ((2, 3), (2, 4), (4, 2), (4, 3), (4, 4), (8, 3)):
                    for programs in (
                        (2, PROGRAMS_PER_SM, 64) if (block, warps, stages) == (64, 4, 3) else (PROGRAMS_PER_SM,)
                    ):
                        attention = kernels.attention_for(rows, programs)
                        attention.block, attention.warps, attention.stages = block, warps, stages
                        name = f"block_size {page}, keys {block}, warps {warps}, stages {stages}"
                        name += f", splits {attention.splits}"
                        arguments = qkv, angles, store[:, 0], store[:, 1], lengths, 0.1, out
                        try:
                            seconds = _seconds(partial(attention, *arguments, tables=tables, slots=slots))
                        except Exception as error:
                            print(f"  {name}: {type(error).__name__}")
                            continue
                        results.append((bytes_read / seconds / 1e12, name))
            del store
        current = next(text for text in results if "block_size 16, keys 64, warps 4, stages 3" in text[1])
        mean = int(lengths.sum()) // rows
        print(f"attention of {rows} rows, {mean} tokens each: currently {current[0]:.2f} TB/s ({current[1]})")
        for speed, name in sorted(results, reverse=True)[:8] + [
            result for result in results if "64, warps 4, stages 3" in result[1]
        ]:
            print(f"    {speed:.2f} TB/s: {name}")


def _seconds(work: Callable[[], object], times: int = 10) -> float:
    """Shortest GPU time of `times` calls, in seconds."""
    work()
    work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return min(a.elapsed_time(b) for a, b in pairwise(marks)) / 1e3
