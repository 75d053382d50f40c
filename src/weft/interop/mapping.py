"""One set of weights under two sets of names: a table of rules that is read in both directions, tensor by tensor.

A rule gives weft's name of a tensor, the name (or names, joined along the rows) that it has elsewhere, and the form
it has there. `{layer}` stands for a block's number. A table may hold rules for tensors that a model does not have
(biases, an output table of its own): the model's config decides which apply. Nothing is read before it is asked for.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import torch
from torch import Tensor

from weft.errors import InteropError
from weft.interop.loaded import Weights
from weft.models.build import build
from weft.models.config import Decoder, Encoder, EncoderDecoder, Model
from weft.nn.init import empty_weights

Shape = tuple[int, ...]


# ---- forms: how a tensor lies elsewhere


class Form(Protocol):
    """A tensor's other form. `to_ours` and `to_theirs` undo each other bit by bit."""

    def shape(self, ours: Shape) -> Shape:
        """The shape elsewhere of a tensor that has the shape `ours` here."""

    def to_ours(self, theirs: Tensor) -> Tensor: ...

    def to_theirs(self, ours: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Same:
    """As it is here."""

    def shape(self, ours: Shape) -> Shape:
        return ours

    def to_ours(self, theirs: Tensor) -> Tensor:
        return theirs

    def to_theirs(self, ours: Tensor) -> Tensor:
        return ours


@dataclass(frozen=True)
class Transposed:
    """Matrices as (in, out) instead of (out, in); vectors as they are."""

    def shape(self, ours: Shape) -> Shape:
        return ours[::-1]

    def to_ours(self, theirs: Tensor) -> Tensor:
        return theirs.mT.contiguous() if theirs.dim() == 2 else theirs

    def to_theirs(self, ours: Tensor) -> Tensor:
        return ours.mT.contiguous() if ours.dim() == 2 else ours


@dataclass(frozen=True)
class OneRow:
    """A vector as a matrix of one row."""

    def shape(self, ours: Shape) -> Shape:
        return (1, *ours)

    def to_ours(self, theirs: Tensor) -> Tensor:
        return theirs[0]

    def to_theirs(self, ours: Tensor) -> Tensor:
        return ours[None]


@dataclass(frozen=True)
class AdjacentPairs:
    """Rows of queries or keys ordered for rotary pairs that are neighbours, where here the pairs are two halves.

    Row 2i of a head is there what row i is here, and row 2i + 1 what row d_head/2 + i is (Su et al. 2021, §3.4.2).
    """

    d_head: int

    def shape(self, ours: Shape) -> Shape:
        return ours

    def to_ours(self, theirs: Tensor) -> Tensor:
        pairs = theirs.unflatten(0, (-1, self.d_head // 2, 2))
        return pairs.transpose(1, 2).reshape(theirs.shape)

    def to_theirs(self, ours: Tensor) -> Tensor:
        halves = ours.unflatten(0, (-1, 2, self.d_head // 2))
        return halves.transpose(1, 2).reshape(ours.shape)


SAME, TRANSPOSED, ONE_ROW = Same(), Transposed(), OneRow()


# ---- rules


@dataclass(frozen=True)
class Rule:
    """weft's name of a tensor; its names elsewhere, in the order of the rows; a form for each of them."""

    ours: str
    theirs: tuple[str, ...]
    forms: tuple[Form, ...]


def rule(ours: str, *theirs: str, form: Form = SAME, forms: tuple[Form, ...] | None = None) -> Rule:
    """A rule whose parts all have one `form`, or each its own of `forms`."""
    forms = forms or (form,) * len(theirs)
    assert len(forms) == len(theirs) > 0, ours
    return Rule(ours, theirs, forms)


def both(ours: str, *theirs: str, form: Form = SAME, forms: tuple[Form, ...] | None = None) -> tuple[Rule, Rule]:
    """Rules for the weight and the bias of a layer."""
    weight, bias = (
        rule(f"{ours}.{kind}", *(f"{name}.{kind}" for name in theirs), form=form, forms=forms)
        for kind in ("weight", "bias")
    )
    return weight, bias


# ---- a table, for one model


@dataclass(frozen=True)
class Part:
    """A tensor elsewhere: rows `start` … `stop` of one of ours, in another form."""

    name: str
    shape: Shape
    start: int
    stop: int
    form: Form


@dataclass(frozen=True)
class Conversion:
    """A tensor here, and what it consists of elsewhere."""

    name: str
    shape: Shape
    parts: tuple[Part, ...]

    def to_ours(self, read: Callable[[str], Tensor]) -> Tensor:
        """Our tensor, from a function that reads theirs by name."""
        parts = [part.form.to_ours(read(part.name)) for part in self.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def to_theirs(self, ours: Tensor) -> dict[str, Tensor]:
        """All of their tensors, from ours."""
        return {part.name: part.form.to_theirs(ours[part.start : part.stop]) for part in self.parts}


def shapes(model: Model) -> dict[str, Shape]:
    """Every tensor of a model with its shape, without making it."""
    with empty_weights():
        return {name: tuple(tensor.shape) for name, tensor in build(model).state_dict().items()}


def conversions(rules: Iterable[Rule], model: Model) -> list[Conversion]:
    """The rules that apply to `model`, layer by layer. Every tensor of the model is covered exactly once."""
    ours = shapes(model)
    made: dict[str, Conversion] = {}
    for each in rules:
        for layer in count() if "{layer}" in each.ours else range(1):
            name = each.ours.replace("{layer}", str(layer))
            if name not in ours:
                break
            assert name not in made, f"two rules for {name}"
            theirs = [part.replace("{layer}", str(layer)) for part in each.theirs]
            rows = _sections(name, model, len(theirs), ours[name])
            starts = [sum(rows[:place]) for place in range(len(rows))]
            made[name] = Conversion(
                name,
                ours[name],
                tuple(
                    Part(part, form.shape((length, *ours[name][1:])), start, start + length, form)
                    for part, form, start, length in zip(theirs, each.forms, starts, rows, strict=True)
                ),
            )
    unnamed = [name for name in ours if name not in made]
    if unnamed:
        raise InteropError(f"{unnamed[0]} {list(ours[unnamed[0]])}: this format has no place for it")
    return [made[name] for name in ours]


def _sections(name: str, model: Model, parts: int, shape: Shape) -> list[int]:
    """How many rows of our tensor each of their `parts` holds."""
    if parts == 1:
        return [shape[0]]
    assert isinstance(model, Decoder | Encoder | EncoderDecoder), "only Transformers join matrices"
    queries, keys = model.attention.heads * model.d_head, model.attention.groups * model.d_head
    layer = name.split(".")[-2]
    rows = {"qkv": [queries, keys, keys], "kv": [keys, keys], "gate_up": [model.feedforward.d_ff] * 2}[layer]
    assert len(rows) == parts and sum(rows) == shape[0], name
    return rows


# ---- reading and writing by a table


def to_ours(
    table: Iterable[Conversion], found: Mapping[str, Shape], read: Callable[[str], Tensor], where: str
) -> Weights:
    """Our weights, each read from theirs when it is asked for.

    `found` holds the names and shapes of what `where` stores and must name all of it; `read` gives one tensor.
    What is missing, left over or of another shape is an error that names it.
    """
    table = list(table)
    parts = {part.name: part for conversion in table for part in conversion.parts}
    missing = [name for name in parts if name not in found]
    if missing:
        raise InteropError(f"{where}: '{missing[0]}' {list(parts[missing[0]].shape)} is missing{_and_others(missing)}")
    extra = [name for name in found if name not in parts]
    if extra:
        raise InteropError(
            f"{where}: '{extra[0]}' {list(found[extra[0]])} has no place in this model{_and_others(extra)}"
        )
    for name, part in parts.items():
        if tuple(found[name]) != part.shape:
            raise InteropError(f"{where}: '{name}' is {list(found[name])}; the settings ask for {list(part.shape)}")
    return {conversion.name: _reader(conversion, read) for conversion in table}


def _reader(conversion: Conversion, read: Callable[[str], Tensor]) -> Callable[[], Tensor]:
    return lambda: conversion.to_ours(read)


def to_theirs(table: Iterable[Conversion], weights: Weights) -> Weights:
    """Their weights, each made from ours when it is asked for; their shapes stand in the table's parts."""
    return {part.name: _writer(part, weights[conversion.name]) for conversion in table for part in conversion.parts}


def _writer(part: Part, ours: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: part.form.to_theirs(ours()[part.start : part.stop])


def _and_others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
