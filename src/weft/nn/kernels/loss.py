"""Loss and gradient of a chunk of logits in one GPU kernel, computing `loss.chunk_loss`.

Each program processes a row. It reads the row once for the maximum and the sum of exponentials (online softmax; Milakov
and Gimelshein 2018), and a second time to replace the logits by the gradient. Rows of 50,000 logits in 16 bits are
100 kB, and the few hundred rows in flight stay in the L2 cache, so the second read costs no memory traffic.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from weft.nn.config import LossTerms

MAX_COLUMNS = 8192  # columns that a program holds at a time
COLUMNS_PER_WARP = 512  # 16 per thread: two of the widest loads

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # below every logit, and finite, so that differences are never NaN


@triton.jit
def _row(  # type: ignore[no-untyped-def]
    logits, targets, weights, losses, nlls,
    stride, width, vocab_size, smoothing, z_loss, SMOOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    here = logits + row.to(tl.int64) * stride
    weight = tl.load(weights + row)
    target = tl.load(targets + row)
    at_target = tl.load(here + target).to(tl.float32)

    # each lane keeps its maximum so far and the sum of exponentials relative to it
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(here + columns, mask=columns < width, other=0.0).to(tl.float32)
        real = columns < vocab_size
        if SMOOTH:
            sums += tl.where(real, x, 0.0)
        x = tl.where(real, x, LOWEST)
        # either exp(x − max) or exp(top − max) is 1, so one exponential is enough
        power = tl.exp2(-tl.abs(x - top) * LOG2_E)
        total = tl.where(x > top, total * power + 1.0, total + power)
        top = tl.where(x > top, x, top)
    highest = tl.max(top, axis=0)
    normaliser = tl.sum(total * tl.exp2((top - highest) * LOG2_E), axis=0)
    log_z = highest + tl.log(normaliser)

    nll = log_z - at_target
    loss = nll + z_loss * log_z * log_z
    if SMOOTH:
        loss += smoothing * (at_target - tl.sum(sums, axis=0) / vocab_size)
    tl.store(losses + row, loss * weight)
    tl.store(nlls + row, nll * weight)

    slope = weight * (1.0 + 2.0 * z_loss * log_z) / normaliser
    uniform = weight * smoothing / vocab_size
    onehot = weight * (1.0 - smoothing)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(here + columns, mask=columns < width, other=0.0).to(tl.float32)
        gradient = tl.exp2((x - highest) * LOG2_E) * slope - uniform
        gradient -= tl.where(columns == target, onehot, 0.0)
        gradient = tl.where(columns < vocab_size, gradient, 0.0)
        tl.store(here + columns, gradient.to(logits.dtype.element_ty), mask=columns < width)


def fused_chunk_loss(
    logits: Tensor, targets: Tensor, weights: Tensor, *, vocab_size: int, terms: LossTerms
) -> tuple[Tensor, Tensor, Tensor]:
    """`loss.chunk_loss`; the gradient overwrites the logits (N, V or more)."""
    rows, width = logits.shape
    assert logits.stride(1) == 1 and targets.is_contiguous() and weights.is_contiguous()
    losses, nlls = logits.new_empty(2, rows, dtype=torch.float32)
    block = min(MAX_COLUMNS, triton.next_power_of_2(width))
    with torch.cuda.device_of(logits):
        _row[(rows,)](
            logits, targets, weights, losses, nlls,
            logits.stride(0), width, vocab_size, terms.smoothing, terms.z_loss,
            SMOOTH=terms.smoothing > 0.0, BLOCK=block, num_warps=max(1, block // COLUMNS_PER_WARP),
        )  # fmt: skip
    return losses.sum(), nlls.sum(), logits
