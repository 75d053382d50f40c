"""Load a run's folder as a `Run`, its weights in the requested dtype or width."""

from functools import partial
from pathlib import Path

import torch

from weft.api.arguments import checked
from weft.api.auto_width import load_best_width
from weft.api.import_model import imported_run
from weft.api.run import Run
from weft.data.shards import tokenizer_note
from weft.decode.fast.quantize import check_bits
from weft.errors import ConfigError
from weft.interop.formats import recognises
from weft.machine import pick_device
from weft.models.transformer import Transformer
from weft.parallel.ranks import ALONE, Ranks
from weft.progress import log_to_stderr, warn
from weft.runs import checkpoint
from weft.runs.folder import RunFolder, changed_files, open_run
from weft.text.tokenizer import Tokenizer
from weft.training.quantized import QuantizedRun
from weft.training.weights import inference_dtype, load_model, model_at

AUTO = "auto"


@checked
def load(
    run: Path | str,
    device: torch.device | str | None = None,
    *,
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
    step: int | None = None,
    ranks: Ranks = ALONE,
) -> Run:
    """Load a run's model with its best weights, and its tokenizer; damaged checkpoints are skipped with a warning.

        weft.load("runs/book"), weft.load("path/to/SmolLM2"), weft.load("org/model"), weft.load("model.gguf")

    Another program's model, or one on the hub, is imported into weft's cache first; `weft import` imports it into a
    folder of your choice.

    `dtype` is the dtype of a Transformer's weights. The default is float32; on a GPU it is a 16-bit dtype for a model
    that generates text and was trained in bf16 or fp8, or imported in 16 bits, because every decode step reads all
    weights. `quantize` is the width of the weights: 'bf16', 'int8', 'int4', or 'auto' for the fastest that costs at
    most 1 % of the loss; quantised weights are kept in the run's folder. With `step`, the weights are those of that
    step's checkpoint, in full width; 0 is the model before its first step. Several `ranks` share the model by tensor
    parallelism (Shoeybi et al. 2019): all of them call this, and then use the model in the same way.
    """
    width: str | None = None
    if step is not None and (quantize is not None or not ranks.alone):
        raise ConfigError(f"step = {step}: a checkpoint is loaded in full width, by one process; leave the rest out")
    if quantize is not None:
        check_width(quantize)
        if not ranks.alone:
            raise ConfigError(f"quantize = {quantize!r}: not available for a model sharded over several processes")
    with ranks.leader_first():  # rank 0 reports what is wrong with a run
        if not RunFolder(run).config.is_file() and recognises(run):
            run = imported_run(run)
        folder = open_run(run)
        recipe = folder.recipe()
    device = _device(device)
    if quantize == AUTO:
        quantized = QuantizedRun(folder, device, dtype)
        (model, measured), damage = checkpoint.find(folder.checkpoints, "best", partial(load_best_width, quantized))
        log_to_stderr(f"weft: {measured.line}")
        width = None if measured.chosen == measured.plain else measured.chosen
    elif quantize is not None:
        quantized, bits = QuantizedRun(folder, device, dtype), check_bits(quantize)
        model, damage = checkpoint.find(folder.checkpoints, "best", lambda path: quantized.load(path, bits))
        width = bits
    elif ranks.alone:
        model, damage = load_model(folder, device=device) if step is None else (model_at(folder, step, device), [])
        if isinstance(model, Transformer):
            model.to(dtype or inference_dtype(recipe, model, device))
    else:
        from weft.training import sharded  # imports torch.distributed.tensor

        model, damage = sharded.load_shard(folder, ranks, device, dtype=dtype)
    for line in (*changed_files(folder), *damage) if ranks.leads else ():
        warn(line)
    with ranks.leader_first():
        loaded = Run(folder.path, recipe, model, tokenizer=Tokenizer.load(folder.path), quantized=width)
        loaded.objective.check_tokenizer(tokenizer_note(folder.data))
    return loaded


def _device(name: torch.device | str | None) -> torch.device:
    try:
        device = torch.device(name or pick_device())
    except (RuntimeError, TypeError):
        raise ConfigError(f"device = {name!r}: expected a device, such as 'cpu' or 'cuda'") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device = '{device}': torch sees no such GPU; `weft doctor` lists what there is")
    return device


def check_width(width: str) -> None:
    """Refuse a width that is neither one of the weights' nor 'auto'."""
    try:
        if width != AUTO:
            check_bits(width)
    except ConfigError as error:
        raise ConfigError(f"{error}; or 'auto', the fastest of them that costs at most 1% of the loss") from None
