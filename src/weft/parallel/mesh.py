"""The processes of a run as a mesh with named axes (`weft.layout`), and which of them share data along them."""

from dataclasses import dataclass, replace

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft.layout import AXES, Layout
from weft.parallel.ranks import ALONE, TIMEOUT, Ranks

ONE = Layout(replicate=1)


@dataclass(frozen=True)
class Mesh:
    """All processes, `world`, in a fully specified `layout`. A single process has no DeviceMesh.

    `devices` has the axes pipeline, replicate, shard, experts and tensor. Ranks of the context axis divide the tokens
    of a row and hold the same weights, so the shard axis of `devices` spans them as well.
    """

    layout: Layout = ONE
    world: Ranks = ALONE
    devices: DeviceMesh | None = None
    readers: Ranks = ALONE  # they read different rows of a batch
    counters: Ranks = ALONE  # they read different tokens of it: their counts and losses are summed
    context: Ranks = ALONE
    stage: Ranks = ALONE  # they hold the same layers, a pipeline's stage or all
    checkpoints: Ranks = ALONE  # with a group for checkpoints, whose messages must not mix with those of the passes

    @property
    def is_sharded(self) -> bool:
        """Whether a process holds less than the whole model, or reads less than whole rows."""
        return self.layout.splits

    def axis(self, name: str) -> Ranks:
        """Return this process's rank along one axis of `devices`."""
        return ALONE if self.devices is None else _ranks(self.world, self.devices[name])

    def submesh(self, *names: str) -> DeviceMesh:
        assert self.devices is not None
        return self.devices[names]


SINGLE = Mesh()


def build(layout: Layout, world: Ranks, device: torch.device) -> Mesh:
    """Return the mesh of all processes; refuse a layout whose sizes do not multiply to their number."""
    layout = layout.over(world.ranks)
    if world.alone:
        return Mesh(layout)
    sizes = layout.sizes
    shape = {**sizes, "shard": sizes["shard"] * sizes["context"]}
    del shape["context"]
    devices = init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    counters = _ranks(world, devices["replicate", "shard", "experts"]._flatten("counters"))
    checkpoints = replace(world, group=distributed.new_group(backend="gloo", timeout=TIMEOUT))
    mesh = Mesh(layout, world, devices, readers=counters, counters=counters, stage=world, checkpoints=checkpoints)
    if layout.pipeline > 1:
        mesh = replace(mesh, stage=_ranks(world, devices["replicate", "shard", "experts", "tensor"]._flatten("stage")))
    if layout.context > 1:
        fine = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=AXES)
        readers = _ranks(world, fine["replicate", "shard"]._flatten("readers"))
        mesh = replace(mesh, readers=readers, context=_ranks(world, fine["context"]))
    return mesh


def _ranks(world: Ranks, axis: DeviceMesh) -> Ranks:
    if axis.size() == 1:
        return ALONE
    return replace(world, rank=axis.get_local_rank(), ranks=axis.size(), group=axis.get_group())
