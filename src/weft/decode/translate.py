"""Translation of many texts: sources of similar length share a batch, and answers are returned in order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from weft.data.batch import Frame, Source, framed
from weft.decode.beam import search_texts
from weft.decode.config import Beam, Sampling
from weft.decode.generate import complete
from weft.decode.prompt import Prompt
from weft.models.base import LanguageModel, device_of
from weft.text.tokenizer import Tokenizer

# Limits of a batch: tokens of its sources in every beam, padding included, and rows (beams of all sources). Keys and
# values grow with the former, logits with the latter. These take about 1 GB; larger batches are hardly faster.
BATCH_LIMITS, CUDA_BATCH_LIMITS = (3600, 90), (32768, 1024)
# An answer has at most LENGTH_RATIO tokens per token of its source, plus EXTRA_TOKENS: a model that fails to end its
# text repeats itself, and all beams continue to the limit.
LENGTH_RATIO, EXTRA_TOKENS = 2.0, 50


def max_answer_tokens(source: int, ratio: float) -> int:
    """Return the maximum number of tokens of an answer to `source` tokens."""
    return int(ratio * source) + EXTRA_TOKENS


class Direction(NamedTuple):
    """The `frame` of a source, the token that an answer `starts` from, and the tokens it is forced to begin with."""

    frame: Frame
    starts: int
    first: tuple[int, ...] = ()


@dataclass(frozen=True)
class Translator:
    """A model that generates one text from another; sources are truncated to `length` tokens, special ones included."""

    model: LanguageModel
    source: Tokenizer
    target: Tokenizer
    direction: Direction
    length: int
    ratio: float | None = LENGTH_RATIO
    batch_limits: tuple[int, int] | None = None  # instead of the device's

    def translate(
        self, texts: Sequence[str], settings: Beam | Sampling, progress: Callable[[int], object] | None = None
    ) -> list[str]:
        """Return the model's answer to each text, in order; a blank text stays blank."""
        device, ids, frame = device_of(self.model), self.source.encode_batch(list(texts)), self.direction.frame
        specials = len(frame.before) + len(frame.after)
        if self.direction.first:
            settings = settings.model_copy(update={"forced": self.direction.first})
        answers, progress = [""] * len(texts), progress or (lambda count: None)
        waiting = [index for index, text in enumerate(texts) if text.strip()]
        waiting.sort(key=lambda index: len(ids[index]))
        progress(len(texts) - len(waiting))
        beams = settings.beams if isinstance(settings, Beam) else 1
        max_tokens, max_rows = self.batch_limits or (CUDA_BATCH_LIMITS if device.type == "cuda" else BATCH_LIMITS)
        while waiting:
            longest = min(self.length, len(ids[waiting[-1]]) + specials)
            size = max(1, min(max_tokens // longest, max_rows) // beams)
            if size < len(waiting) < 2 * size:  # two halves: a small last batch takes as long as a full one
                size = (len(waiting) + 1) // 2
            batch = [waiting.pop() for _ in range(min(len(waiting), size))]
            tokens, mask, _ = framed([ids[index] for index in batch], None, frame, length=self.length)
            source = Source(tokens.to(device), mask.to(device))
            results = self._answers(source, settings, [texts[index] for index in batch])
            for index, answer in zip(batch, results, strict=True):
                answers[index] = answer
            progress(len(batch))
        return answers

    @torch.no_grad()
    def _answers(self, source: Source, settings: Beam | Sampling, texts: Sequence[str]) -> list[str]:
        prompts = [Prompt.of(self.target, [self.direction.starts])] * len(source.tokens)
        if self.ratio is not None:
            assert source.mask is not None
            limits = [max_answer_tokens(length, self.ratio) for length in source.mask.sum(dim=1).tolist()]
            prompts = [replace(prompt, max_tokens=limit) for prompt, limit in zip(prompts, limits, strict=True)]
        if isinstance(settings, Beam):
            attended = partial(self._best_pieces, source=source, texts=texts) if settings.replace_unknown else None
            results = search_texts(self.model, prompts, settings, source=source, replacements=attended)
            return [best[0].text for best in results]
        return [completion.text for completion in complete(self.model, prompts, settings, source=source)]

    def _best_pieces(self, row: int, ids: tuple[int, ...], *, source: Source, texts: Sequence[str]) -> dict[int, str]:
        """Return the source piece that each unknown token attends to, in the last layer's first head as CTranslate2."""
        assert source.mask is not None
        probabilities, captured = self.model.alignment, list[Tensor]()
        unknown = [position for position, id in enumerate(ids) if id == self.target.unk_id]
        spans, stream = self.source.token_spans(texts[row]), self.source.stream(mid_text=True)
        if probabilities is None or not unknown or not spans:
            return {}
        mask = source.mask[row : row + 1, source.mask[row]]
        single = Source(source.tokens[row : row + 1, source.mask[row]], mask)
        before, after = len(self.direction.frame.before), len(self.direction.frame.after)
        state = self.model.start(1, len(ids), single)
        stop = probabilities.watch(captured.append)
        try:
            self.model.advance(single.tokens.new_tensor([(self.direction.starts, *ids[:-1])]), state)
        finally:
            stop()
        attention = captured[-1].flatten(0, -3)[0][unknown, before : single.tokens.shape[1] - after]
        mark = self.source.roles.get("unk")
        spellings = [None if s.id != self.source.unk_id else s.text if s.token == mark else s.token for s in spans]
        pieces = [stream.push(span.id, text) for span, text in zip(spans, spellings, strict=True)]
        best = attention.argmax(dim=-1).tolist()
        return {position: pieces[index] for position, index in zip(unknown, best, strict=True)}
