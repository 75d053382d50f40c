"""N-gram language model: p(next word | the last order − 1 words), estimated by counting (Shannon 1948, §3).

At the beginning of a sequence the context is shorter: the first token has none and gets its unigram probability, the
second has one word, and so on. Features mark missing words by `vocab_size`, an id that no token has. An unseen context
is cut from the left until it was seen (only add-k keeps to its formula, which gives every word 1/V), so that the
distribution after every context sums to one, for every smoothing.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from weft.errors import ModelError
from weft.models.base import EncoderInput, LanguageModel, State, check_tokens
from weft.models.config import Bengio as BengioConfig
from weft.models.config import NGram as NGramConfig
from weft.models.ngram_counts import Documents, Ints, Trie, TrieLevel, check_ids, count_ngrams, document_starts, lookups
from weft.models.ngram_smoothing import Weights, smooth
from weft.models.smoothing import AddK
from weft.progress import bar

CHUNK = 1 << 18  # tokens scored at a time


class Recent(State):
    """Tokens read so far, after order − 1 missing words."""

    can_grow = True

    def __init__(self, batch: int, max_len: int, config: NGramConfig | BengioConfig, *, device: torch.device):
        super().__init__(batch, max_len, device)
        shape = batch, config.order - 1 + max_len
        self.tokens = torch.full(shape, config.vocab_size, dtype=torch.long, device=device)

    def read(self, tokens: Tensor, lengths: Tensor | None) -> Tensor:
        """Add tokens (batch, time); return the context (batch, time, order − 1) of the word after each."""
        T, width = tokens.shape[1], self.tokens.shape[1] - self.max_len
        self.reserve(T)
        # number of tokens before each new one
        ends = self.lengths[:, None] + torch.arange(T, device=self.lengths.device)
        self.tokens.scatter_(1, ends + width, tokens.to(self.tokens))
        self.advance(T, lengths)
        window = ends[:, :, None] + torch.arange(1, width + 1, device=ends.device)
        return self.tokens.gather(1, window.flatten(1)).view(*tokens.shape, width)

    def _append(self, positions: int) -> None:
        self.tokens = nn.functional.pad(self.tokens, (0, positions))

    def reorder(self, index: Tensor) -> None:
        super().reorder(index)
        self.tokens = self.tokens[index]


def contexts(tokens: Tensor, config: NGramConfig | BengioConfig, documents: Tensor | None = None) -> Tensor:
    """Last order − 1 words (batch, time, order − 1) up to each of tokens (batch, time), oldest first; `vocab_size`
    where a word is missing. With document ids (batch, time), a context has only words of its document."""
    width, missing = config.order - 1, config.vocab_size
    if not width:
        return tokens.new_empty((*tokens.shape, 0))
    words = nn.functional.pad(tokens, (width - 1, 0), value=missing).unfold(1, width, 1)
    if documents is not None:
        origins = nn.functional.pad(documents, (width - 1, 0), value=-1).unfold(1, width, 1)
        words = words.masked_fill(origins != documents[:, :, None], missing)
    return words


class NGram(LanguageModel):
    """Sorted tables of n-grams with their counts and log-probabilities, one set for each length up to `order`.

    The tables are buffers, so a state dict holds the whole model; a new model takes their sizes from the state dict it
    loads. Nothing is trained by gradient: `fit` counts.
    """

    TABLES = ("words", "counts", "starts", "log_prob", "backoff")

    def __init__(self, config: NGramConfig):
        super().__init__()
        self.config: NGramConfig = config
        dtypes = (torch.int32, torch.int32, torch.int32, torch.float32, torch.float32)
        for n in range(1, config.order + 1):
            for table, dtype in zip(self.TABLES, dtypes, strict=True):
                self.register_buffer(f"{table}_{n}", torch.empty(0, dtype=dtype))

    def fit(self, tokens: Ints, boundaries: Ints | None = None, progress: bool = False) -> None:
        """Count tokens (time,), which may be memory-mapped, and smooth the counts; replaces earlier counts.

        `boundaries` are the offsets where documents begin. With `progress`, a terminal shows a bar. The tables take
        about 17 bytes per distinct n-gram, and up to about 35 bytes while they are built; with few n-grams, the chunk
        being counted takes 0.9 GB, for a text of any length.
        """
        order, vocab_size = self.config.order, self.config.vocab_size
        if len(tokens) < order:
            raise ModelError(f"{len(tokens)} tokens are too few to count n-grams of order {order}")
        documents = Documents(tokens, document_starts(len(tokens), boundaries))
        with bar("counting", len(tokens) * order, enabled=progress) as tick:
            trie = count_ngrams(documents, vocab_size, order, tick=tick)
        openings = _openings(trie, documents)
        with bar("smoothing", sum(len(level) for level in trie[1:]), enabled=progress) as tick:
            weights = smooth(trie, self.config.smoothing, openings, tick=tick)
        for n, (level, weight) in enumerate(zip(trie, weights, strict=True), start=1):
            tables = (level.words, level.counts, level.starts, weight.log_prob, weight.backoff)
            for table, values in zip(self.TABLES, tables, strict=True):
                name = f"{table}_{n}"
                setattr(self, name, torch.from_numpy(values).to(getattr(self, name).device))

    @property
    def entries(self) -> list[int]:
        """Number of distinct n-grams of each length, from 1 to the order."""
        self._check_fitted()
        distinct = int(torch.count_nonzero(self._table("counts", 1)))
        return [distinct] + [len(self._table("words", n)) for n in range(2, self.config.order + 1)]

    def log_prob(self, tokens: Ints, boundaries: Ints | None = None) -> NDArray[np.float32]:
        """log p(token | its context) for each of tokens (time,), in nats; `boundaries` as for `fit`. Unlike `head`,
        this looks up only the tokens that occur, not the whole vocabulary: a million tokens per second on one core."""
        self._check_fitted()
        documents = Documents(tokens, document_starts(len(tokens), boundaries))
        levels = range(1, self.config.order + 1)
        trie = [TrieLevel(self._host("words", n), self._host("counts", n), self._host("starts", n)) for n in levels]
        weights = [Weights(self._host("log_prob", n), self._host("backoff", n)) for n in levels]
        scores = np.empty(len(tokens), dtype=np.float32)
        for low in range(0, len(tokens), CHUNK):
            context = min(low, self.config.order - 1)
            part = documents.part(low - context, low + CHUNK)
            check_ids(part.tokens, self.config.vocab_size)
            scores[low : low + CHUNK] = self._score(trie, weights, part)[context:]
        return scores

    def _score(self, trie: Trie, weights: list[Weights], documents: Documents) -> NDArray[np.float32]:
        """log p of each token, (time,), from the shortest to the longest context."""
        tokens, starts = documents
        uniform = -float(np.log(self.config.vocab_size)) if isinstance(self.config.smoothing, AddK) else None
        score = np.empty(0, dtype=np.float32)
        begin = np.zeros(len(tokens), dtype=np.int64)
        begin[starts] = starts
        position = np.arange(len(tokens)) - np.maximum.accumulate(begin)  # in its document
        for n, (ngrams, contexts) in enumerate(lookups(trie, documents), start=1):
            if n == 1:
                score = weights[0].log_prob.take(ngrams)
                continue
            if uniform is not None:
                score[position >= n - 1] = uniform
            known = np.flatnonzero(contexts >= 0)
            score[known] += weights[n - 2].backoff.take(contexts.take(known))
            seen = np.flatnonzero(ngrams >= 0)
            score[seen] = weights[n - 1].log_prob.take(ngrams.take(seen))
        return score

    def forward_features(
        self, tokens: Tensor, *, documents: Tensor | None = None, positions: object = None, rng: object = None
    ) -> Tensor:
        """Context (batch, time, order − 1) of the word after each of tokens (batch, time), oldest word first. With
        document ids (batch, time), a context has only words of its document. `positions` and `rng` are ignored."""
        check_tokens(tokens, self.config.vocab_size)
        return contexts(tokens, self.config, documents)

    def head(self, features: Tensor) -> Tensor:
        """log p (batch, time, vocab_size) of every word after contexts (batch, time, order − 1); −∞ where p is 0."""
        self._check_fitted()
        (B, T, width), V = features.shape, self.config.vocab_size
        contexts = features.reshape(B * T, width).to(self._table("counts", 1).device)
        uniform = -float(np.log(V)) if isinstance(self.config.smoothing, AddK) else None
        rows = self._table("log_prob", 1).repeat(B * T, 1)
        for n, indices in enumerate(self._suffixes(contexts), start=2):
            if uniform is not None:
                rows[(contexts[:, width - n + 1 :] < V).all(1)] = uniform
            known = (indices >= 0).nonzero().squeeze(1)
            indices = indices[known]
            rows[known] += self._table("backoff", n - 1)[indices, None]
            starts = self._table("starts", n - 1)
            begin = starts[indices].long()
            sizes = starts[indices + 1].long() - begin
            row = torch.repeat_interleave(known, sizes)
            ends = sizes.cumsum(0)
            child = torch.arange(len(row), device=row.device) + torch.repeat_interleave(begin - ends + sizes, sizes)
            rows[row, self._table("words", n)[child].long()] = self._table("log_prob", n)[child]
        return rows.view(B, T, V).to(features.device)

    def following(self, context: Sequence[int]) -> dict[int, int]:
        """Count every word that follows the last order − 1 words of `context` in the text; empty if unseen."""
        self._check_fitted()
        width, V = self.config.order - 1, self.config.vocab_size
        last = list(context)[-width:] if width else []
        if not last:
            return {word: count for word, count in enumerate(self._table("counts", 1).tolist()) if count}
        padded = torch.tensor([[V] * (width - len(last)) + last], device=self._table("counts", 1).device)
        index, n = int(self._suffixes(padded)[len(last) - 1]), len(last)
        if index < 0:
            return {}
        children = slice(*self._table("starts", n)[index : index + 2].tolist())
        words, counts = self._table("words", n + 1)[children], self._table("counts", n + 1)[children]
        return dict(zip(words.tolist(), counts.tolist(), strict=True))

    def _suffixes(self, contexts: Tensor) -> list[Tensor]:
        """Indices of the last n words of contexts (rows, words), for n = 1, 2, …; −1 where unseen or missing. All
        suffixes of a context are looked up in parallel, from their first word to their last."""
        width, V = contexts.shape[1], self.config.vocab_size
        indices = torch.where(contexts < V, contexts, -1).flip(1)  # column i: the suffix of i + 1 words
        found = [indices[:, 0]] if width else []
        for n in range(2, width + 1):
            indices = self._find(n, indices[:, 1:], contexts[:, n - 1 :].flip(1))
            found.append(indices[:, 0])
        return found

    def _find(self, n: int, parents: Tensor, last: Tensor) -> Tensor:
        """`ngram_counts.find` for n-grams of n words with these `last` words, on the device of the tables."""
        starts, words = self._table("starts", n - 1), self._table("words", n)
        if not len(words):
            return torch.full_like(parents, -1)
        context = parents.clamp(min=0)
        low, end = starts[context].long(), starts[context + 1].long()
        size = torch.where(parents >= 0, end - low, 0)
        seen = size > 0
        for _ in range(max(0, int(size.max()) - 1).bit_length()):
            half = size >> 1
            low = low + half * (words[low + half - 1] < last)
            size = size - half
        index = low.clamp(max=len(words) - 1)
        return torch.where(seen & (words[index] == last), index, -1)

    def start(self, batch: int, max_len: int, source: EncoderInput | None = None) -> Recent:
        if source is not None:
            raise ModelError(f"{self._name()} continues a text and cannot read a source")
        self._check_fitted()
        return Recent(batch, max_len, self.config, device=self._table("counts", 1).device)

    def advance(self, tokens: Tensor, state: State, lengths: Tensor | None = None) -> Tensor:
        """Read tokens (batch, time) after those in `state`; return contexts (batch, time, order − 1) for `head`."""
        assert isinstance(state, Recent)
        check_tokens(tokens, self.config.vocab_size)
        return state.read(tokens, lengths)

    def _table(self, table: str, n: int) -> Tensor:
        return self.get_buffer(f"{table}_{n}")

    def _host(self, table: str, n: int) -> NDArray[Any]:
        return self._table(table, n).cpu().numpy()

    def _check_fitted(self) -> None:
        if not len(self._table("counts", 1)):
            raise ModelError(f"{self._name()} has no counts yet: fit it, or load a fitted one")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *options: Any) -> None:
        """Resize the tables to those in the state dict before loading them."""
        loaded = {name: state_dict[prefix + name] for name, _ in self.named_buffers() if prefix + name in state_dict}
        for name, values in loaded.items():
            device = self.get_buffer(name).device
            setattr(self, name, torch.empty(values.shape, dtype=values.dtype, device=device))
        super()._load_from_state_dict(state_dict, prefix, *options)
        if len(loaded) == len(self.TABLES) * self.config.order:
            self._check_tables()

    def _check_tables(self) -> None:
        """Raise ModelError if tables don't fit this config or each other: lookups would be out of range."""
        order, V = self.config.order, self.config.vocab_size
        for n in range(1, order + 1):
            words, counts, starts, log_prob, backoff = (self._table(table, n) for table in self.TABLES)
            size = len(words)
            fits = len(counts) == len(log_prob) == size and (n > 1 or size in (0, V))
            if n < order:
                fits = fits and len(backoff) == size and len(starts) in (0 if not size else size + 1, size + 1)
                if fits and size:
                    ends = int(starts[0]), int(starts[-1])
                    fits = ends == (0, len(self._table("words", n + 1))) and bool((starts.diff() >= 0).all())
            if fits and size:
                fits = int(words.min()) >= 0 and int(words.max()) < V
            if not fits:
                raise ModelError(f"the tables of order {n} are not n-gram tables of order {order} over {V} words")


def _openings(trie: Trie, documents: Documents) -> list[Ints]:
    """Indices of the n-grams at the beginning of documents, for each length below the highest."""
    (tokens, starts), longest = documents, len(trie) - 1
    ends = np.minimum(np.append(starts[1:], len(tokens)), starts + longest)
    sizes = ends - starts
    begins = np.cumsum(sizes) - sizes
    first_words = np.asarray(tokens[np.arange(sizes.sum()) + np.repeat(starts - begins, sizes)])
    found = lookups(trie[:longest], Documents(first_words, begins)) if longest else iter(())
    return [ngrams[begins[sizes >= n] + n - 1] for n, (ngrams, _) in enumerate(found, start=1)]
