"""Quantised weights stored with a run, so that the next start maps a file instead of quantising again.

RUN/quantized/int4.safetensors holds all tensors of a quantised model, as `Packed` has them; int4.json next to it holds
its hash and that of its origin: the checkpoint's weights, the settings and the version of the rounding. A file with
another origin, or a damaged one, is written again. If it can't be written, nothing is stored.
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
from weft.training.weights import check_base, fill_model, inference_dtype

FORMAT = 1  # version of the layout and of the rounding; raise it when either changes


class QuantizedRun:
    """A run whose weights are quantised for a device, next to embeddings of `dtype` (None: as the run says)."""

    def __init__(self, run: RunFolder, device: torch.device, dtype: torch.dtype | None = None):
        self.run, self.device, self.dtype = run, device, dtype
        self.recipe: Recipe = run.recipe()

    def load(self, path: Path, bits: Bits) -> LanguageModel:
        """Return a checkpoint's model in `bits`: the stored one, or one that is quantised and stored now."""
        origin = self.origin(path)
        model = self._stored(bits, origin)
        if model is None:
            model, weights = self.quantize(path, bits)
            self.store(bits, origin, weights)
        return model

    def plain(self, path: Path) -> LanguageModel:
        """Return a checkpoint's model without quantisation."""
        model = fill_model(self.run, self.recipe, path, device=self.device)
        if isinstance(model, Transformer):
            model.to(self.dtype or inference_dtype(self.recipe, model, self.device))
        return model

    def quantize(self, path: Path, bits: Bits) -> tuple[LanguageModel, dict[str, Tensor]]:
        """Quantise a checkpoint's model; return it, and all its tensors to be stored."""
        weights: dict[str, Tensor] = {}
        return quantize(self.plain(path), bits, weights), weights

    def origin(self, path: Path) -> str:
        """Return the hash of everything that determines a checkpoint's quantised weights, without reading them."""
        sums, base = checkpoint.manifest_of(path)["files"]["model.safetensors"]["sha256"], None
        if self.recipe.adapter is not None:
            check_base(self.run, self.recipe, checkpoint.complete)
            base = files.read_text(self.run.base)
        settings = self.recipe.model_dump(mode="json", include={"model", "adapter", "precision"})
        determined = FORMAT, sums, base, settings, str(self.dtype)
        return hashlib.sha256(json.dumps(determined, sort_keys=True).encode()).hexdigest()

    def store(self, bits: Bits, origin: str, weights: Mapping[str, Tensor]) -> None:
        """Write quantised weights into the run's folder, if possible."""
        path = self._path(bits)
        if path.parent.is_symlink() or (bits == "bf16" and weights["embedding.weight"].dtype == torch.bfloat16):
            return  # not outside the run, and not what the checkpoint holds anyway
        with suppress(OSError, SafetensorError):
            with files.replacing(path) as file:
                tensors.save(Path(file.name), {name: tensor.cpu() for name, tensor in weights.items()})
            note = {"made_from": origin, "sha256": shards.sha256(shards.file_blocks(path))}
            files.write_text(path.with_suffix(".json"), json.dumps(note, indent=1))

    def _stored(self, bits: Bits, origin: str) -> LanguageModel | None:
        """Return the stored model with this origin; None if there is none, or if it is damaged."""
        path = self._path(bits)
        note = checkpoint.read_json(path.with_suffix(".json"))
        if note.get("made_from") != origin:
            return None
        with empty_weights():
            model = build(self.recipe.model)
        assert isinstance(model, Transformer), "nothing else is quantised"
        try:
            shards.verify(path.parent, {path.name: note["sha256"]})
            fill(model, bits, {name: tensor.to(self.device) for name, tensor in tensors.iterate(path)})
        except (WeftError, ValueError, LookupError):
            return None
        return model

    def _path(self, bits: Bits) -> Path:
        """Return the file of a width; weights for a GPU are quantised from 16 bits, and differ."""
        name = bits if self.device.type == "cpu" else f"{bits}-{self.device.type}"
        return self.run.quantized / f"{name}.safetensors"
