"""Requests of mixed lengths, all at once, through the engine; used by `engine.py`."""

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

CHECKED = 16  # texts that are read again, whole
OWN = 16  # tokens at least of a prompt that no other shares
MEMORY_SHARE = 0.85  # of a GPU's free memory, for blocks; the rest is for what a step computes
Wishes = list[tuple[list[int], Sampling]]
Lockstep = Callable[[Transformer, Tokenizer, Wishes], list[Completion]]


def run(engine: Engine) -> None:
    """Step until nothing is left to do."""
    while engine.step():
        pass


def submit(engine: Engine, tokenizer: Tokenizer, prompt: str | list[int], settings: Sampling) -> Request:
    """Ask for a text."""
    return engine.submit(Prompt.of(tokenizer, prompt), settings, settings.seed)


def blocks_for(model: Transformer, block_size: int, bits: CacheBits | None = None) -> int:
    """Blocks that a GPU has memory for; on a CPU, 2048."""
    table = model.embedding.weight
    if not table.is_cuda:
        return 2048
    free, _ = torch.cuda.mem_get_info(table.device)
    free += torch.cuda.memory_reserved(table.device) - torch.cuda.memory_allocated(table.device)
    return max(1, min(1 << 15, int(MEMORY_SHARE * free) // block_bytes(model, block_size, bits)))


def wishes(given: argparse.Namespace, vocab_size: int, seed: int) -> Wishes:
    """Prompts of random words and settings. Where there is a prefix, all begin with it as far as they are long enough
    to have a few words of their own.
    """
    rng = random.Random(seed)
    opening = [rng.randrange(8, vocab_size) for _ in range(given.prefix)]
    some: Wishes = []
    for number in range(given.requests):
        prompt = [rng.randrange(8, vocab_size) for _ in range(rng.randint(*given.prompts))]
        shared = max(0, min(given.prefix, len(prompt) - OWN))
        prompt[:shared] = opening[:shared]
        temperature = 0.0 if given.greedy or number % 2 else 0.8
        some.append((prompt, Sampling(max_tokens=rng.randint(*given.answers), temperature=temperature, seed=number)))
    return some


@torch.no_grad()
def clear(model: Transformer) -> None:
    """Weights whose choice is clear: the next word is most of all a matter of the last, another one for each."""
    table = model.embedding.weight
    table.normal_()
    assert isinstance(model.output.weight, torch.Tensor)
    model.output.weight.copy_(table.roll(1, 0) * table.shape[1] ** -0.5)


def load(model: Transformer, tokenizer: Tokenizer, given: argparse.Namespace, lockstep: Lockstep) -> None:
    """The requests through the engine, after a first time in which all is compiled; then in lockstep."""
    if given.clear:
        clear(model)
    began = time.perf_counter()
    bits = given.quantize_cache
    held = EngineLimits(blocks_for(model, given.block_size, bits), given.block_size, given.rows, bits=bits)
    engine = Engine(model, tokenizer.vocab_size, held)
    manager = engine.manager
    print(f"{len(manager.pool.uses):,} blocks of {given.block_size} tokens")
    gpu, words = device_of(model).type == "cuda", engine.vocab_size
    if gpu:
        _timed(engine, tokenizer, wishes(given, words, 1), None)
        print(f"first use of the engine: {time.perf_counter() - began:.1f} s")
    seed = 1
    for prefill in given.prefill or [engine.scheduler.prefill]:
        engine.scheduler.prefill = prefill
        for way, stream in _ways(manager, given):
            print(f"-- {prefill} tokens of prompts a step, {way}")
            if manager.graphs is not None:
                manager.graphs.prefill_stream = stream
            for _ in range(given.rounds):
                seed += 1
                asked = _round(engine, tokenizer, wishes(given, words, seed), traced=False)
            _round(engine, tokenizer, wishes(given, words, 1000 + seed), traced=True)
    if given.profile and gpu:
        _profile(engine, tokenizer, wishes(given, words, 5000))
    again(model, asked)
    texts = [request.completion() for request in asked]
    some = wishes(given, words, seed)
    del engine, manager
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
    if given.batch:
        for _ in range(2 if gpu else 1):  # the first time kernels are compiled
            began = time.perf_counter()
            alone = [
                text
                for n in range(0, len(some), given.batch)
                for text in lockstep(model, tokenizer, some[n : n + given.batch])
            ]
            seconds = time.perf_counter() - began
        tokens = sum(text.tokens for text in alone)
        same = sum(text == other for text, other in zip(texts, alone, strict=True))
        print(
            f"lockstep, {given.batch} at a time: {tokens / seconds:,.0f} tokens/s; "
            f"{same} of {len(alone)} texts are the engine's"
        )


def _ways(manager: BlockManager, given: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """How chunks of prompts are read: a name, and the stream beside the steps' own."""
    if manager.graphs is None or manager.graphs.prefill_stream is None:
        yield "one after the other", None
        return
    if given.serial:
        yield "one after the other", None
    for processors in given.sms:
        try:
            context = GreenContext.create(num_sms=processors, device_id=0)
            yield f"beside the steps, on {processors} of the GPU's processors", context.Stream()
        except (AttributeError, RuntimeError) as error:
            print(f"-- not on {processors} processors: {error}")
    yield "beside the steps", torch.cuda.Stream()


def _timed(
    engine: Engine, tokenizer: Tokenizer, some: Wishes, trace: Trace | None
) -> tuple[list[Request], float, list[float]]:
    """All requests at once: them, the seconds they take, and those until each one's first token."""
    began = time.perf_counter()
    asked = [submit(engine, tokenizer, *wish) for wish in some]
    silent, first = list(asked), []
    more = True
    while more:
        if trace is not None:
            trace.begin()
        more = engine.step()
        now = time.perf_counter() - began
        spoken = [request for request in silent if request.chunks]
        if spoken:
            first += [now] * len(spoken)
            silent = [request for request in silent if not request.chunks]
    return asked, time.perf_counter() - began, first


def _round(engine: Engine, tokenizer: Tokenizer, some: Wishes, traced: bool) -> list[Request]:
    counts = engine.counts
    before = counts.steps, counts.prompt, counts.shared, counts.preempted
    trace = Trace(engine) if traced else None
    asked, seconds, first = _timed(engine, tokenizer, some, trace)
    if trace is not None:
        trace.end()
    steps, prompt, shared, preempted = (
        now - then
        for now, then in zip((counts.steps, counts.prompt, counts.shared, counts.preempted), before, strict=True)
    )
    written = sum(request.written for request in asked)
    ranks = statistics.quantiles(first, n=20) if len(first) > 1 else first * 19
    print(
        f"{'traced: ' if traced else ''}{len(some)} requests, {prompt:,} tokens of prompts read, {shared:,} shared, "
        f"{written:,} written in {seconds:.2f} s: {written / seconds:,.0f} tokens/s; first token after "
        f"{ranks[9]:.2f} s (p50), {ranks[18]:.2f} s (p95); {steps} steps, {written / steps:.0f} written in each; "
        f"{preempted} preempted",
        flush=True,
    )
    if trace is not None:
        manager, model = engine.manager, engine.model
        assert model.decoder is not None
        kept = [*model.decoder.parameters(), *(each for each in model.decoder.buffers() if each.ndim > 1)]
        weights = sum(each.numel() * (2 if each.dtype == torch.uint8 else 1) for each in kept)
        read = sum(each.numel() * each.element_size() for each in kept)
        size = manager.pool.block_size
        trace.report(weights, read, block_bytes(model, size, held_in(engine)) // size, seconds)
    return asked


def held_in(engine: Engine) -> CacheBits | None:
    """How many bits an engine's keys and values have."""
    return None if engine.manager.store.scales is None else "int8"


def _profile(engine: Engine, tokenizer: Tokenizer, some: Wishes) -> None:
    """The kernels of steps with chunks of prompts, and of steps without."""
    for wish in some:
        submit(engine, tokenizer, *wish)

    def steps(count: int) -> Callable[[], None]:
        return lambda: [engine.step() for _ in range(count)] and None

    steps(20)()
    print("  10 steps that read prompts:")
    kernels_of(steps(10))
    while any(request.unread > 1 for request in engine.scheduler.running):
        engine.step()
    steps(4)()
    print(f"  10 steps that read none, {len(engine.scheduler.running)} rows:")
    kernels_of(steps(10))
    run(engine)


@torch.inference_mode()
def again(model: Transformer, asked: list[Request]) -> None:
    """What the model chooses where it reads a whole text at once, beside what was written of it greedily."""
    some = [request for request in asked if request.settings.greedy][:CHECKED]
    tokens = same = 0
    worst = 0.0
    for request in some:
        prompt, ids = len(request.prompt.ids), torch.tensor([request.ids], device=device_of(model))
        logits = model.head(model.features(ids[:, :-1])[:, prompt - 1 :])[0].float()
        chosen = ids[0, prompt:]
        short = logits.amax(-1) - logits.gather(-1, chosen[:, None])[:, 0]
        tokens, same = tokens + len(chosen), same + int((short == 0).sum())
        worst = max(worst, float((short / logits.std(-1)).max()))
    print(
        f"read whole, {len(some)} texts: {same / max(1, tokens):.1%} of {tokens:,} tokens are the likeliest there too, "
        f"and none is more than {worst:.3f} standard deviations of the logits below it"
    )


# ---- parts


@torch.inference_mode()
def tune(model: Transformer) -> None:
    """Chunks of several sizes by the kernels, and the attention of a step in several ways."""
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
        moved = 2 * int(lengths.sum()) * groups * d_head * out.element_size()
        found: list[tuple[float, str]] = []
        for page in (16, 32, 64):
            width = 2048 // page
            store = torch.randn(rows * width, 2, groups, page, d_head, device="cuda", dtype=kernels.dtype)
            tables = torch.randperm(rows * width, device="cuda").view(rows, width).int()
            for block in (32, 64, 128):
                for warps, stages in ((2, 3), (2, 4), (4, 2), (4, 3), (4, 4), (8, 3)):
                    for crowd in (
                        (2, PROGRAMS_PER_SM, 64) if (block, warps, stages) == (64, 4, 3) else (PROGRAMS_PER_SM,)
                    ):
                        attention = kernels.attention_for(rows, crowd)
                        attention.block, attention.warps, attention.stages = block, warps, stages
                        name = f"block_size {page}, keys {block}, warps {warps}, stages {stages}"
                        name += f", splits {attention.splits}"
                        inner = qkv, angles, store[:, 0], store[:, 1], lengths, 0.1, out
                        try:
                            seconds = _seconds(partial(attention, *inner, tables=tables, slots=slots))
                        except Exception as error:
                            print(f"  {name}: {type(error).__name__}")
                            continue
                        found.append((moved / seconds / 1e12, name))
            del store
        now = next(text for text in found if "block_size 16, keys 64, warps 4, stages 3" in text[1])
        print(f"attention of {rows} rows, {int(lengths.sum()) // rows} tokens each: now {now[0]:.2f} TB/s ({now[1]})")
        for speed, name in sorted(found, reverse=True)[:8] + [
            each for each in found if "64, warps 4, stages 3" in each[1]
        ]:
            print(f"    {speed:.2f} TB/s: {name}")


def _seconds(work: Callable[[], object], times: int = 10) -> float:
    """The GPU's time for some work, the shortest of several."""
    work()
    work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return min(a.elapsed_time(b) for a, b in pairwise(marks)) / 1e3
