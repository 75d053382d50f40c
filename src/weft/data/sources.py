"""Which files a source stands for: a file, a folder, a glob, standard input, a built-in corpus, a hub dataset.

Any file whose bytes are text is read, whatever it is called. Tables are what their suffix says.
"""

import glob
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from weft.data.rows import TABLES, MissingColumnError, records, text_of
from weft.data.streams import PACKED, format_of, what_is_no_text
from weft.errors import DataError, hub_failure, suggestion
from weft.text import builtin

# suffixes of files, not of a dataset's name on the hub; what is text is decided by its bytes
USUAL = (".txt", ".md", ".py", ".log", ".tex", ".html", ".rst", *TABLES)
HUB = (".txt", *TABLES)  # of a dataset's repository, in which a README is no data
NAMED = 5  # files that a message names
UNKNOWN_BYTES = 256 * 1024  # that standard input counts as
HUB_BYTES = 4 * 1024 * 1024  # that a hub dataset counts as


def is_plain(source: str) -> bool:
    """Whether a source is plain text for certain: a file that is no table, or standard input."""
    kind = format_of(source)
    return source == "-" or (kind not in TABLES and (kind in USUAL or os.path.isfile(source)))


def files(
    sources: Sequence[str],
    column: str | None = None,
    encoding: str = "utf-8",
    tell: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """The single files (or `-`, `builtin:…`, `hub:…` names) that the sources stand for, in reading order.

    What a folder or a pattern names besides is left out; where the text of tables is in a `column`, so are tables
    without it, such as the settings of a program among its code. `tell` gets a line about it: what, and why.
    """
    names: list[str] = []
    for source in sources:
        found, others = _find(source, column, encoding)
        if others:
            tell(f"{source}: left out {_listed(others)}")
        names += found
    return names


def _listed(others: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(
        f"{', '.join(names[:NAMED])}{f' and {len(names) - NAMED} more' if len(names) > NAMED else ''} ({why})"
        for why, names in others.items()
    )


def _find(source: str, column: str | None, encoding: str) -> tuple[list[str], dict[str, list[str]]]:
    """The files that a source stands for; and for each reason to leave something out, the names."""
    if source == "-" or source.startswith(("builtin:", "hub:")):
        return [source], {}
    folder = os.path.isdir(source)
    if not folder and os.path.exists(source):
        if (what := _no_text(source)) is not None:
            raise DataError(f"{source}: {what}, not text")
        return [source], {}
    if not folder and not glob.has_magic(source):
        if _names_hub(source):
            return [f"hub:{source}"], {}
        raise no_such_file(source)
    found: list[str] = []
    others: dict[str, list[str]] = {}
    for path, reason in _in_folder(source) if folder else _matches(source):
        why = reason or ("not a file" if not os.path.isfile(path) else "not text" if _no_text(path) else None)
        if why is None:
            found.append(path)
        else:
            others.setdefault(why, []).append(os.path.relpath(path, source) if folder else path)
    if not found and not folder:
        raise DataError(f"{source}: no file {'that matches is text' if 'not text' in others else 'matches'}")
    if not found and os.path.exists(os.path.join(source, "plan.json")):
        raise DataError(f"{source}: already prepared tokens, not text; train on them with data.prepared={source}")
    if not found:
        raise DataError(f"{source}: contains no text{f' ({_listed(others)})' if others else ''}")
    tables = [path for path in found if column is not None and format_of(path) in TABLES]
    reasons = {path: why for path in tables if (why := _no_texts(path, column or "", encoding)) is not None}
    if len(reasons) < len(found):  # where none has the column, reading the first one says which there are
        for path, why in reasons.items():
            others.setdefault(why, []).append(os.path.relpath(path, source) if folder else path)
        found = [path for path in found if path not in reasons]
    return sorted(found), others


def _matches(pattern: str) -> Iterator[tuple[str, str | None]]:
    for path in sorted(glob.glob(pattern, recursive=True)):
        if not os.path.isdir(path):
            yield path, None
        elif "**" not in pattern:
            yield path, "not a file"


def _in_folder(folder: str) -> Iterator[tuple[str, str | None]]:
    """What is in a folder, but for hidden files, and the reason why a folder in it isn't read."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}")

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        if _made_by_weft(parent, names):
            folders.clear()
            yield parent, "made by weft"
            continue
        yield from ((os.path.join(parent, name), None) for name in sorted(names) if name[0] != ".")
        paths = (os.path.join(parent, name) for name in folders)
        yield from ((path, "a link to a folder; name it as well") for path in paths if os.path.islink(path))


def _made_by_weft(folder: str, names: Sequence[str]) -> bool:
    """Is this a prepared folder or a run? Their JSON is no text, though it may lie among the sources."""
    if "plan.json" in names:
        with open(os.path.join(folder, "plan.json"), "rb") as stream:
            return b'"weft plan"' in stream.read(64)
    return {"config.toml", "tokenizer.json"} <= set(names)


def _no_text(path: str) -> str | None:
    """What a file looks like where it isn't text, by its beginning."""
    if format_of(path) in TABLES or not os.path.isfile(path):
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None  # reading it says what is wrong
    return _seen(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1 << 16)
def _seen(path: str, _size: int, _changed: int) -> str | None:
    """The same, remembered while a file stays as it is: sources are listed more than once."""
    return what_is_no_text(path)


def _no_texts(path: str, column: str, encoding: str) -> str | None:
    """Why a table has no text for us, by its first row; None where it has, or where reading it says what is wrong."""
    try:
        for number, row in records(path, [column], encoding=encoding):
            text_of(row, column, f"{path}:{number}")
            break
    except MissingColumnError:
        return f"no column '{column}'; data.column names another"
    except DataError:
        return "no rows of text" if format_of(path) == ".json" else None
    return None


def no_such_file(source: str) -> DataError:
    """The error for a file that is missing, with the nearest name in its folder."""
    folder = os.path.dirname(source)
    try:
        nearby = [os.path.join(folder, name) for name in os.listdir(folder or ".")]
    except OSError:
        nearby = []
    near = suggestion(source, nearby, what="files here")
    return DataError(f"{source}: no such file{near and f'; {near}'}")


def stamps(sources: Sequence[str]) -> list[list[Any]]:
    """[name, size in bytes, what changes when the content does] for each file; of '-' nothing is known."""
    return [stamp(name) for name in files(sources)]


def stamp(name: str) -> list[Any]:
    """The same for a single file."""
    if name == "-":
        return [name, UNKNOWN_BYTES, uuid.uuid4().hex]
    if name.startswith("builtin:"):
        corpus = builtin.corpus(name)
        return [name, sum(len(text.encode()) for text in corpus.documents), corpus.sha256]
    if name.startswith("hub:"):
        return [name, HUB_BYTES, ""]
    try:
        status = os.stat(name)
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror}") from None
    return [os.path.abspath(name), status.st_size, status.st_mtime_ns]


# ---- the hub


def _names_hub(source: str) -> bool:
    """`owner/name` is a dataset on the hub unless it looks like a path that was mistyped."""
    owner = source.partition("/")[0]
    known = format_of(source) in USUAL or source.endswith(PACKED)
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source)) and not known and not os.path.isdir(owner)


def hub_files(name: str) -> Iterator[str]:
    """The data files of `hub:NAME`, downloaded one after another; the training files alone if some are named so."""
    repository = name.removeprefix("hub:")
    try:
        import huggingface_hub
    except ImportError:
        raise DataError(
            f"{repository}: no such file here; a hub dataset needs huggingface_hub: pip install 'weft[hub]'"
        ) from None
    try:
        data = _data_files(huggingface_hub.HfApi().list_repo_files(repository, repo_type="dataset"))
        if not data:
            readable = f"{' '.join(HUB)}, also with .gz or .zst"
            raise DataError(f"{repository}: the hub dataset contains no file that weft reads: {readable}")
        for file in data:
            yield huggingface_hub.hf_hub_download(repository, file, repo_type="dataset")
    except DataError:
        raise
    except Exception as error:  # the client, its HTTP library and the system each have errors of their own
        raise DataError(f"{repository}: no such file here, and {hub_failure(error)}") from None


def hub_sizes(name: str) -> list[tuple[str, int]]:
    """(file, bytes) of what would be read of `hub:NAME`, as far as the hub says; an error is left to the reading."""
    try:
        import huggingface_hub

        listed = huggingface_hub.HfApi().dataset_info(name.removeprefix("hub:"), files_metadata=True).siblings
    except Exception:  # no client, no connection, no such dataset
        return []
    sizes = {file.rfilename: file.size or 0 for file in listed or ()}
    return [(file, sizes[file]) for file in _data_files(sizes)]


def _data_files(names: Iterable[str]) -> list[str]:
    readable = [name for name in sorted(names) if format_of(name) in HUB]
    data = [name for name in readable if os.path.basename(name) != "dataset_infos.json"]
    return [name for name in data if "train" in name] or data
