"""The processes of a run as a mesh with named axes (`weft.layout`), and who shares what with whom along them."""

from dataclasses import dataclass, replace

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft.layout import AXES, Layout
from weft.parallel.ranks import ALONE, PATIENCE, Ranks

ONE = Layout(replicate=1)


@dataclass(frozen=True)
class Mesh:
    """All processes, `world`, in a `layout` with nothing left open. One process has no DeviceMesh.

    `devices` has the axes pipeline, replicate, shard and tensor. Those that divide a row among them (context) hold the
    same weights, so they also share them: its shard axis runs over them too. `readers` read different rows of a batch,
    `counters` different tokens of it, so that what they count is summed. What is said on `beside` doesn't mix with what
    the passes say: checkpoints are written while these go on.
    """

    layout: Layout = ONE
    world: Ranks = ALONE
    devices: DeviceMesh | None = None
    readers: Ranks = ALONE
    counters: Ranks = ALONE
    context: Ranks = ALONE
    beside: Ranks = ALONE

    @property
    def splits(self) -> bool:
        """Whether a process holds or reads less than all of a model and a row."""
        return self.layout.splits

    def axis(self, name: str) -> Ranks:
        """This process among those along one axis of `devices`."""
        return ALONE if self.devices is None else _ranks(self.devices[name])

    def part(self, *names: str) -> DeviceMesh:
        """The DeviceMesh along some axes."""
        assert self.devices is not None
        return self.devices[names]


SINGLE = Mesh()


def build(layout: Layout, world: Ranks, device: torch.device) -> Mesh:
    """The mesh of all processes; a layout that doesn't come out at their number is refused."""
    layout = layout.over(world.ranks)
    if world.alone:
        return Mesh(layout)
    sizes = layout.sizes
    shape = {**sizes, "shard": sizes["shard"] * sizes["context"]}
    del shape["context"]
    devices = init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    counters = _ranks(devices["replicate", "shard"]._flatten("counters"))
    beside = replace(world, group=distributed.new_group(backend="gloo", timeout=PATIENCE))
    if layout.context == 1:
        return Mesh(layout, world, devices, counters, counters, beside=beside)
    fine = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=AXES)
    readers = _ranks(fine["replicate", "shard"]._flatten("readers"))
    return Mesh(layout, world, devices, readers, counters, _ranks(fine["context"]), beside)


def _ranks(line: DeviceMesh) -> Ranks:
    return Ranks(line.get_local_rank(), line.size(), line.get_group()) if line.size() > 1 else ALONE
