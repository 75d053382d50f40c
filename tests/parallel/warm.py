"""What each process of `together` would do first; the server that they are forked from does it once."""

import torch._dynamo
import torch.distributed.tensor.debug
import torch.distributed.tensor.parallel  # noqa: F401
from tests.training.small import small

import weft.api.load
import weft.api.train
import weft.cli.generate
import weft.cli.main
import weft.parallel.apply
import weft.parallel.pipeline
import weft.training.sharded  # noqa: F401

small()  # pydantic builds what reads a recipe when one is first read
