"""Several processes simulated in this one, and a meter for what they compute and send.

torch's `LocalTensorMode` runs every operation once for each rank, on that rank's shards, and carries out the
collectives between them. The numbers are those of real processes, but no socket is opened and nothing waits forever.
The collectives are those of real processes too, on GPUs: Gloo has an all-gather in the place of an all-to-all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.flop_counter import flop_registry

from weft.errors import ModelError

try:  # none of these is public, and torch may rename them
    from torch._guards import active_fake_mode
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore
except ImportError:
    SIMULATES = False
else:
    SIMULATES = True

# torch's operation → the name that the field has for it
COLLECTIVES = {
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "shard_dim_alltoall": "all-to-all",
}


class Collective(NamedTuple):
    """One collective: what it is called, and how many numbers each process gives to it."""

    kind: str
    numbers: int

    def moved(self, ranks: int) -> float:
        """Numbers that each process sends, around a ring (Thakur et al. 2005, §4)."""
        match self.kind:
            case "all-reduce":  # a reduce-scatter, then an all-gather
                return 2 * (ranks - 1) / ranks * self.numbers
            case "all-gather":  # its own slice, to all others
                return (ranks - 1) * self.numbers
            case _:  # all but its own share
                return (ranks - 1) / ranks * self.numbers


class Meter(CommDebugMode):
    """Counts the collectives as CommDebugMode does, and notes their sizes and the operations of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation on the tensors of one process."""
        before = self.get_total_counts()
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is NotImplemented:  # an operation on DTensors: those on their shards follow
            return out
        packet = func._overloadpacket
        if active_fake_mode() is not None:  # DTensor asks for a result's shape, and nothing is computed
            return out
        if self.get_total_counts() > before:
            self.collectives.append(Collective(COLLECTIVES[packet.__name__], args[0].numel()))
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        return out


@contextmanager
def simulated(ranks: int) -> Iterator[DeviceMesh]:
    """A mesh of so many processes, all of them simulated in this one."""
    if not SIMULATES:
        raise ModelError(f"torch {torch.__version__} can't simulate several processes in one; 2.11 to 2.13 can")
    if distributed.is_initialized():
        raise ModelError(
            "several processes are simulated in one that has not joined others; start weft without torchrun"
        )
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with LocalTensorMode(ranks):
            yield init_device_mesh("cpu", (ranks,))
    finally:
        distributed.destroy_process_group()


def gathered(tensor: Any) -> Tensor:
    """The whole of a DTensor, once all processes are seen to have the same."""
    whole: Tensor = tensor.detach().full_tensor()
    return whole.reconcile() if isinstance(whole, LocalTensor) else whole  # what no process changed is a plain tensor
