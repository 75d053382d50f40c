"""One text from another, for many texts: sources of like length are read together, answers come back in order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from weft.data.batch import Source, pad
from weft.decode.beam import search_texts
from weft.decode.config import Beam, Sampling
from weft.decode.many import complete
from weft.decode.prompt import Prompt
from weft.models.base import LanguageModel, device_of
from weft.text.tokenizer import Tokenizer

TOKENS = 4096  # of sources read together, padding counted


@dataclass(frozen=True)
class Translator:
    """A model that writes one text from another, with its tokenizers; sources are cut at `length` tokens."""

    model: LanguageModel
    source: Tokenizer
    target: Tokenizer
    length: int

    def translate(
        self, texts: Sequence[str], settings: Beam | Sampling, progress: Callable[[int], object] | None = None
    ) -> list[str]:
        """What the model makes of each text, in their order. A blank text stays blank.

        Each answer begins with bos and ends with eos, as the pairs objective has it in training.
        """
        device, eos = device_of(self.model), self.source.need("eos")
        ids = [[*each[: self.length - 1], eos] for each in self.source.encode_batch(list(texts))]
        written = [""] * len(texts)
        waiting = [number for number, text in enumerate(texts) if text.strip()]
        waiting.sort(key=lambda number: len(ids[number]))
        if progress is not None:
            progress(len(texts) - len(waiting))
        while waiting:
            longest = len(ids[waiting[-1]])
            some = [waiting.pop() for _ in range(min(len(waiting), max(1, TOKENS // longest)))]
            tokens, mask = pad([ids[number] for number in some], self.source.pad_id)
            answers = self._answers(Source(tokens.to(device), mask.to(device)), settings)
            for number, answer in zip(some, answers, strict=True):
                written[number] = answer
            if progress is not None:
                progress(len(some))
        return written

    @torch.no_grad()
    def _answers(self, source: Source, settings: Beam | Sampling) -> list[str]:
        """The best answer to each row of a source."""
        prompts = [Prompt.of(self.target, [self.target.need("bos")])] * len(source.tokens)
        if isinstance(settings, Beam):
            return [found[0].text for found in search_texts(self.model, prompts, settings, source)]
        return [done.text for done in complete(self.model, prompts, settings, source=source)]
