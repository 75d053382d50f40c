"""`weft neighbours`: words with similar embeddings."""

from dataclasses import asdict
from pathlib import Path

from weft.cli.console import options
from weft.cli.console.options import argument, option
from weft.cli.console.terminal import echo, loading, print_tables
from weft.errors import ConfigError, counted
from weft.figures.tables import Table


def neighbours(
    run: options.Run,
    word: str | None = argument("WORD", "The word whose neighbours are shown.", default=None),
    text: list[str] | None = option(None, "Compare words in context, in this sentence; may be repeated.", "--text"),
    top: int | None = option(None, "Number of neighbours to show (default: 10).", min=1),
    pairs: Path | None = option(None, "Instead of a word: word pairs with human ratings, to correlate with."),
    as_json: options.AsJson = False,
) -> None:
    """Show the words nearest to a word, by the model's embedding table or in context, or evaluate word similarity.

    $ weft neighbours runs/bert frog
    """
    if (word is None) == (pairs is None):
        raise ConfigError("give either a WORD, or a file of rated pairs with --pairs")
    if pairs is not None and (text or top):
        raise ConfigError("--text and --top need a WORD; --pairs compares words without context")

    with loading():
        from weft.api.load import load
        from weft.evaluate.agreement import read_pairs, similarity
        from weft.explain.neighbours import in_context, nearest_words, word_vector
        from weft.runs.lines import record

    loaded = load(run)
    if word is None:
        measured = similarity(read_pairs(str(pairs)), lambda word: word_vector(loaded.model, loaded.tokenizer, word))
        if as_json:
            echo(record(asdict(measured)))
            return
        echo(f"Spearman {measured.spearman:.4f}, Pearson {measured.pearson:.4f} over {measured.pairs} pairs")
        if missing := measured.missing:
            shown = ", ".join(missing[:8]) + (", …" if len(missing) > 8 else "")
            words = f"{counted(len(missing), 'word')} without a vector ({shown})"
            echo(f"{counted(measured.left_out, 'pair')} left out: {words}")
    elif text:
        for occurrence, neighbours in in_context(loaded.model, loaded.tokenizer, text).nearest(word, top or 10):
            if as_json:
                listed = [{**other._asdict(), "cosine": round(cosine, 6)} for other, cosine in neighbours]
                echo(record({**occurrence._asdict(), "neighbours": listed}))
                continue
            cells = [(other.text, f"{cosine:.4f}", _marked(text, other)) for other, cosine in neighbours]
            print_tables(Table(("word", "cosine", "where"), cells, _marked(text, occurrence), text=(0, 2)))
            echo()
    else:
        nearest = nearest_words(loaded.model, loaded.tokenizer, word, top=top or 10)
        if as_json:
            listed = [{"text": near.text, "id": near.id, "cosine": round(near.cosine, 6)} for near in nearest]
            echo(record({"word": word, "neighbours": listed}))
            return
        rows = [(near.text, f"{near.cosine:.4f}") for near in nearest]
        print_tables(Table((f"nearest to {word}", "cosine"), rows))


def _marked(sentences: list[str], occurrence: tuple[int, int, int, str]) -> str:
    """Return the sentence of an occurrence, with the word in brackets."""
    number, start, end, _ = occurrence
    sentence = sentences[number]
    return " ".join(f"{sentence[:start]}[{sentence[start:end]}]{sentence[end:]}".split())
