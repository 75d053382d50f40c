"""Documents from files, folders, globs, standard input, the built-in corpus and the Hugging Face hub.

Any file whose bytes are text is read, whatever it is called. Everything is streamed. A text file is cut into sections
of at most `section` bytes, so that a file of one line of two gigabytes needs no more memory than a short one; the
sections of a file, put together, are the file (less a byte order mark). A row of JSONL, CSV or Parquet is a document;
one longer than 16 KiB is cut in the same way. Sections are what is held out or not; encoded is the document as a whole.
"""

import glob
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from weft.data.rows import TABLES, Malformed, MissingColumnError, records
from weft.data.streams import PACKED, blocks, decode, format_of, what_is_no_text
from weft.errors import DataError, hub_failure, suggestion
from weft.progress import warn
from weft.text import builtin

SECTION = 16 * 1024  # bytes of text in a section, at most

# suffixes of files, not of a dataset's name on the hub; what is text is decided by its bytes
USUAL = (".txt", ".md", ".py", ".log", ".tex", ".html", ".rst", *TABLES)
HUB = (".txt", *TABLES)  # of a dataset's repository, in which a README is no data
NAMED = 5  # files that a message names


@dataclass(frozen=True, slots=True)
class Document:
    """A document, or a section of a long one; `ends` where the document ends with it."""

    text: str
    source: str
    ends: bool


def is_plain(source: str) -> bool:
    """Whether a source is plain text for certain: a file that is no table, or standard input."""
    kind = format_of(source)
    return source == "-" or (kind not in TABLES and (kind in USUAL or os.path.isfile(source)))


def read(
    sources: Sequence[str], column: str = "text", *, section: int = SECTION, encoding: str = "utf-8"
) -> Iterator[Document]:
    """The documents of all sources, in order. What can't be read raises DataError when the iterator gets there."""
    found = False
    for line in left_out(sources, column, encoding):
        warn(line)
    for name in files(sources, column, encoding):
        held = False
        for document in read_file(name, column, section, encoding):
            held = True
            found = found or not document.text.isspace()
            yield document
        if not held and name in sources:
            raise DataError(f"{name}: contains no text")
    if not found:
        raise DataError(f"{', '.join(sources) or 'no source given'}: no text at all")


# ---- which files a source stands for


def files(sources: Sequence[str], column: str | None = None, encoding: str = "utf-8") -> list[str]:
    """The single files (or `-`, `builtin:…`, `hub:…` names) that the sources stand for, in reading order.

    What a folder or a pattern names besides is left out; where the text of tables is in a `column`, so are tables
    without it, such as the settings of a program among its code.
    """
    return [name for source in sources for name in _expand(source, column, encoding)]


def left_out(sources: Sequence[str], column: str | None = None, encoding: str = "utf-8") -> list[str]:
    """A line for each folder and pattern among the sources of which something isn't read: what, and why."""
    found = ((source, _search(source, column, encoding)[1]) for source in sources)
    return [_left_out(source, others) for source, others in found if others]


def _left_out(source: str, others: Mapping[str, Sequence[str]]) -> str:
    return f"{source}: left out {_named(others)}"


def _named(others: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(
        f"{', '.join(names[:NAMED])}{f' and {len(names) - NAMED} more' if len(names) > NAMED else ''} ({why})"
        for why, names in others.items()
    )


def _search(source: str, column: str | None, encoding: str) -> tuple[list[str], dict[str, list[str]]]:
    """The files that a folder or a pattern stands for; and for each reason to leave something out, the names."""
    found, others = _named_by(source)
    tables = [path for path in found if column is not None and format_of(path) in TABLES]
    reasons = {path: why for path in tables if (why := _no_texts(path, column or "", encoding)) is not None}
    if not reasons or len(reasons) == len(found):
        return found, others  # where none has the column, reading the first one says which there are
    for path, why in reasons.items():
        others.setdefault(why, []).append(os.path.relpath(path, source) if os.path.isdir(source) else path)
    return [path for path in found if path not in reasons], others


def _named_by(source: str) -> tuple[list[str], dict[str, list[str]]]:
    """The same, whatever tables hold."""
    if source == "-" or source.startswith(("builtin:", "hub:")):
        return [], {}
    if os.path.isdir(source):
        return _in_folder(source)
    if os.path.exists(source) or not glob.has_magic(source):
        return [], {}
    matches = sorted(glob.glob(source, recursive=True))
    found: list[str] = []
    others: dict[str, list[str]] = {}
    for path in matches:
        if os.path.isdir(path):
            why = None if "**" in source else "not a file"
        elif (why := _unread(path)) is None:
            found.append(path)
        if why is not None:
            others.setdefault(why, []).append(path)
    return found, others


def _expand(source: str, column: str | None, encoding: str) -> list[str]:
    if source == "-" or source.startswith(("builtin:", "hub:")):
        return [source]
    if os.path.isdir(source):
        found, others = _search(source, column, encoding)
        if not found and os.path.exists(os.path.join(source, "plan.json")):
            raise DataError(f"{source}: already prepared tokens, not text; train on them with data.prepared={source}")
        if not found:
            inside = f" ({_named(others)})" if others else ""
            raise DataError(f"{source}: contains no text{inside}")
        return found
    if os.path.exists(source):
        if (what := _no_text(source)) is not None:
            raise DataError(f"{source}: {what}, not text")
        return [source]
    if glob.has_magic(source):
        matches, others = _search(source, column, encoding)
        if not matches:
            raise DataError(f"{source}: no file {'that matches is text' if 'not text' in others else 'matches'}")
        return matches
    if _names_hub(source):
        return [f"hub:{source}"]
    raise no_such_file(source)


def no_such_file(source: str) -> DataError:
    """The error for a file that is missing, with the nearest name in its folder."""
    folder = os.path.dirname(source)
    try:
        nearby = [os.path.join(folder, name) for name in os.listdir(folder or ".")]
    except OSError:
        nearby = []
    near = suggestion(source, nearby, what="files here")
    return DataError(f"{source}: no such file{near and f'; {near}'}")


def _in_folder(folder: str) -> tuple[list[str], dict[str, list[str]]]:
    """The files in a folder that are read, in order; the others by the reason, but for hidden ones."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}")

    found: list[str] = []
    others: dict[str, list[str]] = {}
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        made = _made_by_weft(parent, names)
        if made:
            folders.clear()
        inside = [parent] if made else [os.path.join(parent, name) for name in sorted(names) if name[0] != "."]
        links = (path for path in (os.path.join(parent, name) for name in folders) if os.path.islink(path))
        for path in (*inside, *links):
            if (why := _unread(path)) is None:
                found.append(path)
            else:
                others.setdefault(why, []).append(os.path.relpath(path, folder))
    return sorted(found), others


def _unread(path: str) -> str | None:
    """Why something in a folder isn't read; None for a file that is."""
    if os.path.isdir(path):
        return "a link to a folder; name it as well" if os.path.islink(path) else "made by weft"
    if not os.path.isfile(path):
        return "not a file"
    return None if _no_text(path) is None else "not text"


def _no_text(path: str) -> str | None:
    """What a file looks like where it isn't text, by its beginning. Tables are what their suffix says."""
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
            _field(row, column, f"{path}:{number}")
            break
    except MissingColumnError:
        return f"no column '{column}'; data.column names another"
    except DataError:
        return "no rows of text" if format_of(path) == ".json" else None
    return None


def _made_by_weft(folder: str, names: Sequence[str]) -> bool:
    """Is this a prepared folder or a run? Their JSON is no text, though it may lie among the sources."""
    if "plan.json" in names:
        with open(os.path.join(folder, "plan.json"), "rb") as stream:
            return b'"weft plan"' in stream.read(64)
    return {"config.toml", "tokenizer.json"} <= set(names)


def _names_hub(source: str) -> bool:
    """`owner/name` is a dataset on the hub unless it looks like a path that was mistyped."""
    owner = source.partition("/")[0]
    known = format_of(source) in USUAL or source.endswith(PACKED)
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source)) and not known and not os.path.isdir(owner)


def stamps(sources: Sequence[str]) -> list[list[Any]]:
    """[name, size in bytes, what changes when the content does] for each file; of '-' nothing is known."""
    return [stamp(name) for name in files(sources)]


def stamp(name: str) -> list[Any]:
    """The same for a single file."""
    if name == "-":
        return [name, 256 * 1024, uuid.uuid4().hex]
    if name.startswith("builtin:"):
        corpus = builtin.corpus(name)
        return [name, sum(len(text.encode()) for text in corpus.documents), corpus.sha256]
    if name.startswith("hub:"):
        return [name, 256 * SECTION, ""]
    try:
        status = os.stat(name)
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror}") from None
    return [os.path.abspath(name), status.st_size, status.st_mtime_ns]


# ---- one file


def read_file(name: str, column: str, section: int, encoding: str) -> Iterator[Document]:
    """The documents of one of those that `files` names; the last section of a file ends a document."""
    if name.startswith("builtin:"):
        for text in builtin.corpus(name).documents:
            yield from _sections_of(text, name)
        return
    if name.startswith("hub:"):
        for path in _download(name.removeprefix("hub:")):
            yield from read_file(path, column, section, encoding)
        return
    if name != "-" and format_of(name) in TABLES:
        try:
            for number, row in records(name, [column], encoding=encoding):
                yield from _sections_of(_field(row, column, f"{name}:{number}"), name)
        except MissingColumnError as error:
            advice = "choose one with data.column=NAME (weft prepare: --column NAME)"
            raise MissingColumnError(error.line, column, advice) from None
    else:
        yield from _cut(blocks(name, encoding), name, section)


def _field(row: Any, column: str, where: str) -> str:
    """The text of a row that is an object, or a string itself. No value is no text."""
    if isinstance(row, Malformed):
        raise DataError(f"{where}: {row.reason}")
    if isinstance(row, dict):
        if column not in row:
            raise MissingColumnError.among(column, row, where)
        row = row[column]
    if row is not None and not isinstance(row, str):
        raise DataError(f"{where}: '{column}' holds {type(row).__name__}, not text")
    return row or ""


# ---- sections


def _sections_of(text: str, name: str) -> Iterator[Document]:
    """The sections of a document that is in memory as a whole; nearly always it is one."""
    if "\0" in text:
        raise DataError(f"{name}: a document contains a NUL character, at its character {text.index(chr(0))}")
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which no text can hold
        raise DataError(f"{name}: a document contains a lone surrogate, at its character {error.start}") from None
    yield from _cut((encoded,), name, SECTION)


def _cut(blocks: Iterable[bytes], name: str, section: int) -> Iterator[Document]:
    """One document's bytes as sections of at most `section` bytes; the last one `ends`."""
    assert section >= 16
    waiting = b""
    offset = 0  # of `waiting` in the text
    for block in blocks:
        waiting += block
        start = 0
        while len(waiting) - start > section:
            stop = _cut_point(waiting, start, section)
            yield Document(decode(waiting[start:stop], name, offset + start), name, False)
            start = stop
        waiting = waiting[start:]
        offset += start
    if waiting:
        yield Document(decode(waiting, name, offset), name, True)


def _cut_point(text: bytes, start: int, section: int) -> int:
    """Where the section from `start` ends: after a blank line, a line, before a space, or wherever it must.

    Only the second half of the section is searched, so that sections don't become short.
    """
    end = start + section
    half = start + section // 2
    blank = max(text.rfind(b"\n\n", half, end) + 2, text.rfind(b"\n\r\n", half, end) + 3)
    if blank >= half + 2:
        return blank
    if (line := text.rfind(b"\n", half, end)) >= 0:
        return line + 1
    if (space := max(text.rfind(b" ", half, end), text.rfind(b"\t", half, end))) > start:
        return space
    stop = end
    while stop > end - 3 and text[stop] & 0xC0 == 0x80:  # not inside a UTF-8 character
        stop -= 1
    if text[stop - 1 : stop + 1] == b"\r\n":
        stop -= 1
    return stop


# ---- the hub


def _download(repository: str) -> Iterator[str]:
    """The data files of a hub dataset, one after another; the training files alone if some are named so."""
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
        for name in data:
            yield huggingface_hub.hf_hub_download(repository, name, repo_type="dataset")
    except DataError:
        raise
    except Exception as error:  # the client, its HTTP library and the system each have errors of their own
        raise DataError(f"{repository}: no such file here, and {hub_failure(error)}") from None


def hub_sizes(name: str) -> list[tuple[str, int]]:
    """(file, bytes) of what would be read of `hub:NAME`, as far as the hub says; an error is left to the reading."""
    try:
        import huggingface_hub

        repository = name.removeprefix("hub:")
        listed = huggingface_hub.HfApi().dataset_info(repository, files_metadata=True).siblings
    except Exception:  # no client, no connection, no such dataset
        return []
    sizes = {file.rfilename: file.size or 0 for file in listed or ()}
    return [(file, sizes[file]) for file in _data_files(sizes)]


def _data_files(names: Iterable[str]) -> list[str]:
    readable = [name for name in sorted(names) if format_of(name) in HUB]
    data = [name for name in readable if os.path.basename(name) != "dataset_infos.json"]
    return [name for name in data if "train" in name] or data
