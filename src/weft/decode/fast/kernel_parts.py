"""What the kernels for products share, whatever their weights are kept in; written in Triton, and inlined."""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def loaded(at, mask, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What is there; a block that is WHOLE needs no mask."""
    return tl.load(at) if WHOLE else tl.load(at, mask=mask, other=0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def put_row(  # type: ignore[no-untyped-def]
    y, up, mean_square, residual_ptr, y_ptr, rows, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Store a product with one vector after all that stands behind it; `up` is the gate's other half, if GATED."""
    if NORM:  # gain · x / RMS(x): the root is one number for the whole row, so it can come last
        root = tl.rsqrt(mean_square + eps)
        y *= root
        if GATED:
            up *= root
    if GATED:
        y = y / (1 + tl.exp(-y)) * up
    if RESIDUAL:
        y += tl.load(residual_ptr + rows).to(tl.float32)
    tl.store(y_ptr + rows, y.to(y_ptr.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def put_rows(y, residual_ptr, y_ptr, rows, columns, M, N: tl.constexpr, RESIDUAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a block of a product (M, N), with what it is added to."""
    at = rows[:, None].to(tl.int64) * N + columns[None, :]
    kept = (rows < M)[:, None] & (columns < N)[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=kept, other=0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=kept)
