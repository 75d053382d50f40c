"""Conversations for training: parse a row of data into messages, and encode them as tokens with a mask of the replies.

A conversation is a list of {role, content} messages: at most one system message, first; then a user message before any
assistant message. User messages may follow each other; assistant messages may not, because nothing prompts the second.
Turns are framed by the tokenizer's chat template, which `weft chat` uses too.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from weft.errors import DataError, TokenizerError, listed, suggestion
from weft.text.tokenizer import Tokenizer

Message = dict[str, str]
ROLES = ("system", "user", "assistant")
SYNONYMS = {"human": "user", "gpt": "assistant"}  # other names of roles

# for a tokenizer without a chat template: headings in plain text, and eos after each reply
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '### ' + message['role'] | capitalize + '\\n' + message['content'] | trim }}"
    "{{ (eos_token if message['role'] == 'assistant' else '') + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### Assistant\\n' }}{% endif %}"
)


def conversation(record: Any, column: str = "messages") -> list[Message]:
    """Return the messages of a row: those in `column`, or made from `instruction`, `input` (optional) and `output`.

    Messages may also have the keys `from` and `value` (human, gpt), and their content may be a list of text parts.
    Raises DataError with the reason; the caller adds file and line.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"a conversation is an object with '{column}', not {type(record).__name__}")
    if column in record:
        return _parse_messages(record[column], column)
    if "instruction" in record and "output" in record:
        task, details, reply = (record.get(key) or "" for key in ("instruction", "input", "output"))
        if not all(isinstance(text, str) for text in (task, details, reply)):
            raise DataError("'instruction', 'input' and 'output' hold text")
        request = f"{task}\n\n{details}" if details.strip() else task
        return _parse_messages([{"role": "user", "content": request}, {"role": "assistant", "content": reply}], column)
    known = listed(map(str, record)) or "none"
    raise DataError(f"neither '{column}' nor 'instruction' and 'output'; its columns: {known}")


def _parse_messages(messages: Any, column: str) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"'{column}' is not a list of messages, or is empty")
    turns: list[Message] = []
    for number, message in enumerate(messages, 1):
        turn = _parse_message(message, number)
        role, before = turn["role"], turns[-1]["role"] if turns else None
        if role == "system" and before is not None:
            raise DataError(f"a system message after another message: message {number}; it may only come first")
        if role == "assistant" and before in (None, "system"):
            raise DataError(f"an assistant message without a user message before it: message {number}")
        if role == "assistant" and before == "assistant":
            raise DataError(f"two assistant messages in a row: message {number}; join the two")
        turns.append(turn)
    if all(turn["role"] != "assistant" for turn in turns):
        raise DataError("the assistant never replies: nothing to learn from")
    return turns


def _parse_message(message: Any, number: int) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"a message without 'role' and 'content': message {number}")
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    role = SYNONYMS.get(role, role) if isinstance(role, str) else role
    if isinstance(content, list):
        parts = [part if isinstance(part, Mapping) else {} for part in content]
        if all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
            content = "".join(part["text"] for part in parts)
    if role not in ROLES:
        raise DataError(f"unknown role: message {number} has {role!r}; {suggestion(str(role), ROLES)}")
    if not isinstance(content, str):
        raise DataError(f"content that is not text: message {number} of role {role}")
    if not content.strip():
        raise DataError(f"empty content: message {number} of role {role}")
    return {"role": role, "content": content}


@lru_cache(maxsize=4)
def with_template(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer if it has a chat template, otherwise a copy with the default TEMPLATE. A run that trains on
    chat saves this tokenizer, so that `weft chat` frames turns as training did."""
    if tokenizer.chat_template is not None:
        return tokenizer
    tokenizer.need("eos")
    return Tokenizer.from_json(tokenizer.to_json(), tokenizer.roles, TEMPLATE)


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> tuple[list[int], list[int]]:
    """(ids, mask) of a conversation; mask is 1 at the tokens of the assistant, including the one that ends its turn.

    Turns are located by rendering: a turn begins where the conversation before it, rendered with a generation prompt,
    ends, and it ends where the conversation up to and including it ends.
    """
    tokenizer = with_template(tokenizer)
    messages, encode = tokenizer.to_chat(messages), tokenizer.chat_ids
    special = set(tokenizer.special_tokens.values())
    text = tokenizer.chat(messages, reply=False)
    ids = encode(text)
    mask = [0] * len(ids)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        is_last = number == len(messages) - 1
        so_far = text if is_last else tokenizer.chat(messages[: number + 1], reply=False)
        if not text.startswith(so_far):
            raise TokenizerError("the chat template rewrites earlier turns, so the replies cannot be located")
        start = _common_prefix(ids, encode(tokenizer.chat(messages[:number], reply=True)))
        stop = len(ids) if is_last else _common_prefix(ids, encode(so_far))
        last = next((at for at in range(stop - 1, start - 1, -1) if ids[at] in special), None)
        if last is not None and not tokenizer.decode(ids[last + 1 : stop], specials=True).strip():
            stop = last + 1  # exclude white space that a template writes after the token that ends a turn
        mask[start:stop] = [1] * (stop - start)
    if not any(mask):
        raise TokenizerError("the chat template omits the assistant's turns")
    return ids, mask


def _common_prefix(ids: list[int], other: list[int]) -> int:
    mismatches = (at for at, (one, two) in enumerate(zip(ids, other, strict=False)) if one != two)
    return next(mismatches, min(len(ids), len(other)))
