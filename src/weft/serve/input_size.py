"""Bounds of the texts in a request, known before any work: in bytes at once, in tokens off the event loop."""

import asyncio
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from weft.serve.config import Limits
from weft.serve.errors import RefusedError
from weft.storage.files import utf8_size
from weft.text.tokenizer import Tokenizer

# fields of bodies
TEXTS = ("input", "second", "target", "prompt", "messages", "system", "instructions", "tokens", "tools")
UNCOUNTED = ("role", "type")  # fields of messages that are no text
MAX_BYTES_PER_TOKEN = 16  # a text with more bytes than this times the bound in tokens is not tokenized


async def check_size(body: BaseModel, tokenizer: Tokenizer, limits: Limits) -> None:
    """Refuse a body whose texts have more tokens than the server reads; short ones need not be tokenized for that."""
    limit, texts = limits.max_input_tokens, {name: getattr(body, name) for name in TEXTS if getattr(body, name, None)}
    parts = {name: list(_parts(value)) for name, value in texts.items()}
    size = sum(utf8_size(part) if isinstance(part, str) else 1 for each in parts.values() for part in each)
    if size <= limit:  # a token has at least one byte
        return
    largest = max(parts, key=lambda name: sum(len(part) if isinstance(part, str) else 1 for part in parts[name]))
    if size > limit * MAX_BYTES_PER_TOKEN:
        message = f"{size:,} bytes; this server reads at most {limit * MAX_BYTES_PER_TOKEN:,} in one request"
        raise RefusedError(413, f"{largest}: {message}", param=largest)

    def is_too_long() -> bool:
        tokens = 0
        for part in (part for each in parts.values() for part in each):
            tokens += len(tokenizer.encode(part)) if isinstance(part, str) else 1
            if tokens > limit:
                return True
        return False

    if await asyncio.to_thread(is_too_long):
        message = f"more than {limit:,} tokens, which is the most that this server reads in one request"
        raise RefusedError(413, f"{largest}: {message}", param=largest)


def as_list(inputs: Any) -> list[Any]:
    """Return one text, or one list of ids, as a list of one."""
    return [inputs] if isinstance(inputs, str) or isinstance(inputs[0], int) else inputs


def check_ids(inputs: Sequence[Any], size: int, param: str) -> None:
    """Refuse token ids beyond a vocabulary of `size` tokens, in inputs that are texts or lists of ids."""
    for ids in inputs:
        if not isinstance(ids, str) and ids and max(ids) >= size:
            raise RefusedError(400, f"{param}: {max(ids)} is not a token id; expected 0 … {size - 1}", param=param)


def _parts(value: Any) -> Any:
    """Yield the texts and the numbers in a field."""
    if isinstance(value, str | int | float):
        yield value
    elif isinstance(value, dict):
        yield from _parts([*value.keys(), *value.values()])
    elif isinstance(value, BaseModel):
        yield from _parts([each for name, each in value if name not in UNCOUNTED])
    elif isinstance(value, list):
        for each in value:
            yield from _parts(each)
