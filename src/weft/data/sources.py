"""Which files a source stands for: a file, a folder, a glob, standard input, a built-in corpus, a hub dataset.

Any file whose bytes are text is read, whatever it is called. Tables are what their suffix says. Documents are streamed:
a text file is cut into sections of at most `section` bytes, so that a file of one line of two gigabytes needs no more
memory than a short one; the sections of a file, put together, are the file (less a byte order mark). A row of JSONL,
CSV or Parquet is a document; one longer than 16 KiB is cut in the same way. Sections are what is held out or not;
encoded is the document as a whole.
"""

import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from weft.data.patterns import identity, is_pattern, matching
from weft.data.rows import TABLES, MissingColumnError, SeparatorError, records, text_of
from weft.data.streams import PACKED, blocks, decode, format_of, what_is_no_text
from weft.errors import DataError, download_first, hub_failure, suggestion
from weft.progress import warn
from weft.storage.files import open_regular
from weft.text import builtin

# suffixes of files, not of a dataset's name on the hub; what is text is decided by its bytes
USUAL = (".txt", ".md", ".py", ".log", ".tex", ".html", ".rst", *TABLES)
HUB = (".txt", *TABLES)  # of a dataset's repository, in which a README is no data
NAMED = 5  # files that a message names
UNKNOWN_BYTES = 256 * 1024  # that standard input counts as
HUB_BYTES = 4 * 1024 * 1024  # that a hub dataset counts as
SECTION = 16 * 1024  # bytes of text in a section, at most


def is_plain(source: str) -> bool:
    """Whether a source is plain text for certain: a file that is no table, or standard input."""
    kind = format_of(source)
    return source == "-" or (kind not in TABLES and (kind in USUAL or os.path.isfile(source)))


def files(
    sources: Sequence[str],
    column: str | None = None,
    encoding: str = "utf-8",
    tell: Callable[[str], None] = lambda line: None,
    held_out: Sequence[str] = (),
) -> list[str]:
    """The single files (or `-`, `builtin:…`, `hub:…` names) that the sources stand for, in reading order.

    A file is read once, however many names and links lead to it, and not at all where it is among the `held_out`
    sources. What a folder or a pattern names besides is left out; where the text of tables is in a `column`, so are
    tables without it, such as the settings of a program among its code. `tell` gets a line about it: what, and why.
    """
    names: list[str] = []
    apart = {identity(name) for name in files(held_out)} - {None} if held_out else set()
    seen: set[tuple[int, int] | None] = set()
    for source in sources:
        found, others = _find(source, column, encoding)
        new: list[str] = []
        for name in sorted(found, key=os.path.islink):  # a file by its own name, where it has both
            file = identity(name)
            if file is None or (file not in apart and file not in seen):
                new.append(name)
            else:
                why = "held out for validation" if file in apart else "the same file as another that is read"
                others.setdefault(why, []).append(_shown(name, source))
            seen.add(file)
        if others:
            tell(f"{source}: left out {_listed(others)}")
        names += sorted(new)
    if apart and sources and not names:
        raise DataError(f"{', '.join(sources)}: held out for validation, all of it; name other text to train on")
    return names


def _shown(path: str, source: str) -> str:
    return os.path.relpath(path, source) if os.path.isdir(source) else path


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
        if not os.path.isfile(source):
            cure = "save what it gives to a file, or prepare it once: weft prepare - < PIPE"
            raise DataError(f"{source}: a pipe or a device, which can't be read twice as text is; {cure}")
        if (what := _no_text(source)) is not None:
            raise DataError(f"{source}: {what}, not text")
        return [source], {}
    if not folder and not is_pattern(source):
        # `owner/name` is a dataset on the hub unless it looks like a path that was mistyped
        mistyped = format_of(source) in USUAL or source.endswith(PACKED) or os.path.isdir(source.partition("/")[0])
        if not mistyped and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source):
            return [f"hub:{source}"], {}
        raise no_such_file(source)
    found: list[str] = []
    others: dict[str, list[str]] = {}
    for path, reason in _in_folder(source) if folder else matching(source):
        why = reason or ("not a file" if not os.path.isfile(path) else "not text" if _no_text(path) else None)
        if why is None:
            found.append(path)
        else:
            others.setdefault(why, []).append(_shown(path, source))
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
            others.setdefault(why, []).append(_shown(path, source))
        found = [path for path in found if path not in reasons]
    return sorted(found), others


def _in_folder(folder: str) -> Iterator[tuple[str, str | None]]:
    """What is in a folder, but for hidden files, and the reason why a folder in it isn't read."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}")

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        # a prepared folder, or a run: their JSON is no text, though it may lie among the sources
        made_by_weft = {"config.toml", "tokenizer.json"} <= set(names)
        if "plan.json" in names:
            made_by_weft = False
            with suppress(OSError), open_regular(Path(parent, "plan.json")) as stream:
                made_by_weft = b'"weft plan"' in stream.read(64)
        if made_by_weft:
            folders.clear()
            yield parent, "made by weft"
            continue
        yield from ((os.path.join(parent, name), None) for name in sorted(names) if name[0] != ".")
        paths = (os.path.join(parent, name) for name in folders)
        yield from ((path, "a link to a folder; name it as well") for path in paths if os.path.islink(path))


def _no_text(path: str) -> str | None:
    if format_of(path) in TABLES or not os.path.isfile(path):
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None  # reading it says what is wrong
    return what_is_no_text(path, status.st_size, status.st_mtime_ns)


def _no_texts(path: str, column: str, encoding: str) -> str | None:
    """Why a table has no text for us, by its first row; None where it has, or where reading it says what is wrong."""
    try:
        for number, row in records(path, [column], encoding=encoding):
            text_of(row, column, f"{path}:{number}")
            break
    except (MissingColumnError, SeparatorError):
        return f"no column '{column}'; data.column names another"
    except DataError:
        return "no rows of text" if format_of(path) == ".json" else None
    return None


def no_such_file(source: str) -> DataError:
    """The error for a file that is missing, with the nearest name in its folder."""
    if "://" in source:
        return DataError(download_first(source))
    folder = os.path.dirname(source)
    try:
        nearby = [os.path.join(folder, name) for name in os.listdir(folder or ".")]
    except OSError:
        nearby = []
    near = suggestion(source, nearby, what="files here")
    return DataError(f"{source}: no such file{near and f'; {near}'}")


def stamps(sources: Sequence[str], held_out: Sequence[str] = ()) -> list[list[Any]]:
    """[name, size in bytes, what changes when the content does] for each file; of '-' nothing is known."""
    return [stamp(name) for name in files(sources, held_out=held_out)]


def stamp(name: str) -> list[Any]:
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


def hub_files(name: str) -> Iterator[str]:
    """The data files of `hub:NAME`, downloaded one after another; the training files alone if some are named so."""
    repository = name.removeprefix("hub:")
    try:
        import huggingface_hub
    except ImportError:
        needed = "a hub dataset needs huggingface_hub: pip install 'weft[hub]'"
        raise DataError(f"{repository}: no such file here; {needed}") from None
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


class Document(NamedTuple):
    """A document, or a section of a long one; `ends` where the document ends with it."""

    text: str
    ends: bool


def read(
    sources: Sequence[str],
    column: str = "text",
    *,
    section: int = SECTION,
    encoding: str = "utf-8",
    held_out: Sequence[str] = (),
) -> Iterator[Document]:
    """The documents of all sources, in order. What can't be read raises DataError when the iterator gets there."""
    found = False
    for name in files(sources, column, encoding, warn, held_out):
        held = False
        for document in read_file(name, column, section, encoding):
            held = True
            found = found or not document.text.isspace()
            yield document
        if not held and name in sources:
            raise DataError(f"{name}: contains no text")
    if not found:
        raise DataError(f"{', '.join(sources) or 'no source given'}: no text at all")


def read_file(name: str, column: str, section: int, encoding: str) -> Iterator[Document]:
    """The documents of one of those that `files` names; the last section of a file ends a document."""
    if name.startswith("builtin:"):
        for text in builtin.corpus(name).documents:
            yield from _sections_of(text, name)
    elif name.startswith("hub:"):
        for path in hub_files(name):
            yield from read_file(path, column, section, encoding)
    elif name != "-" and format_of(name) in TABLES:
        try:
            for number, row in records(name, [column], encoding=encoding):
                yield from _sections_of(text_of(row, column, f"{name}:{number}"), name)
        except MissingColumnError as error:
            advice = "choose one with data.column=NAME (weft prepare: --column NAME)"
            raise MissingColumnError(error.line, column, advice) from None
    else:
        yield from _cut(blocks(name, encoding), name, section)


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
    waiting, offset = b"", 0  # the offset is that of what waits in the text
    for block in blocks:
        waiting += block
        start = 0
        while len(waiting) - start > section:
            stop = _cut_point(waiting, start, section)
            yield Document(decode(waiting[start:stop], name, offset + start), ends=False)
            start = stop
        waiting = waiting[start:]
        offset += start
    if waiting:
        yield Document(decode(waiting, name, offset), ends=True)


def _cut_point(text: bytes, start: int, section: int) -> int:
    """Where the section from `start` ends: after a blank line, a line, before a space, or wherever it must. Only the
    second half of the section is searched, so that sections don't become short."""
    end, half = start + section, start + section // 2
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
