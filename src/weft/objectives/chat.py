"""Conversations: the assistant's words are learned, all others only read."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.data.batch import Batch
from weft.data.collate import chat_batch, chat_example, chat_lengths
from weft.data.examples import Examples
from weft.data.table import Kind, Row
from weft.decode.config import Sampling
from weft.decode.many import complete
from weft.decode.prompt import Prompt, context_window
from weft.errors import DataError, WeftError
from weft.evaluate.objective import mean_loss
from weft.models.base import LanguageModel
from weft.objectives.objective import Ending, Tokenizers
from weft.recipe.config import Recipe
from weft.recipe.objective import Chat
from weft.recipe.settle import Choice

SHOWN = 3


class ChatCraft:
    """A column of messages."""

    def __init__(self, goal: Chat):
        self.goal = goal

    def columns(self) -> Mapping[str, Kind]:
        return {self.goal.column: "messages"}

    def texts(self, values: Mapping[str, Any], side: str) -> Iterator[str]:
        """Contents under headings, as the default template has them: a tokenizer should know the headings well."""
        if side == "target":
            for message in values[self.goal.column]:
                yield f"### {message['role'].capitalize()}\n{message['content']}\n"

    def settle(self, recipe: Recipe, rows: Iterable[Row]) -> tuple[Recipe, list[Choice]]:
        return recipe, []

    def examples(self, recipe: Recipe, rows: Iterable[Row], tokenizers: Tokenizers) -> Iterator[dict[str, Any]]:
        assert recipe.batch.length is not None
        where, earliest = "", None  # the reply that begins first in its row
        for row in rows:
            try:
                example = chat_example(tokenizers.target, row.values[self.goal.column])
            except WeftError as error:
                raise DataError(f"{row.where}: {error}") from None
            begins = example["replies"].index(1)
            if earliest is None or begins < earliest:
                where, earliest = row.where, begins
            yield example
        if earliest is not None and earliest > recipe.batch.length:
            raise DataError(
                f"batch.length = {recipe.batch.length}: no reply of the assistant begins within so many tokens, so "
                f"there is nothing to learn; the earliest one begins after {earliest} ({where})"
            )

    def lengths(self, examples: Examples, recipe: Recipe, tokenizers: Tokenizers) -> npt.NDArray[np.int64]:
        assert recipe.batch.length is not None
        return chat_lengths(examples, recipe.batch.length)

    def batch(self, examples: Examples, rows: npt.NDArray[np.int64], recipe: Recipe, tokenizers: Tokenizers) -> Batch:
        assert recipe.batch.length is not None
        return chat_batch(examples, rows, tokenizers.target, length=recipe.batch.length)

    def figures(self, model: LanguageModel, batches: Iterable[Batch], recipe: Recipe) -> dict[str, float]:
        """Loss and perplexity of the assistant's tokens."""
        found = mean_loss(recipe.objective.build(), model, batches)
        return found | {"perplexity": math.exp(min(700.0, found["loss"]))}

    def conclude(
        self, model: LanguageModel, examples: Examples, batches: Iterable[Batch], recipe: Recipe, tokenizers: Tokenizers
    ) -> Ending:
        """The loss over all conversations held out, and the first replies of some."""
        tokenizer, window = tokenizers.target, context_window(model)
        shown: list[str] = []
        for number in range(len(examples)):
            ids, replies = examples.ids("tokens", number), examples.ids("replies", number)
            asked = ids[: int(replies.argmax())].tolist()
            if window is not None and len(asked) >= window:
                continue  # no room for an answer
            if len(shown) == SHOWN:
                break
            prompt = Prompt.of(tokenizer, asked)
            said = complete(model, [prompt], Sampling(temperature=0.0, max_tokens=60))[0].text
            shown.append(f"{tokenizer.decode(asked)}{said}")
        return Ending(dict(self.figures(model, batches, recipe)), shown)
