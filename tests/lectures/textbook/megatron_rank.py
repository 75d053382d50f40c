"""A process of test_megatron.py: `python megatron_rank.py FOLDER RANK RANKS`.

It reads whole weights and an input from the folder, and writes its outputs, gradients and collectives there.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

# all communication functions of torch.distributed
COMMUNICATION = ["all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"]
COMMUNICATION += ["all_to_all", "all_to_all_single", "broadcast", "reduce", "gather", "scatter", "barrier"]
COMMUNICATION += ["send", "recv", "isend", "irecv", "batch_isend_irecv"]
calls: list[str] = []


def recorded(name: str) -> Callable[..., Any]:
    """Function of torch.distributed with this name that records its calls."""
    function = getattr(distributed, name)

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    return record


for name in COMMUNICATION:
    setattr(distributed, name, recorded(name))
folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
path = Path(__file__).parents[3] / "lectures" / "megatron.py"
spec = importlib.util.spec_from_file_location("megatron", path)
assert spec is not None and spec.loader is not None
megatron = importlib.util.module_from_spec(spec)
spec.loader.exec_module(megatron)
distributed.init_process_group("gloo", init_method=f"file://{folder}/store-{ranks}", rank=rank, world_size=ranks)
given, found = torch.load(folder / "given.pt"), {}
for name, (width, other) in {"ffn": given["ffn sizes"], "attention": given["attention sizes"]}.items():
    layer = {"ffn": megatron.FFN, "attention": megatron.Attention}[name](width, other, ranks).double()
    weights = given[f"{name} weights"].items()
    layer.load_state_dict({key: megatron.part(f"layer.{key}", weight, rank, ranks) for key, weight in weights})
    x = given["x"].clone().requires_grad_()
    calls.clear()
    z = layer(x)
    forward = calls.copy()
    calls.clear()
    (z * given["upstream"]).sum().backward()
    gradients = {key: weight.grad for key, weight in layer.named_parameters()}
    found[name] = {"z": z.detach(), "x": x.grad, "gradients": gradients, "collectives": [forward, calls.copy()]}
found["all-reduces"] = dict(megatron.ALL_REDUCES)
torch.save(found, folder / f"found-{rank}-{ranks}.pt")
distributed.destroy_process_group()
