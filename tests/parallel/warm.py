"""Imports that every process of `in_processes` needs, made once by the server that they are forked from."""

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

small()  # pydantic builds its validators when a recipe is first read
