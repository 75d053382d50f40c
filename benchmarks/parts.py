"""Time a forward and backward pass of GPT-2 and LLaMA beside transformers; measure attention memory by length.

    python benchmarks/parts.py [--batch 1] [--length 256] [--rounds 5]

Both models run alternately in one process, so that other load on the machine affects both.
"""

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.nn import functional as F

from weft.models.build import build
from weft.models.presets import preset
from weft.nn.position import Position


def theirs(name: str) -> torch.nn.Module:
    """Build transformers' model of a preset, with scaled_dot_product_attention."""
    import transformers

    ours = preset(name)
    if name.startswith("gpt"):
        config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return transformers.GPT2LMHeadModel._from_config(config, attn_implementation="sdpa")
    config = transformers.LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.d_model,
        intermediate_size=ours.feedforward.d_ff,
        num_hidden_layers=ours.layers,
        num_attention_heads=ours.attention.heads,
        num_key_value_heads=ours.attention.groups,
        max_position_embeddings=ours.context,
        tie_word_embeddings=ours.head.tied,
    )
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")


def pass_of(model: torch.nn.Module, tokens: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Seconds of one forward and backward pass."""
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    F.cross_entropy(logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return time.perf_counter() - start


def logits_of(peer: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Function from tokens to logits of a transformers model."""
    return lambda tokens: peer(tokens, use_cache=False).logits


def passes(name: str, batch: int, length: int, rounds: int) -> None:
    """Print the median seconds of both, and their ratio."""
    ours = build(preset(name))
    peer = theirs(name)
    tokens = torch.randint(preset(name).vocab_size, (batch, length + 1))
    times: dict[str, list[float]] = {"weft": [], "transformers": []}
    for turn in range(rounds + 1):
        mine = pass_of(ours, tokens, ours)
        other = pass_of(peer, tokens, logits_of(peer))
        if turn:  # the first turn warms up
            times["weft"].append(mine)
            times["transformers"].append(other)
    mine, other = (statistics.median(times[who]) for who in ("weft", "transformers"))
    print(f"{name:14} weft {mine:6.2f} s   transformers {other:6.2f} s   ratio {other / mine:.2f}", flush=True)
    del ours, peer
    gc.collect()


def attention_memory(length: int, masked: str) -> None:
    """Print the peak memory in MiB that one attention layer adds; runs in a separate process."""
    from weft.nn.attention_paths import fast_attention
    from weft.nn.mask import AttentionMask, Mask
    from weft.nn.scaled_dot_product import QKV

    q, k, v = (torch.randn(1, 4, length, 64, requires_grad=True) for _ in range(3))
    positions = torch.arange(length)[None]
    documents = (positions // 1000, positions // 1000)
    mask = {
        "causal": Mask(causal=True),
        "window 256": Mask(causal=True, window=256),
        "documents": Mask(causal=True, documents=documents),
    }[masked]
    attention_mask = AttentionMask(mask, Position(), positions, keys=positions)
    warm = torch.randn(1, 4, 8, 64, requires_grad=True)
    F.scaled_dot_product_attention(warm, warm, warm).sum().backward()
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before = high_water()
    fast_attention(QKV(q, k, v), 0.125, attention_mask).sum().backward()
    print((high_water() - before) // 1024)


def high_water() -> int:
    """Peak resident memory of this process, in KiB."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        attention_memory(int(options.memory[0]), options.memory[1])
        return
    print(f"forward + backward, fp32, batch {options.batch} × {options.length}, {torch.get_num_threads()} threads")
    for name in ("gpt2", "smollm2-135m"):
        passes(name, options.batch, options.length, options.rounds)
    print("\nattention, forward + backward, 4 heads of 64: MiB above the inputs")
    lengths = (1024, 2048, 4096, 8192, 16384)
    print(f"{'':14}" + "".join(f"{length:>8}" for length in lengths))
    for masked in ("causal", "window 256", "documents"):
        row = []
        for length in lengths:
            command = [sys.executable, __file__, "--memory", str(length), masked]
            row.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        print(f"{masked:14}" + "".join(f"{mib:>8}" for mib in row), flush=True)


if __name__ == "__main__":
    main()
