"""Several ranks simulated in one process, and a meter for what they compute and send.

torch's `LocalTensorMode` runs every operation once per rank, on that rank's shards, and carries out the collectives
between them. Values are those of real processes, but no socket is opened and nothing can wait forever. The collectives
are those of GPUs: with Gloo, an all-gather replaces the all-to-all.
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

try:  # private modules, which torch may rename
    from torch._guards import active_fake_mode
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore
except ImportError:
    SIMULATES = False
else:
    SIMULATES = True

# torch's operation → name of the collective
COLLECTIVES = {
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "shard_dim_alltoall": "all-to-all",
}


class Collective(NamedTuple):
    """Collective of one kind, with the number of elements that each rank contributes."""

    kind: str
    elements: int

    def sent(self, ranks: int) -> float:
        """Return the elements that each rank sends around a ring (Thakur et al. 2005, §4)."""
        match self.kind:
            case "all-reduce":  # a reduce-scatter, then an all-gather
                return 2 * (ranks - 1) / ranks * self.elements
            case "all-gather":  # its slice, to all others
                return (ranks - 1) * self.elements
            case _:  # all but its share
                return (ranks - 1) / ranks * self.elements


class Meter(CommDebugMode):
    """Count collectives as CommDebugMode does, with their sizes, and the operations of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.get_total_counts()
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is NotImplemented:  # an operation on DTensors: those on their shards follow
            return out
        packet = func._overloadpacket
        if active_fake_mode() is not None:  # DTensor infers a shape; nothing is computed
            return out
        if self.get_total_counts() > before:
            self.collectives.append(Collective(COLLECTIVES[packet.__name__], args[0].numel()))
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        return out


@contextmanager
def simulated(ranks: int) -> Iterator[DeviceMesh]:
    """Yield a mesh of this many simulated ranks."""
    if not SIMULATES:
        raise ModelError(f"torch {torch.__version__} can't simulate several ranks in one process; 2.11 to 2.13 can")
    if distributed.is_initialized():
        raise ModelError("ranks are simulated in a process that has not joined others; start weft without torchrun")
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with LocalTensorMode(ranks):
            yield init_device_mesh("cpu", (ranks,))
    finally:
        distributed.destroy_process_group()


def gathered(tensor: Any) -> Tensor:
    """Return the full tensor of a DTensor, after checking that all ranks agree."""
    full: Tensor = tensor.detach().full_tensor()
    return full.reconcile() if isinstance(full, LocalTensor) else full  # plain if no rank changed it
