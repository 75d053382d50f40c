"""Quantized weights that are kept with a run, so that the next start maps a file instead of rounding again.

RUN/quantized/int4.safetensors holds all that a quantized model needs, as `Packed` has it; int4.json beside it holds
its hash, and what it was made from: the checkpoint's weights, the settings and the version of the rounding. A
file that was made from something else, or was damaged, is made again. Where it can't be written, nothing is kept.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from weft.data import shards
from weft.decode.fast.quantize import fill, quantize
from weft.decode.fast.quantized_weights import Bits
from weft.errors import WeftError
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.transformer import Transformer
from weft.nn.init import empty_weights
from weft.recipe.config import Recipe
from weft.runs import checkpoint
from weft.runs.folder import RunFolder
from weft.storage import files, tensors
from weft.training.weights import check_base, fill_model, written_in

FORMAT = 1  # of the layout and of the rounding; raise it when either changes


class QuantizedRun:
    """A run whose best weights are wanted in fewer bits, on a device and beside tables of a type (None: the run's)."""

    def __init__(self, run: RunFolder, device: torch.device, dtype: torch.dtype | None = None):
        self.run, self.device, self.dtype = run, device, dtype
        self.recipe: Recipe = run.recipe()

    def load(self, path: Path, bits: Bits) -> LanguageModel:
        """A checkpoint's model in so many bits, ready to use: the kept one, or one that is made and kept now."""
        made_from = self.made_from(path)
        model = self._kept(bits, made_from)
        if model is None:
            model, made = self.make(path, bits)
            self.keep(bits, made_from, made)
        return model

    def plain(self, path: Path) -> LanguageModel:
        """A checkpoint's model as it is without quantization."""
        model = fill_model(self.run, self.recipe, path, self.device)
        if isinstance(model, Transformer):
            model.to(self.dtype or written_in(self.recipe, model, self.device))
        return model

    def make(self, path: Path, bits: Bits) -> tuple[LanguageModel, dict[str, Tensor]]:
        """A checkpoint's model in so many bits, and all that it holds, to be kept."""
        made: dict[str, Tensor] = {}
        return quantize(self.plain(path), bits, made), made

    def made_from(self, path: Path) -> str:
        """What decides the quantized weights of a checkpoint, hashed; its files are there, but are not read."""
        sums, base = checkpoint.manifest_of(path)["files"]["model.safetensors"]["sha256"], None
        if self.recipe.adapter is not None:
            check_base(self.run, self.recipe, checkpoint.complete)
            base = files.read_text(self.run.base)
        settings = self.recipe.model_dump(mode="json", include={"model", "adapter", "precision"})
        found = FORMAT, sums, base, settings, str(self.dtype)
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()

    def keep(self, bits: Bits, made_from: str, made: Mapping[str, Tensor]) -> None:
        """Write what was made beside the run's checkpoints, if that is possible."""
        place = self._place(bits)
        if place.parent.is_symlink() or (bits == "bf16" and made["embedding.weight"].dtype == torch.bfloat16):
            return  # not outside the run; and not what the checkpoint holds anyway
        with suppress(OSError, SafetensorError):
            with files.replacing(place) as file:
                tensors.save(Path(file.name), {name: each.cpu() for name, each in made.items()})
            note = {"made_from": made_from, "sha256": shards.sha256(shards.file_blocks(place))}
            files.write_text(place.with_suffix(".json"), json.dumps(note, indent=1))

    def _kept(self, bits: Bits, made_from: str) -> LanguageModel | None:
        """The model from the file that was made from the same; None where there is none, or one that is damaged."""
        place = self._place(bits)
        note = checkpoint.read_json(place.with_suffix(".json"))
        if note.get("made_from") != made_from:
            return None
        with empty_weights():
            model = build(self.recipe.model)
        assert isinstance(model, Transformer), "nothing else is quantized"
        try:
            shards.verify(place.parent, {place.name: note["sha256"]})
            fill(model, bits, {name: each.to(self.device) for name, each in tensors.each(place)})
        except (WeftError, ValueError, LookupError):
            return None
        return model

    def _place(self, bits: Bits) -> Path:
        """On a GPU weights are rounded from 16 bits, and differ."""
        name = bits if self.device.type == "cpu" else f"{bits}-{self.device.type}"
        return self.run.quantized / f"{name}.safetensors"
