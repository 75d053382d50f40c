"""Expert parallelism: the experts of every mixture divided over processes, which read different rows of a batch.

A process routes its own tokens, sends each to the processes that hold its experts, and receives the outputs: two
all-to-alls per layer in the forward pass and two in the backward pass (Lepikhin et al. 2021, §3.2). All other weights
are replicated. A process receives the tokens of an expert in the order of the ranks, which is that of the rows in one
process: products sum the same terms.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as comms
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from weft.nn.experts import ExpertLayers, Reordered
from weft.parallel.ranks import Ranks


@dataclass(frozen=True)
class Exchange:
    """Sends rows to the processes that hold their experts, and the experts' outputs back."""

    ranks: Ranks

    def local(self, weight: Tensor) -> Tensor:
        """Part of a weight that this process holds, with its gradient."""
        return cast(DTensor, weight).to_local()

    def __call__(self, x: Tensor, ends: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Rows (rows, d_model) sorted by expert, with the `ends` (experts,) of the experts' rows → (rows, d_model).
        `compute` is the same function of the rows and experts of one process."""
        ranks, group = self.ranks.ranks, self.ranks.group
        counts = ends.diff(prepend=ends.new_zeros(1))
        each = [len(counts) // ranks] * ranks
        arriving = self.ranks.all_to_all(counts, each, each).view(ranks, -1)  # (ranks, local experts)
        sent, received = counts.view(ranks, -1).sum(1).tolist(), arriving.sum(1).tolist()
        numbers = torch.arange(arriving.shape[1], device=x.device).repeat(ranks)
        order = numbers.repeat_interleave(arriving.flatten()).argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        rows = Reordered.apply(comms.all_to_all_single_autograd(x, received, sent, group), order, inverse)
        outputs = compute(rows, arriving.sum(0).cumsum(0).to(ends.dtype))
        return comms.all_to_all_single_autograd(Reordered.apply(outputs, inverse, order), sent, received, group)


def divide(model: nn.Module, mesh: DeviceMesh, ranks: Ranks) -> list[str]:
    """Shard the weights of all experts by expert; return their names."""
    names = []
    for prefix, part in model.named_modules():
        if isinstance(part, ExpertLayers):
            part.exchange = Exchange(ranks)
            for name, weight in list(part.named_parameters(recurse=False)):
                held = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
                part.register_parameter(name, nn.Parameter(held, weight.requires_grad))
                names.append(f"{prefix}.{name}")
    return names
