"""`weft neighbours`: words with similar embeddings."""

from dataclasses import asdict
from pathlib import Path

from weft.cli.console import options
from weft.cli.console.options import argument, option
from weft.cli.console.terminal import echo, loading, print_tables
from weft.errors import ConfigError, DataError, counted
from weft.figures.tables import Table


def neighbours(
    run: options.Run,
    word: str | None = argument(
        "WORD", "The word whose neighbours are shown, or a sum: 'king - man + woman'.", default=None
    ),
    text: list[str] | None = option(None, "Compare words in context, in this sentence; may be repeated.", "--text"),
    top: int | None = option(None, "Number of neighbours to show (default: 10).", min=1),
    pairs: Path | None = option(None, "Instead of a word: word pairs with human ratings, to correlate with."),
    questions: Path | None = option(None, "Instead of a word: analogies to answer, as in questions-words.txt."),
    senses: str | None = option(
        None,
        "Instead of a word: labelled sentences, to compare senses in: builtin:senses, or a table with the columns "
        "text, with the word in square brackets, and sense.",
        value="FILE",
    ),
    layer: int | None = option(None, "Senses: states of this layer (default: the last, or ELMo's mean)."),
    map_: Path | None = option(None, "Draw the words in two dimensions, as .html, .svg, .png or .pdf.", "--map"),
    as_json: options.AsJson = False,
) -> None:
    """Show the words nearest to a word, by the model's embedding table or in context, or evaluate word vectors.

    $ weft neighbours runs/bert frog
    """
    if [word, pairs, questions, senses].count(None) != 3:
        files = (
            "a file of rated pairs with --pairs, of analogies with --questions, or of labelled sentences with --senses"
        )
        raise ConfigError(f"give one of: a WORD, {files}")
    if word is None and (text or top or (map_ and senses is None)):
        raise ConfigError("--text, --top and --map need a WORD; --pairs and --questions compare words without context")
    if layer is not None and senses is None:
        raise ConfigError(f"--layer {layer}: needs --senses; for vectors of a layer use weft embed --layer")

    with loading():
        from weft.api.load import load
        from weft.evaluate.agreement import read_pairs, similarity
        from weft.evaluate.analogies import analogies, read_questions
        from weft.explain.neighbours import embedding_table, in_context, nearest_words, word_id, word_vector
        from weft.explain.word_map import context_map, neighbour_map
        from weft.figures.picture import check_picture
        from weft.runs.lines import record

    if map_ is not None:
        check_picture(map_)
    if senses is not None:
        _senses(run, senses, layer=layer, map_=map_, as_json=as_json)
        return
    loaded = load(run)
    if questions is not None:
        table, tokenizer = embedding_table(loaded.model)[: loaded.tokenizer.vocab_size].cpu(), loaded.tokenizer
        special = list(tokenizer.special_tokens.values())
        asked = read_questions(str(questions))
        sections = analogies(asked, table, lambda word: word_id(tokenizer, word), excluded=special)
        if as_json:
            for each in sections:
                echo(record({**each._asdict(), "accuracy": each.accuracy}))
            return
        scores = [
            (each.section, str(each.correct), str(each.answered), str(each.left_out), _percent(each.accuracy))
            for each in sections
        ]
        print_tables(Table(("section", "correct", "answered", "left out", "accuracy"), scores))
    elif word is None:
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
        contextual = in_context(loaded.model, loaded.tokenizer, text)
        answers = contextual.nearest(word, top or 10)
        if map_ is not None:
            echo(f"{context_map(contextual, word).save(map_)}: written", err=True)
        for occurrence, neighbours in answers:
            if as_json:
                listed = [{**other._asdict(), "cosine": round(cosine, 6)} for other, cosine in neighbours]
                echo(record({**occurrence._asdict(), "neighbours": listed}))
                continue
            cells = [(other.text, f"{cosine:.4f}", _marked(text, other)) for other, cosine in neighbours]
            print_tables(Table(("word", "cosine", "where"), cells, _marked(text, occurrence), text=(0, 2)))
            echo()
    else:
        nearest = nearest_words(loaded.model, loaded.tokenizer, word, top=top or 10)
        if map_ is not None:
            echo(
                f"{neighbour_map(loaded.model, loaded.tokenizer, word, nearest=nearest).save(map_)}: written", err=True
            )
        if as_json:
            listed = [{"text": near.text, "id": near.id, "cosine": round(near.cosine, 6)} for near in nearest]
            echo(record({"word": word, "neighbours": listed}))
            return
        rows = [(near.text, f"{near.cosine:.4f}") for near in nearest]
        print_tables(Table((f"nearest to {word}", "cosine"), rows))


def _senses(run: Path, file: str, *, layer: int | None, map_: Path | None, as_json: bool) -> None:
    """Print how often the nearest occurrence of a word has its sense, and draw the occurrences."""
    import numpy as np

    from weft.api.load import load
    from weft.evaluate.senses import read_senses, sense_accuracy
    from weft.explain.neighbours import unit_rows, word_vector
    from weft.explain.word_map import sense_map
    from weft.models.config import StaticVectors
    from weft.models.hidden import MARKED
    from weft.runs.lines import record

    labelled, loaded = read_senses(file), load(run)
    words = dict.fromkeys(each.word for each in labelled)
    table = {word: word_vector(loaded.model, loaded.tokenizer, word) for word in words}
    if unknown := [word for word, vector in table.items() if vector is None]:
        raise DataError(f"{file}: '{unknown[0]}' is unknown to this model; leave out its sentences")
    static = unit_rows(np.stack([vector for each in labelled if (vector := table[each.word]) is not None]))
    contextual = None
    if not isinstance(loaded.config.model, StaticVectors):
        contextual = loaded.embed([each.text for each in labelled], word=MARKED, layer=layer)
    accuracies = sense_accuracy(labelled, contextual, static)
    if map_ is not None:
        drawn = static if contextual is None else contextual
        picture = sense_map([each.word for each in labelled], [each.sense for each in labelled], drawn)
        echo(f"{picture.save(map_)}: written", err=True)
    if as_json:
        for each in accuracies:
            echo(record(each._asdict()))
        return
    rows = [
        (each.word, str(each.senses), str(each.occurrences), _percent(each.contextual), _percent(each.static))
        for each in accuracies
    ]
    print_tables(Table(("word", "senses", "sentences", "in context", "static"), rows))
    echo("Sentences whose nearest one with the same word has the same sense: by its vectors in context, and by its one")
    echo("static vector, for which all sentences are equally near, and the nearest is drawn at random.")


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _marked(sentences: list[str], occurrence: tuple[int, int, int, str]) -> str:
    """Return the sentence of an occurrence, with the word in brackets."""
    number, start, end, _ = occurrence
    sentence = sentences[number]
    return " ".join(f"{sentence[:start]}[{sentence[start:end]}]{sentence[end:]}".split())
