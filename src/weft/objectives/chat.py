"""Conversations: the assistant's replies are learned, all other turns only read."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from weft.data.batch import Batch, pack
from weft.data.examples import Examples
from weft.data.messages import encode_chat
from weft.data.table import Kind, Row
from weft.decode.config import Sampling
from weft.decode.generate import complete
from weft.decode.prompt import Prompt, context_window
from weft.errors import DataError
from weft.models.base import LanguageModel
from weft.objectives.rows import Numbers, RowObjective, naming_row
from weft.objectives.tokens import TokenObjective
from weft.recipe import objective as config
from weft.training.objective import Results

SHOWN_REPLIES = 3  # in the report


class Chat(TokenObjective[config.Chat], RowObjective[config.Chat]):
    """Predict the assistant's tokens in a column of messages."""

    usage = "weft chat {run}"

    def columns(self) -> Mapping[str, Kind]:
        return {self.settings.column: "messages"}

    def row_texts(self, values: Mapping[str, Any], side: Literal["target", "source"]) -> Iterator[str]:
        """Yield contents under the headings of the default template, for the tokenizer to learn these too."""
        if side == "target":
            for message in values[self.settings.column]:
                yield f"### {message['role'].capitalize()}\n{message['content']}\n"

    def encode(self, rows: Sequence[Row]) -> Iterable[dict[str, Any]]:
        """Yield the tokens of each conversation, and 1 for each that is the assistant's."""
        for row in rows:
            with naming_row(row):
                tokens, replies = encode_chat(self.tokenizer, row.values[self.settings.column])
            yield {"tokens": tokens, "replies": replies}

    def lengths(self, examples: Examples) -> Numbers:
        ends = examples.lengths("replies").cumsum()
        starts = np.concatenate([[0], ends[:-1]])
        replies = np.flatnonzero(examples.flat_ids("replies"))
        earliest = int((replies[np.searchsorted(replies, starts)] - starts).min())
        if earliest > self.length:
            raise DataError(
                f"batch.length = {self.length}: no reply of the assistant begins within this many tokens, so there is "
                f"nothing to learn; the earliest one begins after {earliest}"
            )
        return np.minimum(examples.lengths("tokens") - 1, self.length)  # the last token is only a target

    def batch(self, examples: Examples, numbers: Numbers) -> Batch:
        """Pack conversations best-fit into rows (B, length), without attention to each other; only replies are targets.
        Conversations longer than a row are cut."""
        end = self.length + 1
        batch = pack([examples.ids("tokens", n)[:end].tolist() for n in numbers], self.length, self.tokenizer.pad_id)
        # equal lengths are packed into the same positions
        replies = pack([examples.ids("replies", n)[:end].tolist() for n in numbers], self.length, 0)
        assert batch.loss_mask is not None
        return replace(batch, loss_mask=batch.loss_mask & replies.targets.bool())

    def final_evaluation(self, model: LanguageModel) -> Results:
        if not self.holds_out:
            return Results()
        examples, window, shown = self.examples["validation"], context_window(model), list[str]()
        for number in range(len(examples)):
            if len(shown) == SHOWN_REPLIES:
                break
            ids, replies = examples.ids("tokens", number), examples.ids("replies", number)
            prompt = ids[: int(replies.argmax())].tolist()
            if window is not None and len(prompt) >= window:
                continue  # no space for a reply
            (reply,) = complete(model, [Prompt.of(self.tokenizer, prompt)], Sampling(temperature=0.0, max_tokens=60))
            shown.append(f"{self.tokenizer.decode(prompt)}{reply.text}")
        return Results(self.measure(model).metrics, shown)
