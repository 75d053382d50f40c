"""Time per-row dropout on a GPU: forward and backward passes in bf16, eager and compiled.

    python benchmarks/gpu_dropout.py [--models gpt-mini bert-base gpt2] [--steps 20] [--no-compile]

row      weft's: masks derived from the row's key, in custom kernels
torch    torch's generator and fused attention
none     no dropout, with the fused kernels
"""

import argparse
import time
from typing import Any

import torch
from torch.nn import functional as F

from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.presets import preset
from weft.nn import attention_paths
from weft.nn.dropout import RowRng, row_keys
from weft.nn.mask import AttentionMask
from weft.nn.scaled_dot_product import QKV

SHAPES = {"gpt-mini": (64, 256), "bert-base": (32, 512), "gpt2": (32, 1024)}


def fused(qkv: QKV, mask: AttentionMask, scoring: attention_paths.Scoring) -> torch.Tensor:
    """PyTorch's fused attention and dropout; rows have no padding, so only the causal mask matters."""
    assert scoring.dropping is not None
    return F.scaled_dot_product_attention(
        *qkv.repeat_kv(), dropout_p=scoring.p, is_causal=mask.mask.triangular, scale=scoring.scale
    )


def settings(name: str, p: float) -> Any:
    model = preset(name)
    return model.replace(dropout=p, attention=model.attention.replace(dropout=p))


def timed(name: str, kind: str, compiled: bool, steps: int) -> tuple[float, float]:
    """Tokens per second and peak memory in GiB."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    original = attention_paths.dropout_attention
    attention_paths.dropout_attention = fused if kind == "torch" else original
    try:
        model = build(settings(name, 0.0 if kind == "none" else 0.1)).cuda().train()
        assert isinstance(model, LanguageModel)
        features = torch.compile(model.forward_features) if compiled else model.forward_features
        rows, length = SHAPES[name]
        tokens = torch.randint(0, 1000, (rows, length), device="cuda")
        row_ids = torch.arange(rows, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        for step in range(steps + 5):
            if step == 5:
                torch.cuda.synchronize()
                started = time.perf_counter()
            rng = RowRng(row_keys(step, row_ids)) if kind == "row" else None
            with torch.autocast("cuda", torch.bfloat16):
                loss = features(tokens, rng=rng).float().square().mean()
            loss.backward()
            model.zero_grad()
        torch.cuda.synchronize()
        took = time.perf_counter() - started
    finally:
        attention_paths.dropout_attention = original
    return rows * length * steps / took, torch.cuda.max_memory_allocated() / 2**30


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=list(SHAPES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()
    for name in options.models:
        for compiled in (False,) if options.no_compile else (False, True):
            for kind in ("row", "torch", "none"):
                rate, memory = timed(name, kind, compiled, options.steps)
                mode = "compiled" if compiled else "eager"
                print(f"{name:10} {mode:9} {kind:6} {rate:>10,.0f} tokens/s {memory:6.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
