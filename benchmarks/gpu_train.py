"""Training steps on one GPU: weft and its peers, in the same call, with the same sizes, optimizer and clipping.

    python benchmarks/gpu_train.py [--only gpt2 llama bert vaswani] [--precision bf16|fp8] [--nanogpt PATH/model.py]
                                   [--steps 20] [--warmup 8] [--profile] [--tiny]

gpt2     GPT-2 124M, 32 × 1024 tokens; peers: nanoGPT (where its model.py is given), transformers
llama    22 layers, d 2048, 16 heads, d_ff 5632, V 32000: 1.26 B; 8 × 2048 tokens; peer: transformers
bert     BERT-base, masked words, 64 × 512 tokens of which 15 % are masked, the same number in each row; peer:
         transformers. weft forms logits at the masked places alone; dropout 0.1 in both
vaswani  the base model of 2017, 128 pairs of 128 + 128 tokens, label smoothing and dropout 0.1; peer:
         torch.nn.Transformer

A step is forward, backward, clipping to norm 1 and fused AdamW, compiled, under bf16 autocast, on random tokens that
lie ready. weft's is the step of its trainer. --precision changes weft's products alone. --tiny checks the script in
seconds on any device; its times mean nothing.
"""

import argparse
import gc
import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.data.batch import Batch, Source
from weft.models.config import MaskedLMHead
from weft.models.presets import bert, gpt, llama, vaswani
from weft.train.config import AdamW, NextToken
from weft.train.loss import chunk_loss, linear_cross_entropy
from weft.train.precision import arithmetic, check_precision, use_eight_bits
from weft.train.step import optimisation_step

Step = Callable[[], Tensor]
LR, BETAS, DECAY, CLIP = 6e-4, (0.9, 0.95), 0.1, 1.0


@dataclass(frozen=True)
class Size:
    """What both sides build: rows of `length` tokens, and a model's sizes."""

    rows: int
    length: int
    layers: int
    d_model: int
    heads: int
    d_ff: int
    vocab_size: int


SIZES = {
    "gpt2": Size(32, 1024, 12, 768, 12, 3072, 50257),
    "llama": Size(8, 2048, 22, 2048, 16, 5632, 32000),
    "bert": Size(64, 512, 12, 768, 12, 3072, 30522),
    "vaswani": Size(128, 128, 6, 512, 8, 2048, 37000),
}
MASKED = 0.15


def shrunk(size: Size) -> Size:
    """The same kind of model, but one that a processor steps through at once."""
    return replace(size, rows=2, length=32, layers=2, d_model=64, heads=2, d_ff=128, vocab_size=101)


class Bench:
    """Where and how everything runs."""

    def __init__(self, precision: Any, compiled: bool, device: torch.device):
        self.precision, self.compiled, self.device = precision, compiled, device

    def random(self, size: Size, *shape: int) -> Tensor:
        """Token ids."""
        return torch.randint(size.vocab_size, shape, device=self.device)

    def compile(self, what: Any) -> Any:
        """`what` through torch.compile, where that is asked for."""
        return torch.compile(what) if self.compiled else what

    # ---- weft

    def ours(self, settings: Any, batch: Batch, objective: Any = None) -> Step:
        """The step of weft's trainer, with the checks that it makes."""
        model = settings.build().to(self.device).train()
        if self.precision == "fp8":
            check_precision("fp8", self.device)
            use_eight_bits(model)
        if self.compiled:
            model.features = torch.compile(model.features, fullgraph=True)
        objective = objective or NextToken().build(self.compiled)
        optimizer = AdamW(betas=BETAS, weight_decay=DECAY).build(model)
        limits = torch.full((2,), math.inf, device=self.device)
        given = (LR, CLIP, self.precision, self.device, limits)
        return lambda: optimisation_step(model, optimizer, objective, [batch], *given).loss

    # ---- peers

    def theirs(self, model: nn.Module, loss: Callable[[Any], Tensor]) -> Step:
        """A step as the peers' users write it; `loss` reads the compiled model."""
        model.to(self.device).train()
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": DECAY},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)
        compiled = self.compile(model)

        def step() -> Tensor:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision != "fp32"):
                value = loss(compiled)
            value.backward()
            nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return value.detach()

        return step


Case = Iterator[tuple[str, Callable[[], Step]]]  # name → how to make its step, weft first


def gpt2(bench: Bench, size: Size, nanogpt: Path | None) -> Case:
    """Next tokens."""
    row = bench.random(size, size.rows, size.length + 1)
    tokens, targets = row[:, :-1].contiguous(), row[:, 1:].contiguous()
    settings = gpt(size.layers, size.d_model, size.heads, size.length, size.vocab_size)
    yield "weft", lambda: bench.ours(settings, Batch(tokens, targets))
    if nanogpt is not None:
        yield "nanoGPT", lambda: bench.theirs(_nanogpt(nanogpt, size), lambda model: model(tokens, targets)[1])

    def transformers_step() -> Step:
        import transformers

        config = transformers.GPT2Config(
            vocab_size=size.vocab_size,
            n_positions=size.length,
            n_embd=size.d_model,
            n_layer=size.layers,
            n_head=size.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="sdpa")
        return bench.theirs(model, lambda model: model(input_ids=tokens, labels=tokens).loss)

    yield "transformers", transformers_step


def _nanogpt(path: Path, size: Size) -> nn.Module:
    """nanoGPT's model at its own settings: no biases, a vocabulary filled up to a multiple of 64."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.GPTConfig(
        block_size=size.length,
        vocab_size=-(-size.vocab_size // 64) * 64,
        n_layer=size.layers,
        n_head=size.heads,
        n_embd=size.d_model,
        dropout=0.0,
        bias=False,
    )
    return module.GPT(config)


def llama_1b(bench: Bench, size: Size, nanogpt: Path | None) -> Case:
    """Next tokens."""
    row = bench.random(size, size.rows, size.length + 1)
    tokens, targets = row[:, :-1].contiguous(), row[:, 1:].contiguous()
    settings = llama(size.layers, size.d_model, size.heads, size.d_ff, size.length, size.vocab_size)
    yield "weft", lambda: bench.ours(settings, Batch(tokens, targets))

    def transformers_step() -> Step:
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=size.vocab_size,
            hidden_size=size.d_model,
            intermediate_size=size.d_ff,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            max_position_embeddings=size.length,
            tie_word_embeddings=False,
            use_cache=False,
        )
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
        return bench.theirs(model, lambda model: model(input_ids=tokens, labels=tokens).loss)

    yield "transformers", transformers_step


def bert_base(bench: Bench, size: Size, nanogpt: Path | None) -> Case:
    """Masked words. A batch's targets are the words at the masked places, as many in each row."""
    masked = round(MASKED * size.length)
    tokens = bench.random(size, size.rows, size.length)
    places = torch.rand(size.rows, size.length, device=bench.device).argsort(dim=1)[:, :masked]
    targets = bench.random(size, size.rows, masked)
    flat = (places + size.length * torch.arange(size.rows, device=bench.device)[:, None]).flatten()
    chunk = bench.compile(chunk_loss) if bench.device.type == "cuda" else chunk_loss

    def objective(model: Any, batch: Batch) -> tuple[Tensor, int, dict[str, Tensor]]:
        features = model.features(batch.tokens).flatten(0, 1)[flat]
        loss, nll = linear_cross_entropy(*model.readout(features), batch.targets.flatten(), chunk=chunk)
        return loss, batch.targets.numel(), {"nll": nll}

    settings = bert(size.layers, size.d_model, size.heads, size.vocab_size, size.length).replace(head=MaskedLMHead())
    yield "weft", lambda: bench.ours(settings, Batch(tokens, targets), objective)

    def transformers_step() -> Step:
        import transformers

        config = transformers.BertConfig(
            vocab_size=size.vocab_size,
            hidden_size=size.d_model,
            intermediate_size=size.d_ff,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            max_position_embeddings=size.length,
        )
        labels = torch.full_like(tokens, -100).scatter(1, places, targets)
        model = transformers.BertForMaskedLM._from_config(config, attn_implementation="sdpa")
        return bench.theirs(model, lambda model: model(input_ids=tokens, labels=labels).loss)

    yield "transformers", transformers_step


class TorchTransformer(nn.Module):
    """torch.nn.Transformer between one table of embeddings, with the sinusoids of 2017."""

    def __init__(self, size: Size):
        super().__init__()
        self.d_model = size.d_model
        self.embedding = nn.Embedding(size.vocab_size, size.d_model)
        nn.init.normal_(self.embedding.weight, std=size.d_model**-0.5)
        self.inner = nn.Transformer(
            size.d_model, size.heads, size.layers, size.layers, size.d_ff, dropout=0.1, batch_first=True
        )
        self.dropout = nn.Dropout(0.1)
        angles = torch.arange(size.length)[:, None] / 10000 ** (torch.arange(0, size.d_model, 2) / size.d_model)
        self.register_buffer("waves", torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1))
        self.register_buffer("ahead", nn.Transformer.generate_square_subsequent_mask(size.length))

    def embed(self, tokens: Tensor) -> Tensor:
        """(batch, time) → (batch, time, d_model)."""
        return self.dropout(self.embedding(tokens) * self.d_model**0.5 + self.waves)

    def forward(self, source: Tensor, tokens: Tensor) -> Tensor:
        """Logits (batch, time, vocab_size)."""
        features = self.inner(self.embed(source), self.embed(tokens), tgt_mask=self.ahead, tgt_is_causal=True)
        return F.linear(features, self.embedding.weight)


def vaswani_base(bench: Bench, size: Size, nanogpt: Path | None) -> Case:
    """Translation; every sentence fills its row, so neither side masks padding."""
    source = bench.random(size, size.rows, size.length)
    row = bench.random(size, size.rows, size.length + 1)
    tokens, targets = row[:, :-1].contiguous(), row[:, 1:].contiguous()
    settings = vaswani(size.layers, size.d_model, size.heads, size.d_ff, 0.1, size.vocab_size, size.length)
    batch = Batch(tokens, targets, source=Source(source, None))  # type: ignore[arg-type]
    objective = NextToken(smoothing=0.1).build(bench.compiled)
    yield "weft", lambda: bench.ours(settings, batch, objective)

    def loss(model: Any) -> Tensor:
        logits = model(source, tokens).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten(), label_smoothing=0.1)

    yield "torch.nn.Transformer", lambda: bench.theirs(TorchTransformer(size), loss)


CASES = {"gpt2": gpt2, "llama": llama_1b, "bert": bert_base, "vaswani": vaswani_base}


def measure(make: Callable[[], Step], device: torch.device, steps: int, warmup: int) -> tuple[float, float, float]:
    """Milliseconds a step, peak GiB and the last loss; nothing of the model is left afterwards."""
    gpu = device.type == "cuda"
    torch.manual_seed(0)
    step = make()
    for _ in range(warmup):
        step()
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(steps):
        loss = step()
    if gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0
    value = float(loss)
    del step, loss
    gc.collect()
    torch._dynamo.reset()
    if gpu:
        torch.cuda.empty_cache()
    return 1e3 * seconds / steps, peak, value


def profile(make: Callable[[], Step], warmup: int) -> None:
    """The kernels of three steps, the longest first."""
    step = make()
    for _ in range(warmup):
        step()
    with torch.profiler.profile() as watched:
        for _ in range(3):
            step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(watched.key_averages().table(sort_by=key, row_limit=30, max_name_column_width=90), flush=True)


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--precision", choices=("bf16", "fp8", "fp32"), default="bf16", help="of weft's products")
    parser.add_argument("--nanogpt", type=Path, help="the model.py of a nanoGPT checkout")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="show where weft's time goes instead")
    parser.add_argument("--tiny", action="store_true", help="check the script on any device")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not given.tiny:
        parser.error("this needs a GPU; --tiny checks the script without one")
    torch.set_float32_matmul_precision("high")  # as the peers' users do
    tiny_cpu = device.type == "cpu"
    bench = Bench("fp32" if tiny_cpu else given.precision, not tiny_cpu, device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "a processor: times mean nothing"
    print(f"{name}, torch {torch.__version__}, weft in {bench.precision}")
    print(
        f"{'case':9} {'who':22} {'ms/step':>9} {'tokens/s':>11} {'peak GiB':>9} {'loss':>7} {'weft is':>8}", flush=True
    )
    for case in given.only:
        size = shrunk(SIZES[case]) if given.tiny else SIZES[case]
        tokens = size.rows * size.length * (2 if case == "vaswani" else 1)
        mine = None
        for who, make in CASES[case](bench, size, given.nanogpt):
            if given.profile:
                with arithmetic(bench.precision, deterministic=False):
                    profile(make, given.warmup)
                break
            try:
                with arithmetic(bench.precision, deterministic=False) if who == "weft" else nullcontext():
                    ms, peak, loss = measure(make, device, given.steps, given.warmup)
            except Exception as error:  # one failure must not cost the other figures
                print(f"{case:9} {who:22} failed: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
                continue
            mine = ms if who == "weft" else mine
            ratio = "" if who == "weft" or mine is None else f"{ms / mine:.2f}×"
            print(
                f"{case:9} {who:22} {ms:9.2f} {1e3 * tokens / ms:11,.0f} {peak:9.1f} {loss:7.3f} {ratio:>8}", flush=True
            )


if __name__ == "__main__":
    main()
