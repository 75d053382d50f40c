"""Compare the engine with one request at a time and with lockstep batches: throughput, time per token, and memory.

    python benchmarks/engine.py                       # 200 requests, batches of 16, then contexts of 1k, 4k and 16k
    python benchmarks/engine.py --requests 50 --contexts 1024
    python benchmarks/engine.py --layers 32 --d-model 4096 --rounds 2          # a GPU's size
    python benchmarks/engine.py --layers 32 --d-model 4096 --d-ff 11008 --vocab 32000 --requests 256 --batch 32 \\
        --prompts 32 1024 --answers 16 256 [--prefix 512] [--profile] [--clear] [--serial] [--tune] \\
        [--quantize int8] [--quantize-cache int8]                                                     # LLaMA-7B's shape

With --prompts only these lengths are measured, all requests submitted together: tokens/s, time to first token, and a
breakdown of step time. Greedy texts are then checked against one forward pass over the whole text: how often the model
chooses the same token. --clear uses weights with a clear preference for one next token, so that texts can be compared.

The benchmark uses a GPU in bf16 if there is one, else the CPU in fp32. In bf16 a text may differ where two tokens are
almost equally likely, because sums are rounded in another order.

Weights are random; only the lengths of the texts matter. The engine is timed between two halves of the alternative,
which cancels other load on the machine, and their ratio is reported. The batches check
`decode.generate.engine_is_faster`: which path is faster for which lengths, with equal batch sizes.
"""

import argparse
import random
import statistics
import time

import torch

import engine_load
from weft.costs.memory import cache_bytes
from weft.decode.config import Sampling
from weft.decode.engine.engine import Engine, EngineLimits
from weft.decode.fast.quantize import quantize
from weft.decode.generate import generate
from weft.decode.prompt import Prompt
from weft.decode.text import Completion, gather
from weft.models.base import LanguageModel, device_of
from weft.models.build import build
from weft.models.presets import llama
from weft.text.config import Byte, Word
from weft.text.tokenizer import Tokenizer, build_tokenizer

BLOCK = 16  # tokens per KV block


def main() -> None:
    """Measure throughput, then one long text at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rows", type=int, default=256, help="requests decoded together")
    parser.add_argument("--rounds", type=int, default=1, help="repetitions of each measurement")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16, help="size of lockstep batches; 0: skip them")
    parser.add_argument("--d-ff", type=int, help="default: 3 × d_model")
    parser.add_argument("--vocab", type=int, default=0, help="words in the vocabulary; 0: bytes")
    parser.add_argument("--prompts", type=int, nargs=2, metavar=("FROM", "TO"), help="tokens, including the prefix")
    parser.add_argument("--answers", type=int, nargs=2, metavar=("FROM", "TO"), default=(16, 256))
    parser.add_argument("--prefix", type=int, default=0, help="tokens shared by all prompts that are long enough")
    parser.add_argument("--prefill", type=int, nargs="*", default=[], help="prompt tokens per step; several are tried")
    parser.add_argument("--block-size", type=int, default=BLOCK)
    parser.add_argument("--greedy", action="store_true", help="decode all texts greedily, not every other one")
    parser.add_argument("--clear", action="store_true", help="use weights with a clear preference for one next token")
    parser.add_argument("--serial", action="store_true", help="also run prefill and decode one after the other")
    parser.add_argument(
        "--sms", type=int, nargs="*", default=[], help="also prefill on this many of the GPU's multiprocessors"
    )
    parser.add_argument("--profile", action="store_true", help="list the kernels of a few steps")
    parser.add_argument("--tune", action="store_true", help="first time attention variants and prefill chunks")
    parser.add_argument("--quantize", help="weights in int8 or int4, with --prompts")
    parser.add_argument("--quantize-cache", choices=["int8"], help="keys and values in int8, with --prompts")
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 4096, 16384])
    options = parser.parse_args()

    tokenizer = build_tokenizer(Byte(), ["any text"])
    if options.vocab:
        # special tokens such as <pad> and <unk> make up the difference
        tokenizer = build_tokenizer(Word(), [" ".join(f"w{number}" for number in range(options.vocab - 4))])
    torch.manual_seed(0)
    d_model = options.d_model
    heads = d_model // (128 if d_model >= 1024 else 32)
    d_ff, vocab_size = options.d_ff or 3 * d_model, options.vocab or tokenizer.vocab_size
    config = llama(options.layers, d_model, heads, d_ff=d_ff, vocab_size=vocab_size, context=32768)
    gpu = torch.cuda.is_available()
    torch.set_default_dtype(torch.bfloat16 if gpu else torch.float32)
    with torch.device("cuda" if gpu else "cpu"):
        model = build(config).eval()
    torch.set_default_dtype(torch.float32)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    where = f"bf16, {torch.cuda.get_device_name()}" if gpu else f"fp32, {torch.get_num_threads()} threads"
    print(f"{parameters / 1e6:.1f} M parameters, {where}")
    if options.prompts:
        if options.quantize:
            quantize(model, options.quantize)
        if options.tune:
            engine_load.tune(model)
            torch.cuda.empty_cache()
        engine_load.load(model, tokenizer, options, lockstep)
        return
    throughput(model, tokenizer, options)
    for lengths in ("unequal", "answers unequal", "equal") if options.batch else ():
        compare_with_batches(model, tokenizer, options, lengths=lengths)
    for context in options.contexts:
        long_text(model, tokenizer, context)


class Clock:
    """Seconds since the last reading, by the clock and of processor time."""

    def __init__(self) -> None:
        self.last = (time.perf_counter(), time.process_time())

    def read(self) -> tuple[float, float]:
        """Return both and restart."""
        now = (time.perf_counter(), time.process_time())
        passed = (now[0] - self.last[0], now[1] - self.last[1])
        self.last = now
        return passed


def random_requests(count: int, seed: int) -> list[tuple[str, Sampling]]:
    """Prompts and sampling settings of mixed lengths, greedy and sampled."""
    rng = random.Random(seed)
    prompts = ["".join(rng.choices("abcdefgh ", k=rng.randint(4, 120))) for _ in range(count)]
    return [
        (prompt, Sampling(max_tokens=rng.randint(16, 96), seed=n, temperature=rng.choice([0.0, 0.8])))
        for n, prompt in enumerate(prompts)
    ]


def lockstep(model: LanguageModel, tokenizer: Tokenizer, requests: list[tuple[str, Sampling]]) -> list[Completion]:
    """Decode all requests in one lockstep batch, each with its own seed."""
    prompts = [Prompt.of(tokenizer, prompt) for prompt, _ in requests]
    settings = [sampling for _, sampling in requests]
    return gather(generate(model, prompts, settings, seeds=[sampling.seed for sampling in settings]), prompts)


def throughput(model: LanguageModel, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
    """Time the same requests in the engine and one at a time."""
    requests, count = random_requests(options.requests, 0), options.requests
    ratios: list[float] = []
    for _ in range(options.rounds):
        clock = Clock()
        alone = [lockstep(model, tokenizer, [request])[0] for request in requests[: count // 2]]
        before = clock.read()
        engine = Engine(
            model, tokenizer.vocab_size, EngineLimits(engine_load.blocks_for(model, BLOCK), BLOCK, options.rows)
        )
        if device_of(model).type == "cuda":  # compile kernels and capture graphs with other texts
            for prompt, sampling in random_requests(count, 1):
                engine_load.submit(engine, tokenizer, prompt, sampling)
            engine_load.run(engine)
            print(f"first use of the engine: {clock.read()[0]:.1f} s")
        read = engine.counts.prompt
        submitted = [engine_load.submit(engine, tokenizer, prompt, sampling) for prompt, sampling in requests]
        engine_load.run(engine)
        together = clock.read()
        alone += [lockstep(model, tokenizer, [request])[0] for request in requests[count // 2 :]]
        after = clock.read()
        apart = before[0] + after[0], before[1] + after[1]
        tokens = sum(completion.tokens for completion in alone)
        same = sum(request.completion() == other for request, other in zip(submitted, alone, strict=True))
        ratios.append(apart[0] / together[0])
        print(
            f"{count} requests, {engine.counts.prompt - read} + {tokens} tokens, {same} texts identical: "
            f"engine {tokens / together[0]:,.0f} tokens/s, one at a time {tokens / apart[0]:,.0f}, "
            f"ratio {apart[0] / together[0]:.1f} (processor time {apart[1] / together[1]:.1f})",
            flush=True,
        )
    print(f"ratio: median {statistics.median(ratios):.1f}, from {min(ratios):.1f} to {max(ratios):.1f}")


def compare_with_batches(
    model: LanguageModel, tokenizer: Tokenizer, options: argparse.Namespace, *, lengths: str
) -> None:
    """Time the engine beside lockstep batches of the same size, for texts of equal or unequal lengths."""
    requests = [
        (
            prompt if lengths == "unequal" else (prompt * 60)[:60],
            sampling.replace(temperature=0.8, max_tokens=56 if lengths == "equal" else sampling.max_tokens),
        )
        for prompt, sampling in random_requests(options.requests, 2)
    ]
    middle = options.requests // 2 // options.batch * options.batch
    ratios: list[float] = []
    for _ in range(options.rounds):
        clock = Clock()

        def in_batches(part: list[tuple[str, Sampling]]) -> list[Completion]:
            starts = range(0, len(part), options.batch)
            return [text for n in starts for text in lockstep(model, tokenizer, part[n : n + options.batch])]

        batched = in_batches(requests[:middle])
        before = clock.read()
        engine = Engine(
            model, tokenizer.vocab_size, EngineLimits(engine_load.blocks_for(model, BLOCK), BLOCK, options.batch)
        )
        submitted = [engine_load.submit(engine, tokenizer, prompt, sampling) for prompt, sampling in requests]
        engine_load.run(engine)
        together = clock.read()
        batched += in_batches(requests[middle:])
        after = clock.read()
        apart = before[0] + after[0], before[1] + after[1]
        tokens = sum(completion.tokens for completion in batched)
        same = sum(request.completion() == other for request, other in zip(submitted, batched, strict=True))
        ratios.append(apart[1] / together[1])
        print(
            f"lengths {lengths}, {options.batch} at a time, {same} of {len(requests)} texts identical: "
            f"engine {tokens / together[0]:,.0f} tokens/s, lockstep {tokens / apart[0]:,.0f}, "
            f"ratio {apart[0] / together[0]:.2f} (processor time {apart[1] / together[1]:.2f})",
            flush=True,
        )
    print(f"lengths {lengths}: median ratio of processor time {statistics.median(ratios):.2f}")


def long_text(model: LanguageModel, tokenizer: Tokenizer, context: int, tokens: int = 24) -> None:
    """Measure a prompt of `context` tokens: prefill speed, milliseconds per token, and size of the KV cache."""
    rng = random.Random(context)
    prompt = [rng.randrange(256) for _ in range(context)]
    engine = Engine(model, tokenizer.vocab_size, EngineLimits(-(-(context + tokens) // BLOCK) + 1, BLOCK, rows=1))
    manager = engine.manager
    settings = Sampling(max_tokens=tokens, temperature=0.0, banned=(tokenizer.eos_id or 0,))
    request = engine_load.submit(engine, tokenizer, prompt, settings)
    began = time.perf_counter()
    while not request.written:
        engine.step()
    read = time.perf_counter() - began
    times: list[float] = []
    used = 0
    while not request.ended:
        used = len(manager.pool.uses) - manager.pool.free_blocks
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    store = manager.store.data
    actual = used * store[:, 0].numel() * store.element_size()
    predicted = cache_bytes(model.config, "bf16" if store.is_cuda else "fp32") * (context + tokens - 1)
    print(
        f"context {context:>6,}: read at {context / read:,.0f} tokens/s, "
        f"{1e3 * statistics.median(times):.1f} ms per token; "
        f"cache {actual / 2**20:.2f} MiB, predicted {predicted / 2**20:.2f} ({actual / predicted - 1:+.1%})",
        flush=True,
    )


if __name__ == "__main__":
    main()
