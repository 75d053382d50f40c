"""One text from another, for many texts: sources of like length are read together, answers come back in order."""

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

# What is answered together: tokens of sources, padding counted, in every beam, and beams of all sources. Memory for
# keys and values grows with the former, for logits with the latter; more than these make products little faster, and
# with a translation model of usual size need about 1 GB.
TOGETHER, TOGETHER_ON_CUDA = (3600, 90), (32768, 1024)
# Tokens that an answer has at most for each token of its source, and for any source: a model that fails to end its text
# repeats itself, and all beams go on to the limit.
RATIO, ANYWAY = 2.0, 50


class Direction(NamedTuple):
    """The `frame` of a source, the token that an answer `starts` from, and those that it is given `first`."""

    frame: Frame
    starts: int
    first: tuple[int, ...] = ()


@dataclass(frozen=True)
class Translator:
    """A model that writes one text from another, with its tokenizers, in a `direction`.

    Sources are cut at `length` tokens, their special tokens among them. An answer has at most `ratio` times as many
    tokens as its source, and 50 more; without a ratio, only the settings' `max_tokens` limit it.
    """

    model: LanguageModel
    source: Tokenizer
    target: Tokenizer
    direction: Direction
    length: int
    ratio: float | None = RATIO

    def translate(
        self, texts: Sequence[str], settings: Beam | Sampling, progress: Callable[[int], object] | None = None
    ) -> list[str]:
        """What the model makes of each text, in their order. A blank text stays blank. Each answer starts from a token
        and ends with eos, as the pairs objective has it in training."""
        device, ids, frame = device_of(self.model), self.source.encode_batch(list(texts)), self.direction.frame
        specials = len(frame.before) + len(frame.after)
        if self.direction.first:
            settings = settings.model_copy(update={"forced": self.direction.first})
        written, progress = [""] * len(texts), progress or (lambda count: None)
        waiting = [number for number, text in enumerate(texts) if text.strip()]
        waiting.sort(key=lambda number: len(ids[number]))
        progress(len(texts) - len(waiting))
        beams = settings.beams if isinstance(settings, Beam) else 1
        most, rows = TOGETHER_ON_CUDA if device.type == "cuda" else TOGETHER
        while waiting:
            longest = min(self.length, len(ids[waiting[-1]]) + specials)
            together = max(1, min(most // longest, rows) // beams)
            if together < len(waiting) < 2 * together:  # two halves, for a few lines take as long as many
                together = (len(waiting) + 1) // 2
            some = [waiting.pop() for _ in range(min(len(waiting), together))]
            tokens, mask, _ = framed([ids[number] for number in some], None, frame, length=self.length)
            source = Source(tokens.to(device), mask.to(device))
            answers = self._answers(source, settings, [texts[number] for number in some])
            for number, answer in zip(some, answers, strict=True):
                written[number] = answer
            progress(len(some))
        return written

    @torch.no_grad()
    def _answers(self, source: Source, settings: Beam | Sampling, texts: Sequence[str]) -> list[str]:
        prompts = [Prompt.of(self.target, [self.direction.starts])] * len(source.tokens)
        if self.ratio is not None:
            assert source.mask is not None
            most = [int(self.ratio * read) + ANYWAY for read in source.mask.sum(dim=1).tolist()]
            prompts = [replace(prompt, most=limit) for prompt, limit in zip(prompts, most, strict=True)]
        if isinstance(settings, Beam):
            instead = partial(self._looked_at, source, texts) if settings.replace_unknown else None
            return [found[0].text for found in search_texts(self.model, prompts, settings, source, instead)]
        return [done.text for done in complete(self.model, prompts, settings, source=source)]

    def _looked_at(self, source: Source, texts: Sequence[str], row: int, ids: tuple[int, ...]) -> dict[int, str]:
        """For unknown tokens, by place, the piece that the last layer's first head looks at, as in CTranslate2."""
        assert source.mask is not None
        probabilities, seen = self.model.alignment, list[Tensor]()
        unknown = [place for place, id in enumerate(ids) if id == self.target.unk_id]
        spans, stream = self.source.token_spans(texts[row]), self.source.stream(begun=True)
        if probabilities is None or not unknown or not spans:
            return {}
        real = source.mask[row : row + 1, source.mask[row]]
        alone = Source(source.tokens[row : row + 1, source.mask[row]], real)
        before, after = len(self.direction.frame.before), len(self.direction.frame.after)
        state = self.model.start(1, len(ids), alone)
        stop = probabilities.watch(seen.append)
        try:
            self.model.advance(alone.tokens.new_tensor([(self.direction.starts, *ids[:-1])]), state)
        finally:
            stop()
        weights = seen[-1].flatten(0, -3)[0][unknown, before : alone.tokens.shape[1] - after]
        mark = self.source.roles.get("unk")
        own = [None if s.id != self.source.unk_id else s.text if s.token == mark else s.token for s in spans]
        pieces = [stream.push(span.id, text) for span, text in zip(spans, own, strict=True)]
        return {place: pieces[best] for place, best in zip(unknown, weights.argmax(dim=-1).tolist(), strict=True)}
