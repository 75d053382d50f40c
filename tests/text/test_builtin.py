"""The corpus of Python's documentation."""

import re
import sysconfig
from pathlib import Path

import pytest

from weft.errors import DataError
from weft.text import builtin
from weft.text.grammars.sentences import PARTICLES, TALES

SOURCE = '''"""A module that must never be imported."""
raise SystemExit
class Loom:
    """Weaves.

        Indented."""
    def weave(self):
        """Weaves."""
        def shuttle():
            "Goes to and fro, \\ud800."
if True:
    async def rest():
        """Rests."""
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small standard library and an empty cache."""
    folder = tmp_path / "lib"
    (folder / "pack" / "tests").mkdir(parents=True)
    (folder / "site-packages").mkdir()
    (folder / "loom.py").write_text(SOURCE)
    (folder / "pack" / "__init__.py").write_text('"""A package."""\n"""Not a docstring."""')
    (folder / "pack" / "copy.py").write_text('def rest():\n    """Rests."""')
    for skipped in ("pack/tests/a.py", "site-packages/b.py"):
        (folder / skipped).write_text('"""Skipped."""')
    (folder / "broken.py").write_text("def (")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    return folder


def test_docstrings_under_their_qualified_names(library: Path) -> None:
    documents = builtin.corpus("python").documents
    loom = (
        "module loom\n\nA module that must never be imported.\n\nLoom\n\nWeaves.\n\nIndented.\n\n"
        "Loom.weave\n\nWeaves.\n\nLoom.weave.shuttle\n\nGoes to and fro, ?.\n\nrest\n\nRests.\n"
    )
    assert documents[-2:] == [loom, "module pack\n\nA package.\n"]
    assert not any("Skipped" in text or "Not a docstring" in text for text in documents)


def test_topics_of_the_language_reference(library: Path) -> None:
    documents = builtin.corpus("python").documents
    assert any(text.startswith('The "assert" statement') for text in documents)
    assert all(text == text.strip() + "\n" for text in documents)


def test_the_cache_is_used_and_a_corrupt_one_is_rebuilt(library: Path, tmp_path: Path) -> None:
    first = builtin.corpus("builtin:python")
    (cache,) = (tmp_path / "cache").iterdir()
    (library / "loom.py").unlink()
    assert builtin.corpus("python") == first
    cache.write_text(cache.read_text()[:100])
    rebuilt = builtin.corpus("python")
    assert "rest\n\nRests.\n" in rebuilt.documents[-1]  # its first occurrence, in loom, is gone
    assert rebuilt.sha256 != first.sha256
    assert builtin.corpus("python") == rebuilt


def test_the_cache_is_optional(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "file" / "below"))
    assert builtin.corpus("python") == builtin.corpus("python")


def test_the_path_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WEFT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert builtin.cache_folder() == tmp_path / "weft"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert builtin.cache_folder() == tmp_path / ".cache" / "weft"
    monkeypatch.setenv("WEFT_CACHE", "/elsewhere")
    assert builtin.cache_folder() == Path("/elsewhere")


def test_a_python_without_sources_and_unknown_names_are_refused(library: Path) -> None:
    with pytest.raises(DataError, match=r"builtin:pyton: no such built-in corpus; did you mean 'python'\?"):
        builtin.corpus("pyton")
    for file in library.rglob("*.py"):
        file.unlink()
    with pytest.raises(DataError, match="holds no Python sources"):
        builtin.corpus("python")


@pytest.mark.slow  # parses the whole standard library
def test_the_corpus_has_about_two_million_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    found = builtin.corpus("python")
    assert sum(map(len, found.documents)) > 1_900_000
    assert len(set(found.documents)) == len(found.documents)
    assert len(found.sha256) == 64


def test_the_last_word_of_a_sentence_is_the_particle_of_its_verb() -> None:
    documents = builtin.corpus("builtin:particles").documents
    assert len(documents) > 15_000 and len({*documents}) == len(documents)
    particles = PARTICLES["particles"]
    distances = set()
    for words in map(str.split, documents):
        assert words[-2] == particles[words[1]] and words[-1] == "."
        distances.add(len(words) - 3)
    assert min(distances) == 3 and max(distances) >= 12


def test_a_story_is_about_one_persons_work() -> None:
    stories = builtin.corpus("stories").documents
    assert len(set(stories)) == len(stories) > 1900
    for story in stories:
        sentences = story.removesuffix(".").split(". ")
        assert 6 <= len(sentences) <= 12
        assert len({sentence.split()[1] for sentence in sentences}) == 1


def test_a_tale_keeps_what_it_names() -> None:
    """A name, an animal or a thing that is mentioned twice is one of at most two, and the gift is that of the trade."""
    tales = builtin.corpus("tales").documents
    assert len(tales) == 6000 and not any("{" in tale or "}" in tale for tale in tales)
    kinds = [[*TALES["she"], *TALES["he"]], list(TALES["things"])]
    for tale in tales[:500]:
        words = re.findall(r"\w+", tale)
        assert 60 < len(words) < 160
        people, things = ({word for word in words if word in kind} for kind in kinds)
        assert 1 <= len(people) <= 2 and len(things) <= 1
        trades = [trade for trade in TALES["trades"] if trade in words]
        gifts = [trade for trade, (_, gift) in TALES["trades"].items() if gift in tale]
        assert len(trades) <= 2 and len(gifts) <= 1 and (not trades or set(gifts) <= set(trades))
