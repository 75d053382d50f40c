"""tokenizer_config.json, beside a tokenizer.json: special tokens by role, and a chat template."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft import untrusted
from weft.errors import TokenizerError
from weft.files import write_text
from weft.text.config import ROLES, Role

FILE = "tokenizer_config.json"


def write(folder: Path, roles: Mapping[Role, str], chat_template: str | None) -> None:
    """Write the file so that other programs find the special tokens and the template. Raises OSError."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {f"{role}_token": token for role, token in roles.items()}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    write_text(folder / FILE, json.dumps(settings, ensure_ascii=False, indent=2) + "\n")


def read(folder: Path) -> tuple[dict[Role, str] | None, str | None]:
    """The roles and the chat template in the files beside a tokenizer.json; None where there are none."""
    text = read_text(folder / FILE)
    if text is None:
        return None, read_text(folder / "chat_template.jinja")
    settings = untrusted.parse_json(text, str(folder / FILE), TokenizerError)
    if not isinstance(settings, dict):
        raise TokenizerError(f"{folder / FILE}: expected a JSON object")
    roles: dict[Role, str] = {}
    for role in ROLES:
        token = settings.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            roles[role] = token
    template = _template(settings.get("chat_template"))
    return roles, template or read_text(folder / "chat_template.jinja")


def _template(value: object) -> str | None:
    """A template, or the one named default where there are several."""
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = named[-1].get("template") if named else None
    return value if isinstance(value, str) else None


def read_text(path: Path) -> str | None:
    """The text of a file, or None where there is none."""
    return untrusted.read_text(path, TokenizerError) if os.path.lexists(path) else None
