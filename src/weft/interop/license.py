"""The license of a model, from the front matter of its README.md (Hugging Face) or from GGUF keys.

It is kept as the hub's fields `license`, `license_name` and `license_link`; implausible values are dropped.
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


def license_of_folder(folder: Path) -> dict[str, str]:
    """License fields of a folder's README.md; {} if there are none."""
    try:
        text = read_bytes(folder / README).decode("utf-8", "replace") if (folder / README).is_file() else ""
    except InteropError:  # an unreadable README is no reason to refuse a model
        return {}
    match = FRONT_MATTER.match(text)
    return _valid({field: _yaml_value(match[1], field) for field in FIELDS}) if match else {}


def _yaml_value(front_matter: str, field: str) -> str:
    """Value of a YAML field: a plain or quoted scalar, alone or as the first item of a list."""
    match = re.search(rf"^{field}:[ \t]*(?:\r?\n[ \t]*-[ \t]+)?\[?[ \t]*([^\r\n]*)", front_matter, re.MULTILINE)
    value = re.sub(r"(?:^|\s)#.*", "", match[1]).strip() if match else ""
    quoted = re.match(r"([\"'])(.*?)\1", value)
    return quoted[2] if quoted else re.split(r"[,\]]", value)[0].strip()


def license_from_keys(keys: Mapping[str, Any]) -> dict[str, str]:
    """License fields of the keys of a GGUF file."""
    return _valid({field: keys.get(key) for field, key in GGUF_KEYS.items()})


def license_keys(fields: Mapping[str, str]) -> dict[str, str]:
    """GGUF keys of license fields."""
    return {GGUF_KEYS[field]: value for field, value in _valid(fields).items()}


def _valid(fields: Mapping[str, Any]) -> dict[str, str]:
    known = {field: fields.get(field) for field in FIELDS}
    return {name: text for name, text in known.items() if isinstance(text, str) and FIELDS[name].fullmatch(text)}
