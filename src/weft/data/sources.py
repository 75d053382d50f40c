"""Sources of text: a file, a folder, a glob, standard input, a built-in corpus or a hub dataset.

Any file whose bytes are text is read, whatever its name; tables are recognised by their suffix. Documents are streamed:
a text file is divided into sections of at most `section` bytes, so that a single line of two gigabytes needs no more
memory than a short file. The sections of a file, concatenated, are the file (without a byte order mark). A row of
JSONL, CSV or Parquet is a document, divided likewise if it is longer than 16 KiB. Sections are held out or trained on;
documents are encoded as a whole.
"""

import fnmatch
import glob
import os
import re
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from weft.data.rows import TABLES, MissingColumnError, SeparatorError, records, text_of
from weft.data.streams import COMPRESSED, blocks, decode, describe_non_text_file, format_of, no_such_file
from weft.errors import DataError, hub_failure, os_errors
from weft.progress import warn
from weft.storage.files import open_regular
from weft.text import builtin

# suffixes of files, as opposed to names of hub datasets; whether a file is text is decided by its bytes
SUFFIXES = (".txt", ".md", ".py", ".log", ".tex", ".html", ".rst", *TABLES)
HUB = (".txt", *TABLES)  # data files in the repository of a hub dataset; its README is not data
MAX_LISTED = 5  # files listed in a message
UNKNOWN_BYTES = 256 * 1024  # assumed size of standard input
HUB_BYTES = 4 * 1024 * 1024  # assumed size of a hub dataset
SECTION = 16 * 1024  # maximum bytes of text in a section


def is_plain(source: str) -> bool:
    """Return whether a source is certainly plain text: a file that is not a table, or standard input."""
    kind = format_of(source)
    return source == "-" or (kind not in TABLES and (kind in SUFFIXES or os.path.isfile(source)))


def find_files(
    sources: Sequence[str],
    column: str | None = None,
    encoding: str = "utf-8",
    *,
    log: Callable[[str], None] = lambda line: None,
    held_out: Sequence[str] = (),
) -> list[str]:
    """List the files (or `-`, `builtin:…`, `hub:…` names) of all sources, in reading order.

    A file is listed once, even if several names and links lead to it, and never if it is among the `held_out` sources.
    Files of a folder or a pattern that are not text are skipped; if `column` is given, so are tables without it, such
    as a program's settings beside its code. `log` is called with a line that lists the skipped files and the reasons.
    """
    names: list[str] = []
    validation = {identity(name) for name in find_files(held_out)} - {None} if held_out else set()
    seen: set[tuple[int, int] | None] = set()
    for source in sources:
        matches, skipped = _expand(source, column, encoding)
        new: list[str] = []
        for name in sorted(matches, key=os.path.islink):  # prefer a file's own name to a link
            file = identity(name)
            if file is None or (file not in validation and file not in seen):
                new.append(name)
            else:
                why = "held out for validation" if file in validation else "the same file as another that is read"
                skipped.setdefault(why, []).append(_shown(name, source))
            seen.add(file)
        if skipped:
            log(f"{source}: skipped {_listed(skipped)}")
        names += sorted(new)
    if validation and sources and not names:
        raise DataError(f"{', '.join(sources)}: held out for validation, all of it; name other text to train on")
    return names


def _shown(path: str, source: str) -> str:
    return os.path.relpath(path, source) if os.path.isdir(source) else path


def _listed(skipped: Mapping[str, Sequence[str]]) -> str:
    parts = []
    for why, names in skipped.items():
        more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        parts.append(f"{', '.join(names[:MAX_LISTED])}{more} ({why})")
    return "; ".join(parts)


def _expand(source: str, column: str | None, encoding: str) -> tuple[list[str], dict[str, list[str]]]:
    """Files of one source, and the names of the skipped ones by reason."""
    if source == "-" or source.startswith(("builtin:", "hub:")):
        return [source], {}
    folder = os.path.isdir(source)
    if not folder and os.path.exists(source):
        if not os.path.isfile(source):
            advice = "save its output to a file, or prepare it once: weft prepare - < PIPE"
            raise DataError(f"{source}: a pipe or a device, but text is read more than once; {advice}")
        if (what := _describe_non_text(source)) is not None:
            raise DataError(f"{source}: {what}, not text")
        return [source], {}
    if not folder and not glob.has_magic(source):
        # `owner/name` is a dataset on the hub unless it looks like a mistyped path
        mistyped = format_of(source) in SUFFIXES or source.endswith(COMPRESSED)
        mistyped = mistyped or os.path.isdir(source.partition("/")[0])
        if not mistyped and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source):
            return [f"hub:{source}"], {}
        raise no_such_file(source)
    matches: list[str] = []
    skipped: dict[str, list[str]] = {}
    for path, reason in _walk(source) if folder else find_matches(source):
        why = reason or ("not a file" if not os.path.isfile(path) else "not text" if _describe_non_text(path) else None)
        if why is None:
            matches.append(path)
        else:
            skipped.setdefault(why, []).append(_shown(path, source))
    if not matches and not folder:
        raise DataError(f"{source}: no file {'that matches is text' if 'not text' in skipped else 'matches'}")
    if not matches and os.path.exists(os.path.join(source, "plan.json")):
        raise DataError(f"{source}: already prepared tokens, not text; train on them with data.prepared={source}")
    if not matches:
        raise DataError(f"{source}: contains no text{f' ({_listed(skipped)})' if skipped else ''}")
    tables = [path for path in matches if column is not None and format_of(path) in TABLES]
    reasons = {path: why for path in tables if (why := _why_no_column(path, column or "", encoding)) is not None}
    if len(reasons) < len(matches):  # otherwise reading the first table reports its columns
        for path, why in reasons.items():
            skipped.setdefault(why, []).append(_shown(path, source))
        matches = [path for path in matches if path not in reasons]
    return sorted(matches), skipped


def _walk(folder: str) -> Iterator[tuple[str, str | None]]:
    """Yield the paths of a folder, hidden ones excepted, each with the reason to skip it, or None."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}")

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        # the JSON files of a run or a prepared folder are not text to train on
        made_by_weft = "tokenizer.json" in names and not {"config.toml", "events.jsonl"}.isdisjoint(names)
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


def _describe_non_text(path: str) -> str | None:
    if format_of(path) in TABLES or not os.path.isfile(path):
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None  # reading the file will report it
    return describe_non_text_file(path, status.st_size, status.st_mtime_ns)


def _why_no_column(path: str, column: str, encoding: str) -> str | None:
    """Reason why a table has no text in `column`, from its first row; None if it has, or if reading will report it."""
    try:
        for number, row in records(path, [column], encoding=encoding):
            text_of(row, column, f"{path}:{number}")
            break
    except (MissingColumnError, SeparatorError):
        return f"no column '{column}'; data.column names another"
    except DataError:
        return "no rows of text" if format_of(path) == ".json" else None
    return None


def stamps(sources: Sequence[str], held_out: Sequence[str] = ()) -> list[list[Any]]:
    """[name, size in bytes, value that changes with the content] for each file of the sources."""
    return [stamp(name) for name in find_files(sources, held_out=held_out)]


def stamp(name: str) -> list[Any]:
    """[name, size in bytes, value that changes with the content] of one file; standard input is always new."""
    if name == "-":
        return [name, UNKNOWN_BYTES, uuid.uuid4().hex]
    if name.startswith("builtin:"):
        corpus = builtin.corpus(name)
        return [name, sum(len(text.encode()) for text in corpus.documents), corpus.sha256]
    if name.startswith("hub:"):
        return [name, HUB_BYTES, ""]
    with os_errors(name):
        status = os.stat(name)
    return [os.path.abspath(name), status.st_size, status.st_mtime_ns]


def hub_files(name: str) -> Iterator[str]:
    """Download the data files of `hub:NAME` and yield their paths; only training files if some are named so."""
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
    except Exception as error:  # the client, its HTTP library and the system each raise different errors
        raise DataError(f"{repository}: no such file here, and {hub_failure(error)}") from None


def hub_sizes(name: str) -> list[tuple[str, int]]:
    """(file, bytes) of the data files of `hub:NAME`; [] if the hub cannot be reached, which reading will report."""
    try:
        import huggingface_hub

        siblings = huggingface_hub.HfApi().dataset_info(name.removeprefix("hub:"), files_metadata=True).siblings
    except Exception:  # no client, no connection, no such dataset
        return []
    sizes = {file.rfilename: file.size or 0 for file in siblings or ()}
    return [(file, sizes[file]) for file in _data_files(sizes)]


def _data_files(names: Iterable[str]) -> list[str]:
    readable = [name for name in sorted(names) if format_of(name) in HUB]
    data = [name for name in readable if os.path.basename(name) != "dataset_infos.json"]
    return [name for name in data if "train" in name] or data


class Document(NamedTuple):
    """A document or one section of it; `ends` is True for a document's last section."""

    text: str
    ends: bool


def read_documents(
    sources: Sequence[str],
    column: str = "text",
    *,
    section: int = SECTION,
    encoding: str = "utf-8",
    held_out: Sequence[str] = (),
) -> Iterator[Document]:
    """Yield the documents of all sources, in order; DataError when an unreadable one is reached."""
    has_text = False
    for name in find_files(sources, column, encoding, log=warn, held_out=held_out):
        is_empty = True
        for document in read_file(name, column, section, encoding=encoding):
            is_empty = False
            has_text = has_text or not document.text.isspace()
            yield document
        if is_empty and name in sources:
            raise DataError(f"{name}: contains no text")
    if not has_text:
        raise DataError(f"{', '.join(sources) or 'no source given'}: no text at all")


def read_file(name: str, column: str, section: int, *, encoding: str) -> Iterator[Document]:
    """Yield the documents of one name from `find_files`; the last section of a file ends a document."""
    if name.startswith("builtin:"):
        for text in builtin.corpus(name).documents:
            yield from _divide_text(text, name)
    elif name.startswith("hub:"):
        for path in hub_files(name):
            yield from read_file(path, column, section, encoding=encoding)
    elif name != "-" and format_of(name) in TABLES:
        try:
            for number, row in records(name, [column], encoding=encoding):
                yield from _divide_text(text_of(row, column, f"{name}:{number}"), name)
        except MissingColumnError as error:
            advice = "choose one with data.column=NAME (weft prepare: --column NAME)"
            raise MissingColumnError(error.line, column, advice) from None
    else:
        yield from _divide(blocks(name, encoding), name, section)


def _divide_text(text: str, name: str) -> Iterator[Document]:
    """Divide a document in memory into sections; nearly always there is only one."""
    if "\0" in text:
        raise DataError(f"{name}: a document contains a NUL character, at its character {text.index(chr(0))}")
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair, which no text can contain
        raise DataError(f"{name}: a document contains a lone surrogate, at its character {error.start}") from None
    yield from _divide((encoded,), name, SECTION)


def _divide(blocks: Iterable[bytes], name: str, section: int) -> Iterator[Document]:
    """Divide one document's bytes into sections of at most `section` bytes; the last one `ends`."""
    assert section >= 16
    buffer, offset = b"", 0  # offset of the buffer in the text
    for block in blocks:
        buffer += block
        start = 0
        while len(buffer) - start > section:
            stop = _section_end(buffer, start, section)
            yield Document(decode(buffer[start:stop], name, offset + start), ends=False)
            start = stop
        buffer = buffer[start:]
        offset += start
    if buffer:
        yield Document(decode(buffer, name, offset), ends=True)


def _section_end(text: bytes, start: int, section: int) -> int:
    """End of the section that begins at `start`: after a blank line, after a line, before a space, or at the maximum.
    Only the second half of the section is searched, so that sections don't become short."""
    end, half = start + section, start + section // 2
    blank = max(text.rfind(b"\n\n", half, end) + 2, text.rfind(b"\n\r\n", half, end) + 3)
    if blank >= half + 2:
        return blank
    if (line := text.rfind(b"\n", half, end)) >= 0:
        return line + 1
    if (space := max(text.rfind(b" ", half, end), text.rfind(b"\t", half, end))) > start:
        return space
    stop = end
    while stop > end - 3 and text[stop] & 0xC0 == 0x80:  # never inside a UTF-8 character
        stop -= 1
    if text[stop - 1 : stop + 1] == b"\r\n":
        stop -= 1
    return stop


def identity(path: str) -> tuple[int, int] | None:
    """Device and inode of a file or folder, independent of its name; None for anything else."""
    if not os.path.isfile(path) and not os.path.isdir(path):
        return None
    status = os.stat(path)
    return status.st_dev, status.st_ino


def find_matches(pattern: str) -> Iterator[tuple[str, str | None]]:
    """Yield the sorted paths that match, each with None; then skipped links to folders below `**`, with the reason.

    As `glob` does, but each folder is visited once: links to a parent would never end.
    """
    parts = pattern.replace(os.sep, "/").split("/")
    if "**" not in parts:
        yield from ((path, None) for path in sorted(glob.glob(pattern)))
        return
    at = parts.index("**")
    matches, repeated = set[str](), set[str]()
    visited = set[tuple[tuple[int, int] | None, int]]()  # folders, each with the number of parts that follow `**`
    queue = deque((folder, parts[at:]) for folder in (glob.glob("/".join([*parts[:at], ""])) if at else [""]))
    while queue:
        folder, (part, *tail) = queue.popleft()
        if part == "**":
            state = identity(folder or "."), len(tail)
            if state in visited:
                repeated |= {folder} if os.path.islink(folder) else set()
                continue
            visited.add(state)
            if tail:
                queue.appendleft((folder, tail))
        for path in _entries(folder, part):
            if not os.path.isdir(path):
                matches |= set() if tail else {path}
            elif part == "**" or tail:
                # links last, so that a folder that also has a link is found under its own name
                add = queue.append if os.path.islink(path) else queue.appendleft
                add((path, [part, *tail] if part == "**" else tail))
    yield from ((path, None) for path in sorted(matches))
    yield from ((path, "a link to a folder that is read already") for path in sorted(repeated))


def _entries(folder: str, part: str) -> list[str]:
    """Paths in a folder that match one part of a pattern; hidden files only if the part begins with a dot."""
    if part != "**" and not glob.has_magic(part):
        return [path] if os.path.lexists(path := os.path.join(folder, part)) else []
    with suppress(OSError):  # an unreadable folder has no entries, as for `glob`
        names = (name for name in os.listdir(folder or ".") if name[0] != "." or part[0] == ".")
        return [os.path.join(folder, name) for name in names if fnmatch.fnmatch(name, part)]
    return []
