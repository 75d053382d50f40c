"""Stories: those of the package, files of one's own, and files with mistakes."""

from pathlib import Path

import pytest

from weft.errors import ConfigError
from weft.models.presets import PRESETS
from weft.serve.stories import named_story, stories

SLIDE = '[[slides]]\nview = "step"\nsays = ["One line."]\n'


def test_one_story_a_lecture() -> None:
    assert [story.lecture for story in stories().values()] == [1, 2, 3, 4, 5]
    presets = {slide["preset"] for story in stories().values() for slide in story.data()["slides"]}
    presets |= {slide.settings.get("preset", "gpt2") for story in stories().values() for slide in story.slides}
    assert presets <= set(PRESETS)


def test_common_values_are_in_every_slide(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'title = "Mine"\nmodel = ["lstm"]\ntext = "A tale"\n{SLIDE}{SLIDE}text = "Another"\n', "utf-8")
    name, story = named_story(str(file))
    slides = story.data()["slides"]
    assert name == "mine" and [slide["text"] for slide in slides] == ["A tale", "Another"]
    assert [list(slide["model"]) for slide in slides] == [["lstm"], ["lstm"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title = ", "not valid TOML"),
        (SLIDE, "title"),
        ('title = "A"\n', "slides"),
        ('title = "A"\nslides = []\n', "at least one"),
        ('title = "A"\n' + SLIDE.replace("step", "stepp"), "view"),
        ('title = "A"\n' + SLIDE.replace('"One line."', '"1", "2", "3"'), "says"),
        ('title = "A"\n' + SLIDE.replace("One line.", "x" * 121), "says"),
        ('title = "A"\n' + SLIDE + "colour = 1\n", "colour"),
        ('title = "A"\n' + SLIDE + "settings = { stage = [1] }\n", "settings"),
    ],
)
def test_a_mistake_is_named_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigError) as error:
        named_story(str(file))
    assert message in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "advice"), [("atention", "attention"), ("no.toml", "no such file")])
def test_an_unknown_story_is_refused_with_advice(name: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        named_story(name)
