"""Stories: prepared sequences of the Explorer's views with two lines of text each, read from TOML."""

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from weft.config import Config, read_toml, validate
from weft.errors import ConfigError, suggestion

FOLDER = resources.files("weft") / "lectures" / "stories"
View = Literal[
    "write", "predict", "step", "attention", "surprise", "lens", "saliency", "search", "tokens", "runs", "anatomy"
]
Line = Annotated[str, Field(min_length=1, max_length=120)]


class Slide(Config):
    """One slide: a view, its settings as in the address of the page, and at most two lines of text.

    `model` lists names of runs or kinds of model, the preferred one first; if there is none, the anatomy of `preset`
    is shown with the command `train`.
    """

    view: View
    says: tuple[Line, ...] = Field(min_length=1, max_length=2)
    model: tuple[str, ...] = ()
    text: str | None = Field(default=None, max_length=2000)
    settings: dict[str, str | int | float] = Field(default_factory=dict)
    preset: str | None = None
    train: str | None = Field(default=None, max_length=200)


class Story(Config):
    """A story. `model`, `text`, `preset` and `train` are those of all slides that have none of their own."""

    title: str = Field(min_length=1, max_length=80)
    about: str = Field(default="", max_length=300)
    lecture: int | None = Field(default=None, ge=1, le=5)
    model: tuple[str, ...] = ()
    text: str | None = Field(default=None, max_length=2000)
    preset: str = "gpt-tiny"
    train: str = Field(default="weft quickstart", max_length=200)
    slides: tuple[Slide, ...] = Field(max_length=100)

    def data(self) -> dict[str, Any]:
        """Return the story with the common values in every slide."""
        common = {name: getattr(self, name) for name in ("model", "text", "preset", "train")}
        slides = [
            {**slide.model_dump(), **{name: getattr(slide, name) or value for name, value in common.items()}}
            for slide in self.slides
        ]
        return {"title": self.title, "about": self.about, "lecture": self.lecture, "slides": slides}


@cache
def stories() -> dict[str, Story]:
    """Return the stories of the package by name, in the order of the lectures."""
    files = [file for file in FOLDER.iterdir() if file.name.endswith(".toml")]
    read = {file.name.removesuffix(".toml"): validate(Story, read_toml(Path(str(file)))) for file in files}
    return dict(sorted(read.items(), key=lambda item: item[1].lecture or 0))


def named_story(name: str) -> tuple[str, Story]:
    """Return a story of the package, or of a TOML file, and its name."""
    if name in stories():
        return name, stories()[name]
    path = Path(name)
    if path.suffix != ".toml":
        raise ConfigError(f"--story {name}: {suggestion(name, stories())}; a story of your own is a TOML file")
    if not path.is_file():
        raise ConfigError(f"--story {name}: no such file")
    story = validate(Story, read_toml(path), str(path))
    if not story.slides:
        raise ConfigError(f"{path}: slides: a story needs at least one")
    return path.stem, story
