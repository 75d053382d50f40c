"""One of the processes of test_megatron.py: `python megatron_rank.py FOLDER RANK RANKS`.

It reads whole weights and an input from the folder, and leaves its outputs, gradients and collectives there.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.tensor.debug import CommDebugMode

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
    with CommDebugMode() as forward:
        z = layer(x)
    with CommDebugMode() as backward:
        (z * given["upstream"]).sum().backward()
    counts = [{str(kind): count for kind, count in mode.get_comm_counts().items()} for mode in (forward, backward)]
    gradients = {key: weight.grad for key, weight in layer.named_parameters()}
    found[name] = {"z": z.detach(), "x": x.grad, "gradients": gradients, "collectives": counts}
found["meetings"] = dict(megatron.MEETINGS)
torch.save(found, folder / f"found-{rank}-{ranks}.pt")
distributed.destroy_process_group()
