"""The license of a model: read from its files, and written to every file made from them."""

from pathlib import Path
from typing import Any

import pytest
from tests.interop.hf_models import a_folder, words

from weft.api.export_model import export_model
from weft.api.import_model import import_model
from weft.interop.license import license_from_keys, license_keys, license_of_folder
from weft.runs.folder import RunFolder
from weft.runs.imported import license_of

LINK = "https://example.org/a#b"


@pytest.mark.parametrize(
    ("front_matter", "expected"),
    [
        ("license: apache-2.0", {"license": "apache-2.0"}),
        ('tags:\n- a\nlicense: "mit"  # as agreed\nlanguage: en', {"license": "mit"}),
        ("license:\n- cc-by-4.0\n- mit", {"license": "cc-by-4.0"}),
        ("license: [bsd-3-clause, mit]", {"license": "bsd-3-clause"}),
        (
            f"license: other\nlicense_name: 'Llama 3.2 Community'\nlicense_link: {LINK}",
            {"license": "other", "license_name": "Llama 3.2 Community", "license_link": LINK},
        ),
        ("license: other\nlicense_link: LICENSE", {"license": "other"}),
        ('license: "a`b\\n# c"', {}),
        ("license:", {}),
        ("x:\n  license: mit", {}),
        ("license_name: [x", {"license_name": "x"}),
    ],
)
def test_front_matter(front_matter: str, expected: dict[str, str], tmp_path: Path) -> None:
    for line_end in ("\n", "\r\n"):
        text = f"---\n{front_matter}\n---\n# A model\n\nlicense: gpl\n".replace("\n", line_end)
        (tmp_path / "README.md").write_bytes(text.encode())
        assert license_of_folder(tmp_path) == expected


@pytest.mark.parametrize("data", [b"", b"# none\nlicense: mit", b"---\nlicense: mit\n", b"---\n\xff\xfe\n---\n"])
def test_a_readme_without_front_matter(data: bytes, tmp_path: Path) -> None:
    assert license_of_folder(tmp_path) == {}
    (tmp_path / "README.md").write_bytes(data)
    assert license_of_folder(tmp_path) == {}


@pytest.mark.parametrize("value", [7, ["mit"], "", "a b", "x" * 99, "\x1b[31m"])
def test_values_that_are_not_a_license(value: Any) -> None:
    assert license_from_keys({"general.license": value}) == {}
    assert license_keys({"license": value}) == {}


def test_the_license_is_kept_by_import_and_export(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "theirs", words())
    license = {"license": "other", "license_name": "deep 1.0", "license_link": LINK}
    (folder / "README.md").write_text("---\n" + "".join(f"{k}: {v}\n" for k, v in license.items()) + "---\n# x\n")
    import_model(folder, tmp_path / "run")
    assert license_of(RunFolder(tmp_path / "run")) == license
    export_model(tmp_path / "run", "hf", tmp_path / "hf")
    assert license_of_folder(tmp_path / "hf") == license
    export_model(tmp_path / "run", "weft", tmp_path / "again")
    config = (tmp_path / "again/config.toml").read_text()
    (tmp_path / "next").mkdir()
    (tmp_path / "next/config.toml").write_text(f'init = "{tmp_path / "again"}"\n{config}')
    assert license_of(RunFolder(tmp_path / "next")) == license
    (tmp_path / "again/config.toml").write_text("not a recipe")
    (tmp_path / "again/origin/notes.json").unlink()
    assert license_of(RunFolder(tmp_path / "next")) == {}
