"""The license that a model's files name: in the front matter of a README.md (Hugging Face), or in GGUF's keys.

It is kept as the hub's own fields, `license`, `license_name` and `license_link`, and only where they look like such.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import InteropError
from weft.storage.untrusted import read_bytes

README = "README.md"
FIELDS = {
    "license": re.compile(r"[A-Za-z0-9][\w.+-]{0,63}"),
    "license_name": re.compile(r"[A-Za-z0-9][\w .+-]{0,99}"),
    "license_link": re.compile(r"https?://[^\s\"'<>()\[\]`\\|]{1,300}"),
}
GGUF_KEYS = {field: f"general.{field.replace('_', '.')}" for field in FIELDS}
FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.{0,100000}?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)


def in_folder(folder: Path) -> dict[str, str]:
    """What a folder's README.md says; nothing where there is none, or it says nothing."""
    try:
        text = read_bytes(folder / README).decode("utf-8", "replace") if (folder / README).is_file() else ""
    except InteropError:  # a README is no reason to refuse a model
        return {}
    matter = FRONT_MATTER.match(text)
    return _checked({field: _value(matter[1], field) for field in FIELDS}) if matter else {}


def _value(matter: str, field: str) -> str:
    """A field of YAML: a word or a text in quotes, alone or as the first of a list."""
    found = re.search(rf"^{field}:[ \t]*(?:\r?\n[ \t]*-[ \t]+)?\[?[ \t]*([^\r\n]*)", matter, re.MULTILINE)
    value = re.sub(r"(?:^|\s)#.*", "", found[1]).strip() if found else ""
    quoted = re.match(r"([\"'])(.*?)\1", value)
    return quoted[2] if quoted else re.split(r"[,\]]", value)[0].strip()


def in_keys(keys: Mapping[str, Any]) -> dict[str, str]:
    """What the keys of a GGUF file say."""
    return _checked({field: keys.get(key) for field, key in GGUF_KEYS.items()})


def to_keys(found: Mapping[str, str]) -> dict[str, str]:
    """The keys of a GGUF file."""
    return {GGUF_KEYS[field]: value for field, value in _checked(found).items()}


def _checked(found: Mapping[str, Any]) -> dict[str, str]:
    known = {field: found.get(field) for field in FIELDS}
    return {name: text for name, text in known.items() if isinstance(text, str) and FIELDS[name].fullmatch(text)}
