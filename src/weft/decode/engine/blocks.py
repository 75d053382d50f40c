"""Where a model keeps what it has read of many texts that come and go: one interface for every family.

A Transformer's texts lie in the blocks of a pool (`nn/paging.py`), which they share where they begin alike. What other
models remember does not grow with the text, so their rows are simply kept side by side.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.decode.engine.paging import Blocks, PagedCache
from weft.decode.engine.pool import Key, Pool, Table
from weft.decode.engine.scheduler import can_join, join
from weft.decode.fast.engine_graphs import PagedStep
from weft.decode.generate import device_of
from weft.errors import ModelError
from weft.models.base import LanguageModel, Source, State
from weft.models.transformer import SourceCache, Transformer, TransformerState

HORIZON = 64  # tokens that rows side by side can read before their state is made anew
CALL = 16  # a call of the model costs about as much as reading so many tokens more in one that is made anyway


@dataclass(eq=False)
class Text:
    """A text that a model reads piece by piece. `read` of its `ids` are remembered; it never grows beyond `most`."""

    number: int
    ids: list[int]
    most: int
    source: Source | None = None
    read: int = 0

    def __post_init__(self) -> None:
        # what its keys and values depend on beside its tokens
        source = b"" if self.source is None else self.source.tokens.cpu().numpy().tobytes()
        self.salt = blake2b(source, digest_size=16).digest()
        self.keys: list[Key] = []  # of its full blocks, hashed once


class Memory(Protocol):
    """What a model remembers of the texts that are in it."""

    def check(self, text: Text) -> None:
        """Refuse a text that can never fit."""

    def awaits(self, text: Text) -> bool:
        """Whether it would pay to let this text in a little later."""

    def admit(self, text: Text, spare: int) -> bool:
        """Let a text in if there is room and `spare` more; what others have read of its beginning counts as read."""

    def reserve(self, text: Text, tokens: int) -> bool:
        """Make room for so many of its tokens, if there is any."""

    def read(self, texts: Sequence[Text], counts: Sequence[int]) -> Tensor:
        """Read on, counts[i] tokens of text i; features (texts, …) after the last one of each."""

    def release(self, text: Text) -> None:
        """Forget a text."""


def memory_of(model: LanguageModel, blocks: int, block: int, rows: int) -> Memory:
    """The memory that fits the model."""
    return Paged(model, blocks, block, rows) if isinstance(model, Transformer) else SideBySide(model)


# ---- Transformers


class Paged:
    """Texts in the blocks of a pool; those of an encoder–decoder also hold their source's keys and values."""

    def __init__(self, model: Transformer, blocks: int, block: int, rows: int):
        if model.decoder is None:
            model.start(1, 1)  # says why it cannot
        assert model.decoder is not None
        settings, table = model.config, model.embedding.weight
        self.model, self.device = model, table.device
        self.pool = Pool(blocks, block)
        layers, kv_heads = len(model.decoder.blocks), settings.attention.groups
        self.blocks = Blocks(layers, blocks, block, kv_heads, settings.d_head, table.dtype, table.device)
        self.tables: dict[int, Table] = {}
        self.sources: dict[int, SourceCache] = {}
        self.joined: tuple[list[int], SourceCache, Tensor] | None = None
        # the tables as the device reads them, a row each; behind a text's blocks stands `nowhere`
        self.numbers = np.full((rows, blocks), self.blocks.nowhere, dtype=np.int64)
        self.row: dict[int, int] = {}
        self.free_rows = list(range(rows))
        # Rows in one call are as long as the longest of them. More calls mean less padding, but each has fewer rows to
        # multiply with the weights; measured on a processor, this many padded tokens are worth a call.
        weights = sum(parameter.numel() for parameter in model.decoder.parameters())
        self.toll = 2 * weights // (layers * kv_heads * settings.d_head)
        self.step = PagedStep(model, self.blocks) if PagedStep.fits(model, blocks * block) else None

    def check(self, text: Text) -> None:
        if text.source is not None and self.model.encoder is None:
            raise ModelError("this model continues a text and reads no source; an encoder–decoder does")
        if not self.pool.fits(text.most):
            room = len(self.pool.uses) * self.pool.block
            raise ModelError(f"prompt and max_tokens make {text.most} tokens, but the cache has room for {room} in all")

    def awaits(self, text: Text) -> bool:
        return self.pool.awaits(self._keys(text))

    def admit(self, text: Text, spare: int) -> bool:
        if not self.free_rows:
            return False
        table = self.pool.admit(self._keys(text), len(text.ids), spare)
        if table is None:
            return False
        self.tables[text.number] = table
        self.row[text.number] = self.free_rows.pop()
        text.read = table.read
        copied = self.reserve(text, len(text.ids))
        assert copied, "the pool has counted the room before"
        if self.model.encoder is not None:
            try:
                state = self.model.start(1, 1, text.source)
            except BaseException:
                self.release(text)
                raise
            assert state.source_cache is not None
            self.sources[text.number] = state.source_cache
        return True

    def reserve(self, text: Text, tokens: int) -> bool:
        table = self.tables[text.number]
        had = len(table.blocks)
        copies = self.pool.reserve(table, tokens)
        if copies is None:
            return False
        if copies or len(table.blocks) > had:
            self.blocks.copy(copies)
            self.numbers[self.row[text.number], : len(table.blocks)] = table.blocks
        return True

    def read(self, texts: Sequence[Text], counts: Sequence[int]) -> Tensor:
        features: list[Tensor] = []
        order: list[int] = []
        for group in self._groups(texts, counts):
            features.append(self._read([texts[place] for place in group], [counts[place] for place in group]))
            order += group
        for text in texts:
            self.pool.filled(self.tables[text.number], text.ids, text.read, text.salt)
        return _in_place(features, order)

    def release(self, text: Text) -> None:
        self.pool.release(self.tables.pop(text.number))
        row = self.row.pop(text.number)
        self.numbers[row] = self.blocks.nowhere
        self.free_rows.append(row)
        if self.sources.pop(text.number, None) is not None:
            self.joined = None
        text.read = 0

    def _keys(self, text: Text) -> list[Key]:
        return self.pool.keys(text.ids, text.salt, text.keys)

    def _groups(self, texts: Sequence[Text], counts: Sequence[int]) -> Iterator[list[int]]:
        """Texts to be read in one call: single tokens by how far back they look, longer pieces from equal places on."""
        starts: dict[int, list[int]] = defaultdict(list)
        for place, (text, count) in enumerate(zip(texts, counts, strict=True)):
            starts[-1 if count == 1 else text.read].append(place)
        for start, places in starts.items():
            if start < 0 and self.step is not None:
                yield places
            elif start < 0:
                yield from bands(places, [texts[place].read for place in places], self.toll)
            else:
                yield from bands(places, [counts[place] for place in places], CALL)

    def _read(self, texts: list[Text], counts: list[int]) -> Tensor:
        reads = [text.read for text in texts]
        longest, time = max(reads), max(counts)
        numbers = self.numbers[[self.row[text.number] for text in texts], : self.pool.size(longest + time)]
        if self.step is not None and time == 1:
            features = self.step([text.ids[text.read] for text in texts], reads, numbers)
            for text in texts:
                text.read += 1
            return features
        cache = PagedCache(self.blocks, torch.from_numpy(numbers).to(self.device))
        state = TransformerState(cache, len(texts), longest + time, *self._source(texts))  # type: ignore[arg-type]
        state.lengths = torch.tensor(reads, device=self.device)
        state.longest, state.even = longest, min(reads) == longest
        return _advanced(self.model, state, texts, counts)

    def _source(self, texts: Sequence[Text]) -> tuple[SourceCache | None, Tensor | None]:
        """The sources' keys and values in one batch, padded; they change only with the rows."""
        if not self.sources:
            return None, None
        rows = [text.number for text in texts]
        if self.joined is None or self.joined[0] != rows:
            sources = [self.sources[row] for row in rows]
            lengths = [source[0][0].shape[2] for source in sources]
            longest = max(lengths)
            memory = [
                (_stacked([keys for keys, _ in layer], longest), _stacked([values for _, values in layer], longest))
                for layer in zip(*sources, strict=True)
            ]
            mask = torch.arange(longest, device=self.device) < torch.tensor(lengths, device=self.device)[:, None]
            self.joined = rows, memory, mask
        return self.joined[1], self.joined[2]


def _stacked(rows: Sequence[Tensor], time: int) -> Tensor:
    """Keys or values (1, kv_heads, …, d_head) as rows of one (batch, kv_heads, time, d_head)."""
    return torch.cat([pad(row, (0, 0, 0, time - row.shape[2])) for row in rows])


# ---- all other models


@dataclass(eq=False)
class Cohort:
    """Rows of one state, and whose they are."""

    state: State
    texts: list[Text]


class SideBySide:
    """Rows of states, through the contract of every model: start, advance, reorder."""

    def __init__(self, model: LanguageModel):
        self.model, self.device = model, device_of(model)
        self.cohorts: dict[int, Cohort] = {}  # by text

    def check(self, text: Text) -> None:
        """What is remembered doesn't grow, so every text fits."""

    def awaits(self, text: Text) -> bool:
        return False

    def admit(self, text: Text, spare: int) -> bool:
        state = self.model.start(1, min(text.most, HORIZON), text.source)
        if not can_join(state):  # then it can't be made anew either
            state = self.model.start(1, text.most, text.source)
        self.cohorts[text.number] = Cohort(state, [text])
        return True

    def reserve(self, text: Text, tokens: int) -> bool:
        return True

    def read(self, texts: Sequence[Text], counts: Sequence[int]) -> Tensor:
        features: list[Tensor] = []
        order: list[int] = []
        at = {text.number: place for place, text in enumerate(texts)}
        single = [place for place, count in enumerate(counts) if count == 1]
        longer = [place for place, count in enumerate(counts) if count > 1]
        for group in [*([single] if single else []), *bands(longer, [counts[place] for place in longer], CALL)]:
            for cohort in self._together([texts[place] for place in group], max(counts[place] for place in group)):
                places = [at[text.number] for text in cohort.texts]
                features.append(_advanced(self.model, cohort.state, cohort.texts, [counts[place] for place in places]))
                order += places
        return _in_place(features, order)

    def release(self, text: Text) -> None:
        del self.cohorts[text.number]
        text.read = 0

    def _together(self, texts: list[Text], time: int) -> list[Cohort]:
        """The cohorts of just these texts, with room for `time` more: one, where states of this model can be joined."""
        parts = [self._alone(cohort, texts) for cohort in dict.fromkeys(self.cohorts[text.number] for text in texts)]
        full = parts[0].state.longest + time > parts[0].state.max_len
        if len(parts) > 1 or full:
            room = max(time, min(HORIZON, max(text.most - text.read for text in texts)))
            state = join(parts[0].state, [part.state for part in parts[1:]], self.model, room)
            if state is not None:
                parts = [Cohort(state, [text for part in parts for text in part.texts])]
        for part in parts:
            self.cohorts.update(dict.fromkeys((text.number for text in part.texts), part))
        return parts

    def _alone(self, cohort: Cohort, texts: list[Text]) -> Cohort:
        """Those rows of a cohort that belong to `texts`; the others that still live go on without them."""
        wanted = {text.number for text in texts}
        mine = [row for row, text in enumerate(cohort.texts) if text.number in wanted]
        if len(mine) == len(cohort.texts):
            return cohort
        others = [
            row
            for row, text in enumerate(cohort.texts)
            if text.number not in wanted and self.cohorts.get(text.number) is cohort
        ]
        part = Cohort(cohort.state, [cohort.texts[row] for row in mine])
        if others:
            part.state = copy.deepcopy(cohort.state)
            cohort.state.reorder(torch.tensor(others, device=self.device))
            cohort.texts = [cohort.texts[row] for row in others]
        part.state.reorder(torch.tensor(mine, device=self.device))
        return part


# ---- both


def _advanced(model: LanguageModel, state: State, texts: Sequence[Text], counts: Sequence[int]) -> Tensor:
    """Read on in every row of a state; features (texts, …) after the last token of each."""
    time = max(counts)
    ragged = min(counts) < time
    chunks = [text.ids[text.read : text.read + count] for text, count in zip(texts, counts, strict=True)]
    if ragged:
        chunks = [chunk + [0] * (time - len(chunk)) for chunk in chunks]
    tokens = torch.tensor(chunks, device=state.lengths.device)
    lengths = torch.tensor(counts, device=tokens.device) if ragged else None
    features = model.advance(tokens, state, lengths)
    for text, count in zip(texts, counts, strict=True):
        text.read += count
    if lengths is None:
        return features[:, -1]
    return features[torch.arange(len(texts), device=tokens.device), lengths - 1]


def _in_place(parts: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    """Rows that were found in this order, in their own."""
    features = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    if list(order) == list(range(len(order))):
        return features
    back = sorted(range(len(order)), key=order.__getitem__)
    return features[torch.tensor(back, device=features.device)]


def bands(places: Sequence[int], sizes: Sequence[int], toll: float) -> list[list[int]]:
    """Places, which have these sizes, cut into groups where the padding that is saved is worth `toll` for each cut."""
    places = list(places)
    longest = max(sizes, default=0)
    if longest * len(places) - sum(sizes) <= toll:
        return [places] if places else []
    order = sorted(range(len(places)), key=sizes.__getitem__)
    cut = max(range(1, len(order)), key=lambda cut: cut * (longest - sizes[order[cut - 1]]))
    if cut * (longest - sizes[order[cut - 1]]) <= toll:
        return [places]
    return [
        band
        for half in (order[:cut], order[cut:])
        for band in bands([places[i] for i in sorted(half)], [sizes[i] for i in sorted(half)], toll)
    ]
