"""Many requests at once against one at a time and against lockstep batches: throughput, time a token, and memory.

    python benchmarks/engine.py                       # 200 requests, batches of 16, then contexts of 1k, 4k and 16k
    python benchmarks/engine.py --requests 50 --contexts 1024
    python benchmarks/engine.py --layers 32 --d-model 4096 --rounds 2          # a GPU's size
    python benchmarks/engine.py --layers 32 --d-model 4096 --d-ff 11008 --vocab 32000 --requests 256 --batch 32 \\
        --prompts 32 1024 --answers 16 256 [--prefix 512] [--profile] [--clear] [--serial] [--tune] \\
        [--quantize int8] [--quantize-cache int8]                                                     # LLaMA-7B's shape

With --prompts it measures these lengths alone, all requests at once: tokens/s, the time to the first token, and where
the time of the steps goes. Of what was written greedily it then says how often the model would choose the same where
it reads the whole text at once. --clear gives it weights that choose clearly, so that texts can be compared.

It runs on a GPU in bf16 where there is one, else on the CPU in fp32. In bf16 a text may differ where two tokens are
almost equally likely, for sums are rounded in another order.

Weights are random, so nothing is learned from the texts; their lengths are what counts. The engine is timed between two
halves of the other way, for a machine may be busy with other things, and their ratio is what is reported. The batches
show what `decode.generate.engine_is_faster` says: with as many texts at a time, which way is faster for which lengths.
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

BLOCK = 16


def main() -> None:
    """Throughput, then one long text at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rows", type=int, default=256, help="how many are written at a time")
    parser.add_argument("--rounds", type=int, default=1, help="how often all of it is timed")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16, help="texts at a time, against lockstep batches; 0: leave out")
    parser.add_argument("--d-ff", type=int, help="as wide as three times d_model by default")
    parser.add_argument("--vocab", type=int, default=0, help="words of one token each; 0: bytes")
    parser.add_argument("--prompts", type=int, nargs=2, metavar=("FROM", "TO"), help="tokens, with the prefix")
    parser.add_argument("--answers", type=int, nargs=2, metavar=("FROM", "TO"), default=(16, 256))
    parser.add_argument(
        "--prefix", type=int, default=0, help="tokens with which all prompts begin, as far as they are long enough"
    )
    parser.add_argument(
        "--prefill", type=int, nargs="*", default=[], help="tokens of prompts in a step: one or several"
    )
    parser.add_argument("--block-size", type=int, default=BLOCK)
    parser.add_argument("--greedy", action="store_true", help="all texts, not every other one")
    parser.add_argument("--clear", action="store_true", help="weights that choose clearly")
    parser.add_argument("--serial", action="store_true", help="prefill and decode one after the other as well")
    parser.add_argument("--sms", type=int, nargs="*", default=[], help="processors that prompts are read on as well")
    parser.add_argument("--profile", action="store_true", help="the kernels of some steps")
    parser.add_argument("--tune", action="store_true", help="first, the attention of a step and the speed of chunks")
    parser.add_argument("--quantize", help="weights in int8 or int4, with --prompts")
    parser.add_argument("--quantize-cache", choices=["int8"], help="keys and values in int8, with --prompts")
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 4096, 16384])
    given = parser.parse_args()

    tokenizer = build_tokenizer(Byte(), ["any text"])
    if given.vocab:
        # three more for <pad>, <unk> and the like
        tokenizer = build_tokenizer(Word(), [" ".join(f"w{number}" for number in range(given.vocab - 4))])
    torch.manual_seed(0)
    d_model = given.d_model
    heads = d_model // (128 if d_model >= 1024 else 32)
    d_ff, vocab_size = given.d_ff or 3 * d_model, given.vocab or tokenizer.vocab_size
    config = llama(given.layers, d_model, heads, d_ff=d_ff, vocab_size=vocab_size, context=32768)
    gpu = torch.cuda.is_available()
    torch.set_default_dtype(torch.bfloat16 if gpu else torch.float32)
    with torch.device("cuda" if gpu else "cpu"):
        model = build(config).eval()
    torch.set_default_dtype(torch.float32)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    where = f"bf16, {torch.cuda.get_device_name()}" if gpu else f"fp32, {torch.get_num_threads()} threads"
    print(f"{parameters / 1e6:.1f} M parameters, {where}")
    if given.prompts:
        if given.quantize:
            quantize(model, given.quantize)
        if given.tune:
            engine_load.tune(model)
            torch.cuda.empty_cache()
        engine_load.load(model, tokenizer, given, lockstep)
        return
    throughput(model, tokenizer, given)
    for kind in ("unequal", "answers unequal", "equal") if given.batch else ():
        against_batches(model, tokenizer, given, kind)
    for context in given.contexts:
        long_text(model, tokenizer, context)


class Clock:
    """Seconds since it was last read: on the wall, and of this process's own work."""

    def __init__(self) -> None:
        self.last = (time.perf_counter(), time.process_time())

    def read(self) -> tuple[float, float]:
        """Both, and begin anew."""
        now = (time.perf_counter(), time.process_time())
        passed = (now[0] - self.last[0], now[1] - self.last[1])
        self.last = now
        return passed


def _wishes(requests: int, seed: int) -> list[tuple[str, Sampling]]:
    """Prompts and settings of mixed lengths, greedy and sampled."""
    rng = random.Random(seed)
    prompts = ["".join(rng.choices("abcdefgh ", k=rng.randint(4, 120))) for _ in range(requests)]
    return [
        (prompt, Sampling(max_tokens=rng.randint(16, 96), seed=n, temperature=rng.choice([0.0, 0.8])))
        for n, prompt in enumerate(prompts)
    ]


def lockstep(model: LanguageModel, tokenizer: Tokenizer, wishes: list[tuple[str, Sampling]]) -> list[Completion]:
    """What is written when all of these step together; each has its own seed."""
    prompts = [Prompt.of(tokenizer, prompt) for prompt, _ in wishes]
    settings = [each for _, each in wishes]
    return gather(generate(model, prompts, settings, seeds=[each.seed for each in settings]), prompts)


def throughput(model: LanguageModel, tokenizer: Tokenizer, given: argparse.Namespace) -> None:
    """The same requests through the engine and one at a time."""
    wishes, requests = _wishes(given.requests, 0), given.requests
    ratios: list[float] = []
    for _ in range(given.rounds):
        clock = Clock()
        alone = [lockstep(model, tokenizer, [wish])[0] for wish in wishes[: requests // 2]]
        before = clock.read()
        engine = Engine(
            model, tokenizer.vocab_size, EngineLimits(engine_load.blocks_for(model, BLOCK), BLOCK, given.rows)
        )
        if device_of(model).type == "cuda":  # kernels are compiled and graphs captured once, for other texts
            for prompt, each in _wishes(requests, 1):
                engine_load.submit(engine, tokenizer, prompt, each)
            engine_load.run(engine)
            print(f"first use of the engine: {clock.read()[0]:.1f} s")
        read = engine.counts.prompt
        asked = [engine_load.submit(engine, tokenizer, prompt, each) for prompt, each in wishes]
        engine_load.run(engine)
        together = clock.read()
        alone += [lockstep(model, tokenizer, [wish])[0] for wish in wishes[requests // 2 :]]
        after = clock.read()
        apart = before[0] + after[0], before[1] + after[1]
        tokens = sum(each.tokens for each in alone)
        same = sum(each.completion() == other for each, other in zip(asked, alone, strict=True))
        ratios.append(apart[0] / together[0])
        print(
            f"{requests} requests, {engine.counts.prompt - read} + {tokens} tokens, {same} texts the same: "
            f"engine {tokens / together[0]:,.0f} tokens/s, one at a time {tokens / apart[0]:,.0f}, "
            f"ratio {apart[0] / together[0]:.1f} (processor time {apart[1] / together[1]:.1f})",
            flush=True,
        )
    print(f"ratio: median {statistics.median(ratios):.1f}, from {min(ratios):.1f} to {max(ratios):.1f}")


def against_batches(model: LanguageModel, tokenizer: Tokenizer, given: argparse.Namespace, kind: str) -> None:
    """The engine and lockstep batches, with as many texts at a time; lengths are unequal or not, by `kind`."""
    wishes = [
        (
            prompt if kind == "unequal" else (prompt * 60)[:60],
            each.replace(temperature=0.8, max_tokens=56 if kind == "equal" else each.max_tokens),
        )
        for prompt, each in _wishes(given.requests, 2)
    ]
    middle = given.requests // 2 // given.batch * given.batch
    ratios: list[float] = []
    for _ in range(given.rounds):
        clock = Clock()

        def batches(some: list[tuple[str, Sampling]]) -> list[Completion]:
            starts = range(0, len(some), given.batch)
            return [text for n in starts for text in lockstep(model, tokenizer, some[n : n + given.batch])]

        batched = batches(wishes[:middle])
        before = clock.read()
        engine = Engine(
            model, tokenizer.vocab_size, EngineLimits(engine_load.blocks_for(model, BLOCK), BLOCK, given.batch)
        )
        asked = [engine_load.submit(engine, tokenizer, prompt, each) for prompt, each in wishes]
        engine_load.run(engine)
        together = clock.read()
        batched += batches(wishes[middle:])
        after = clock.read()
        apart = before[0] + after[0], before[1] + after[1]
        tokens = sum(each.tokens for each in batched)
        same = sum(each.completion() == other for each, other in zip(asked, batched, strict=True))
        ratios.append(apart[1] / together[1])
        print(
            f"lengths {kind}, {given.batch} at a time, {same} of {len(wishes)} texts the same: "
            f"engine {tokens / together[0]:,.0f} tokens/s, lockstep {tokens / apart[0]:,.0f}, "
            f"ratio {apart[0] / together[0]:.2f} (processor time {apart[1] / together[1]:.2f})",
            flush=True,
        )
    print(f"lengths {kind}: median ratio of processor time {statistics.median(ratios):.2f}")


def long_text(model: LanguageModel, tokenizer: Tokenizer, context: int, tokens: int = 24) -> None:
    """A text that begins with `context` tokens: seconds to read, milliseconds a token, and bytes of the cache."""
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
    held = 0
    while not request.ended:
        held = len(manager.pool.uses) - manager.pool.free_blocks
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    store = manager.store.data
    actual = held * store[:, 0].numel() * store.element_size()
    predicted = cache_bytes(model.config, "bf16" if store.is_cuda else "fp32") * (context + tokens - 1)
    print(
        f"context {context:>6,}: read at {context / read:,.0f} tokens/s, "
        f"{1e3 * statistics.median(times):.1f} ms a token; "
        f"cache {actual / 2**20:.2f} MiB, predicted {predicted / 2**20:.2f} ({actual / predicted - 1:+.1%})",
        flush=True,
    )


if __name__ == "__main__":
    main()
