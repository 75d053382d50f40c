"""One text from another, for many texts: sources of like length are read together, answers come back in order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weft.data.batch import Frame, Source, framed
from weft.decode.beam import search_texts
from weft.decode.config import Beam, Sampling
from weft.decode.many import complete
from weft.decode.prompt import Prompt
from weft.models.base import LanguageModel, device_of
from weft.text.tokenizer import Tokenizer

TOKENS = 4096  # of sources read together, padding counted


class Direction(NamedTuple):
    """The `frame` of a source, the token that an answer `starts` from, and those that it is given `first`."""

    frame: Frame
    starts: int
    first: tuple[int, ...] = ()


@dataclass(frozen=True)
class Translator:
    """A model that writes one text from another, with its tokenizers, in a `direction`.

    Sources are cut at `length` tokens, their special tokens among them.
    """

    model: LanguageModel
    source: Tokenizer
    target: Tokenizer
    direction: Direction
    length: int

    def translate(
        self, texts: Sequence[str], settings: Beam | Sampling, progress: Callable[[int], object] | None = None
    ) -> list[str]:
        """What the model makes of each text, in their order. A blank text stays blank.

        Each answer starts from a token and ends with eos, as the pairs objective has it in training.
        """
        device, ids, frame = device_of(self.model), self.source.encode_batch(list(texts)), self.direction.frame
        specials = len(frame.before) + len(frame.after)
        if self.direction.first:
            settings = settings.model_copy(update={"forced": self.direction.first})
        written = [""] * len(texts)
        waiting = [number for number, text in enumerate(texts) if text.strip()]
        waiting.sort(key=lambda number: len(ids[number]))
        if progress is not None:
            progress(len(texts) - len(waiting))
        while waiting:
            longest = min(self.length, len(ids[waiting[-1]]) + specials)
            some = [waiting.pop() for _ in range(min(len(waiting), max(1, TOKENS // longest)))]
            tokens, mask, _ = framed([ids[number] for number in some], None, frame, length=self.length)
            answers = self._answers(Source(tokens.to(device), mask.to(device)), settings)
            for number, answer in zip(some, answers, strict=True):
                written[number] = answer
            if progress is not None:
                progress(len(some))
        return written

    @torch.no_grad()
    def _answers(self, source: Source, settings: Beam | Sampling) -> list[str]:
        """The best answer to each row of a source."""
        prompts = [Prompt.of(self.target, [self.direction.starts])] * len(source.tokens)
        if isinstance(settings, Beam):
            return [found[0].text for found in search_texts(self.model, prompts, settings, source)]
        return [done.text for done in complete(self.model, prompts, settings, source=source)]
