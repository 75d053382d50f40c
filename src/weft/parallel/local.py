"""A split model that is only used from here on: plain tensors, and a sum after each product that is split by rows.

DTensor works out at every product what has to travel, and a step of one token would spend most of its time on that.
Without gradients it is known once the model is split: this process's part of each matrix, and what to sum.
"""

from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from weft.models.base import LanguageModel
from weft.nn.dropout import RowRng
from weft.nn.init import empty_weights
from weft.nn.linear import Linear
from weft.parallel.mesh import Mesh
from weft.parallel.plan import placement, plan
from weft.parallel.ranks import Ranks


def keep_local(model: LanguageModel, mesh: Mesh) -> None:
    """Let a model that `tensor.split` has split over a mesh's tensor axis go without DTensor, once it has its weights.

    Its processes then have to choose the same tokens. They get the same logits, to the bit, but a GPU adds up
    probabilities in an order of its own each time: what the first process chooses is what all go on with.
    """
    ranks, patterns = mesh.axis("tensor"), plan(model.config)
    for name, module in list(model.named_modules()):
        for key, parameter in list(module.named_parameters(recurse=False)):
            here = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            module.register_parameter(key, nn.Parameter(here.detach(), requires_grad=False))
        match placement(name, patterns), module:
            case "column", Linear():
                model.set_submodule(name, LocalLinear(module))
            case "row", Linear():
                model.set_submodule(name, RowLinear(module, ranks))
            case "word", nn.Embedding():
                model.set_submodule(name, WordEmbedding(module, ranks))
    model.peers = mesh.world


class LocalLinear(Linear):
    """A linear layer over the same weights, without what torch has hung around it."""

    def __init__(self, linear: Linear):
        with empty_weights():
            super().__init__(linear.in_features, *linear.heights, bias=linear.bias is not None)
        self.weight, self.bias = linear.weight, linear.bias


class RowLinear(LocalLinear):
    """(…, inputs) of which this process has a part → (…, outputs)."""

    def __init__(self, linear: Linear, ranks: Ranks):
        super().__init__(linear)
        self.ranks = ranks

    def forward(self, x: Tensor, rng: RowRng | None = None) -> Tensor:
        """The sum over the processes, and the bias."""
        total = F.linear(x, self.weight)
        distributed.all_reduce(total, group=self.ranks.group)
        return total if self.bias is None else total + self.bias


class WordEmbedding(nn.Embedding):
    """tokens (batch, time) → (batch, time, d_model); each token's row is in one process, and the others add zeros."""

    def __init__(self, table: nn.Embedding, ranks: Ranks):
        with empty_weights():
            super().__init__(table.num_embeddings, table.embedding_dim)
        self.weight, self.ranks = table.weight, ranks
        self.first = ranks.rank * -(-table.num_embeddings // ranks.ranks)

    def forward(self, tokens: Tensor) -> Tensor:
        """The rows, wherever they are."""
        own = tokens - self.first
        elsewhere = (own < 0) | (own >= self.weight.shape[0])
        found = F.embedding(own.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        distributed.all_reduce(found, group=self.ranks.group)
        return found
