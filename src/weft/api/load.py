"""A run's folder, opened as a `Run`."""

from pathlib import Path

import torch

from weft.api.auto import check_width, load_quantized
from weft.api.run import Run
from weft.data.shards import noted_tokenizer
from weft.errors import ConfigError
from weft.models.transformer import Transformer
from weft.parallel.ranks import ALONE, Ranks
from weft.progress import warn
from weft.runs.folder import changed_files, open_run
from weft.text.tokenizer import Tokenizer
from weft.training.precision import pick_device
from weft.training.weights import load_model, written_in


def load(
    run: Path | str,
    device: torch.device | str | None = None,
    *,
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
    ranks: Ranks = ALONE,
) -> Run:
    """A run's model with its best weights, and its tokenizer. Damaged checkpoints are passed over, with a warning.

    `dtype` is what a Transformer's weights are kept in. By default that is float32, but 16 bits on a GPU for one that
    writes and that learned in bf16 or fp8, or came in 16 bits: writing reads every weight for every token. With
    `quantize` ('bf16', 'int8', 'int4', or 'auto' for what is fastest at 1 % of loss) they have that many bits, and stay
    in the run's folder for the next time. Several `ranks` divide the model's matrices among them (Shoeybi et al. 2019);
    all of them call this, and then use the model in the same way at the same time.
    """
    width = None
    if quantize is not None:
        check_width(quantize)
        if not ranks.alone:
            raise ConfigError(f"quantize = {quantize!r}: not for a model that several processes divide")
    with ranks.leader_first():  # what is wrong with a run, the first process finds
        folder = open_run(run)
        recipe = folder.recipe()
    device = torch.device(device or pick_device())
    if quantize is not None:
        model, damage, width = load_quantized(folder, device, dtype, quantize)
    elif ranks.alone:
        model, damage = load_model(folder, device=device)
        if isinstance(model, Transformer):
            model.to(dtype or written_in(recipe, model, device))
    else:
        from weft.training import split  # loads torch's own ways to split a model

        model, damage = split.load_part(folder, ranks, device, dtype)
    for line in (*changed_files(folder), *damage) if ranks.leads else ():
        warn(line)
    with ranks.leader_first():
        loaded = Run(folder.path, recipe, model, Tokenizer.load(folder.path), width)
        loaded.objective.check_tokenizer(noted_tokenizer(folder.data))
    return loaded
