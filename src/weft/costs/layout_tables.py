"""A search among layouts as tables, and as plain values."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from weft.costs.layout_memory import rank_memory
from weft.costs.layout_search import Search, why_not
from weft.costs.layout_time import Prediction
from weft.costs.layouts import Choice, Job
from weft.costs.memory import cache_bytes
from weft.costs.units import byte_size, plain, short
from weft.figures.tables import Table
from weft.layout import AXES, Layout

BEST = 3  # layouts that are shown as the best ones


def layouts_table(found: Search) -> Table:
    """The best layouts, and the best of each other kind with what speaks against it."""
    job, best = found.job, found.best
    top: list[Prediction] = []
    for each in found.fitting:
        if len(top) < BEST and all(each.choice.layout != other.choice.layout for other in top):
            top.append(each)
    fastest = found.free or best
    shown = [(each, why_not(each, fastest) if each is not fastest else "the fastest that fits") for each in top]
    if not top:
        shown.append((best, why_not(best, fastest)))
    if found.free is not None and found.free.choice.layout != best.choice.layout:
        shown.append((found.free, "the fastest of all" if found.free.fits else why_not(found.free, found.free)))
    shown += [(each, why_not(each, fastest)) for each in found.others() if each not in top]
    axes = [axis for axis in AXES if any(each.choice.layout.sizes[axis] > 1 for each, _ in shown)]
    net = job.net
    remarks = [
        f"{job.device.title}: {net.inside / 1e9:.4g} GB/s each way inside a machine of {net.machine:,}"
        + (f", {net.across / 1e9:.4g} GB/s a GPU between machines ({net.name})." if job.gpus > net.machine else "."),
        "seq: with parallel.sequence. rows: read at a time by one GPU (batch.micro). again: layers run again in the"
        " backward pass (batch.recompute). waits: communication that compute does not hide. Seconds are those of the"
        " slowest stage; in a pipeline it has the logits.",
    ]
    header = (*axes, "rows", "again", "memory", "compute", "waits", "bubble", "step", "MFU", "")
    title = f"{job.rows:,} × {job.length:,} tokens a step over {job.gpus:,} GPUs"
    spare = [header.index(name) for name in ("compute", "waits", "bubble", "MFU", "again")]
    rows = [_row(each, axes, why) for each, why in shown]
    return Table(header, rows, title, remarks, text=(len(header) - 1,), spare=spare)


def _row(each: Prediction, axes: Sequence[str], remark: str) -> tuple[str, ...]:
    time, choice = each.time, each.choice
    sizes = {axis: str(size) if size > 1 else "" for axis, size in choice.layout.sizes.items()}
    sizes["tensor"] += " seq" if choice.layout.sequence else ""
    waits = time.tensor + time.context + time.send + time.shard + time.replicate
    return (
        *(sizes[axis] for axis in axes),
        str(choice.micro),
        "yes" if choice.again else "",
        byte_size(each.memory.peak),
        _seconds(time.compute + time.update),
        _seconds(waits) if waits else "",
        f"{time.bubble / time.total:.0%}" if time.bubble else "",
        _seconds(time.total),
        f"{each.mfu:.0%}",
        remark,
    )


def _seconds(seconds: float) -> str:
    return f"{plain(seconds)} s" if seconds >= 1 else f"{plain(1e3 * seconds)} ms"


def device_table(best: Prediction) -> Table:
    """What the fullest device holds, how many sequences fit on one, and what generation takes."""
    job, memory, device = best.job, best.memory, best.job.device
    sizes = {
        "weights": memory.weights,
        "16-bit copies": memory.copies,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "logits": memory.logits,
        "passing through": memory.passing,
        "at the peak": memory.peak,
    }
    remarks = [f"{device.title} has {byte_size(device.memory)}: {_fits(best)}"]
    if not memory.accumulates:
        remarks.append("Gradients come as activations go; the peak has one or the other.")
    if cache := cache_bytes(job.model, job.precision):
        halves = 2 * job.cost.parameters
        remarks.append(
            f"Generation caches {byte_size(cache)} a token, {byte_size(cache * job.length)} for {job.length:,}."
            f" Each token reads {byte_size(halves)} of 16-bit weights,"
            f" so one sequence gets at most {short(device.bandwidth / halves)} tokens/s."
        )
    apiece = f", on each of {job.gpus:,} devices" if job.gpus > 1 else ""
    again = ", layers run again" if best.choice.again else ""
    title = f"{best.choice.micro} × {job.length:,} tokens at a time{apiece}{again}"
    rows = [(name, byte_size(size)) for name, size in sizes.items() if size]
    return Table(("memory", job.precision), rows, title, remarks)


def _fits(best: Prediction) -> str:
    """How many sequences fit at a time, or how many devices it takes."""
    job = best.job
    most = [_most(job, replace(best.choice, again=again)) for again in (0.0, 1.0)]
    if most[0]:
        return f"enough for about {most[0]:,} sequences at a time, {most[1]:,} with activation checkpointing."
    if most[1]:
        return f"enough for about {most[1]:,} sequences at a time, with activation checkpointing."
    for gpus in (1 << power for power in range(1, 15)):
        choice = Choice(Layout(replicate=1, shard=gpus), 1, 1.0)
        if gpus > job.gpus and rank_memory(replace(job, rows=gpus), choice).peak <= job.device.memory:
            return f"too little for even one sequence at a time; {gpus:,} could share it (--gpus)."
    return f"too little for one sequence of {job.length:,} tokens."


def _most(job: Job, choice: Choice) -> int:
    """The most sequences that one device can read at a time."""
    low, high, batches = 0, 1 << 14, choice.batches(job.rows)
    while low < high:
        middle = (low + high + 1) // 2
        larger = replace(job, rows=middle * choice.layout.readers * batches)
        fits = rank_memory(larger, replace(choice, micro=middle)).peak <= job.device.memory
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def layout_record(found: Search) -> dict[str, Any]:
    """The best layout and the others as plain values."""
    return {
        "best": _values(found.best, ""),
        "others": [_values(each, why_not(each, found.best)) for each in found.others()],
        "interconnect": {"name": found.job.net.name, "inside": found.job.net.inside, "across": found.job.net.across},
    }


def _values(each: Prediction, reason: str) -> dict[str, Any]:
    return {
        "layout": {**each.choice.layout.sizes, "sequence": each.choice.layout.sequence},
        "micro": each.choice.micro,
        "recompute": bool(each.choice.again),
        "memory_bytes": {**asdict(each.memory), "peak": each.memory.peak},
        "seconds": {**asdict(each.time), "step": each.time.total},
        "mfu": each.mfu,
        "fits": each.fits,
        "reason": reason,
    }
