"""`weft neighbours`: which words are alike to a model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.console import columns, options
from weft.cli.console.loading import loading
from weft.cli.console.terminal import echo
from weft.figures.tables import Table

if TYPE_CHECKING:
    from weft.api.run import Run


def neighbours(
    run: options.Run,
    word: Annotated[str | None, typer.Argument(metavar="WORD", help="The word whose neighbours are shown.")] = None,
    text: Annotated[
        list[str] | None,
        typer.Option("--text", help="Take the word's vector in this sentence, not from the table; may be repeated."),
    ] = None,
    top: Annotated[int | None, typer.Option(min=1, help="How many neighbours to show (default: 10).")] = None,
    pairs: Annotated[
        Path | None,
        typer.Option(help="Instead of a word: a file of word pairs with human ratings, to correlate the vectors with."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show the words nearest to a word, by the model's embeddings or inside sentences, and measure word similarity."""
    from weft.errors import ConfigError

    if (word is None) == (pairs is None):
        raise ConfigError("give a WORD, or a file of rated pairs with --pairs, one of the two")
    if pairs is not None and (text or top):
        raise ConfigError("--text and --top belong to a WORD; --pairs compares words without a sentence")

    with loading():
        from weft.api.load import load

    if pairs is not None:
        _measure(load(run), pairs, as_json)
    elif text:
        assert word is not None
        _in_sentences(load(run), word, text, top or 10, as_json)
    else:
        assert word is not None
        _in_table(load(run), word, top or 10, as_json)


def _in_table(run: "Run", word: str, top: int, as_json: bool) -> None:
    from weft.explain.neighbours import nearest_words
    from weft.runs.lines import record

    found = nearest_words(run.model, run.tokenizer, word, top)
    if as_json:
        listed = [{"text": near.text, "id": near.id, "cosine": round(near.cosine, 6)} for near in found]
        echo(record({"word": word, "neighbours": listed}))
        return
    columns.show(Table(("nearest to " + word, "cosine"), [(near.text, f"{near.cosine:.4f}") for near in found]))


def _in_sentences(run: "Run", word: str, sentences: list[str], top: int, as_json: bool) -> None:
    from weft.explain.neighbours import in_context
    from weft.runs.lines import record

    context = in_context(run.model, run.tokenizer, sentences)
    for place, found in context.nearest(word, top):
        if as_json:
            listed = [{**there._asdict(), "cosine": round(cosine, 6)} for there, cosine in found]
            echo(record({**place._asdict(), "neighbours": listed}))
            continue
        rows = [(there.text, f"{cosine:.4f}", _marked(sentences, there)) for there, cosine in found]
        columns.show(Table(("word", "cosine", "where"), rows, _marked(sentences, place), text=(0, 2)))
        echo()


def _marked(sentences: list[str], place: tuple[int, int, int, str]) -> str:
    number, start, end, _ = place
    sentence = sentences[number]
    return " ".join(f"{sentence[:start]}[{sentence[start:end]}]{sentence[end:]}".split())


def _measure(run: "Run", pairs: Path, as_json: bool) -> None:
    from dataclasses import asdict

    from weft.errors import counted
    from weft.evaluate.agreement import read_pairs, similarity
    from weft.explain.neighbours import word_vector
    from weft.runs.lines import record

    found = similarity(read_pairs(str(pairs)), lambda word: word_vector(run.model, run.tokenizer, word))
    if as_json:
        echo(record(asdict(found)))
        return
    echo(f"Spearman {found.spearman:.4f}, Pearson {found.pearson:.4f} over {found.pairs} pairs")
    if found.missing:
        shown = ", ".join(found.missing[:8]) + (", …" if len(found.missing) > 8 else "")
        words = f"{counted(len(found.missing), 'word')} without a vector ({shown})"
        echo(f"{counted(found.left_out, 'pair')} left out: {words}")
