"""`weft generate`: let a trained model write."""

import json
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.console import options
from weft.cli.console.loading import loading
from weft.cli.console.terminal import echo, write
from weft.cli.console.together import load_together, refuse_together, together

if TYPE_CHECKING:
    from weft.api.run import Run
    from weft.cli.console.writing import Remarks
    from weft.decode.completion import Completion
    from weft.decode.config import Beam, Sampling
    from weft.decode.constrain import Grammar

LONGEST_TEXT = 200  # tokens
LONGEST_MATCH = 1000  # tokens that --lookup may ask for
CHOICE, RULES, MANY, SPEED = "How tokens are chosen", "Constraints", "Many texts", "Speed"


@together
def generate(
    run: options.Run,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The text to continue; '-' reads it from stdin.")
    ] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Always take the likeliest token.", rich_help_panel=CHOICE)
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(help="Below 1 safer, above 1 bolder (default: the checkpoint's, or 1).", rich_help_panel=CHOICE),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens.", rich_help_panel=CHOICE)] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the fewest tokens that reach this probability.", rich_help_panel=CHOICE),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Drop tokens less likely than this fraction of the best.", rich_help_panel=CHOICE),
    ] = None,
    typical: Annotated[
        float | None,
        typer.Option(help="Draw from the most typical tokens that reach this probability.", rich_help_panel=CHOICE),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed writes the same text (default: 0).", rich_help_panel=CHOICE)
    ] = None,
    beam: Annotated[
        int | None, typer.Option(help="Search for the likeliest text with this many beams.", rich_help_panel=CHOICE)
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(help="Beam: divide log p by length to this power (default: 1).", rich_help_panel=CHOICE),
    ] = None,
    gnmt_penalty: Annotated[
        float | None,
        typer.Option(help="Beam: divide by ((5 + length) / 6) to this power instead.", rich_help_panel=CHOICE),
    ] = None,
    amateur: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Prefer what this weaker run finds less likely.", rich_help_panel=CHOICE),
    ] = None,
    contrast: Annotated[float | None, typer.Option(help="How strongly (default: 0.5).", rich_help_panel=CHOICE)] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Stop after this many tokens (default: 200).", rich_help_panel=RULES)
    ] = None,
    no_slide: Annotated[
        bool,
        typer.Option(
            "--no-slide",
            help="Stop where the model's window is full; else the text continues over its last tokens.",
            rich_help_panel=RULES,
        ),
    ] = False,
    min_tokens: Annotated[
        int | None, typer.Option(help="Don't let the text end before this many tokens.", rich_help_panel=RULES)
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text; may be repeated.", rich_help_panel=RULES)
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: tokens that came before become less likely.", rich_help_panel=RULES)
    ] = None,
    frequency_penalty: Annotated[
        float | None,
        typer.Option(help="Subtracted from a token's logit each time it was written.", rich_help_panel=RULES),
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Subtracted once from a token that was written.", rich_help_panel=RULES)
    ] = None,
    no_repeat_ngram: Annotated[
        int | None, typer.Option(help="No so many tokens in a row come twice.", rich_help_panel=RULES)
    ] = None,
    ban: Annotated[
        list[str] | None, typer.Option(help="Never write this token; may be repeated.", rich_help_panel=RULES)
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="The text matches this regular expression.", rich_help_panel=RULES)
    ] = None,
    json_schema: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The text is JSON of the schema in this file.", rich_help_panel=RULES),
    ] = None,
    grammar: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The text follows the Lark grammar in this file.", rich_help_panel=RULES),
    ] = None,
    special_tokens: options.SpecialTokens = False,
    n: Annotated[int, typer.Option("--n", "-n", help="Texts for each prompt.", rich_help_panel=MANY)] = 1,
    file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Prompts, one a line ('-': stdin; .jsonl: JSON).", rich_help_panel=MANY),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write JSON lines here; an unfinished file is continued.", rich_help_panel=MANY)
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Prompts at once (default: 16).", rich_help_panel=MANY)] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Log-probabilities, and this many alternatives.", rich_help_panel=MANY)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One line of JSON for each prompt.", rich_help_panel=MANY)
    ] = False,
    draft: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="A smaller run that guesses ahead; a seed then draws another text from the same distribution.",
            rich_help_panel=SPEED,
        ),
    ] = None,
    lookup: Annotated[
        int | None, typer.Option(help="Guess from matches of up to this many tokens.", rich_help_panel=SPEED)
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(metavar="BITS", help="Smaller weights: bf16, int8, int4 or auto.", rich_help_panel=SPEED),
    ] = None,
) -> None:
    """Continue a text with a trained model. The prompt and what follows go to stdout as they are written.

    An imported checkpoint writes as its generation_config.json has it, where no option says otherwise. A model that is
    too large for one GPU is divided over several, started with torchrun:

      torchrun --nproc-per-node 2 --no-python -- weft generate ...
    """
    with loading():
        from weft.api.load import load
        from weft.cli.console.writing import Remarks, check_writes, say_defaults
        from weft.files import check_place
        from weft.parallel.ranks import join

    ranks = join()
    guesses = draft is not None or lookup is not None
    single = file is None and out is None and not as_json and beam is None and n == 1 and logprobs is None
    _refuse(
        (prompt is not None and file is not None, "--prompt and --file exclude each other"),
        (n < 1, f"--n {n}: at least one text"),
        (batch is not None and batch < 1, f"--batch {batch}: at least one prompt"),
        (batch is not None and file is None, f"--batch {batch}: there is one prompt; many are read with --file"),
        (
            greedy and n > 1,
            f"--n {n}: greedy decoding draws nothing, so all texts would be the same; --beam finds others",
        ),
        (
            guesses and not single,
            "--draft and --lookup guess for one text: leave out --n, --beam, --file, --out and --json",
        ),
        (draft is not None and lookup is not None, "--draft and --lookup exclude each other"),
        (
            lookup is not None and not 1 <= lookup <= LONGEST_MATCH,
            f"--lookup {lookup}: expected 1 … {LONGEST_MATCH} tokens",
        ),
        (
            sum(each is not None for each in (regex, json_schema, grammar)) > 1,
            "--regex, --json-schema and --grammar exclude each other",
        ),
        (
            amateur is not None and guesses,
            "--amateur doesn't go with --draft and --lookup: what guesses ahead guesses for one model",
        ),
        (
            contrast is not None and amateur is None,
            "--contrast sets how strongly to contrast; name the weaker run with --amateur",
        ),
    )
    refuse_together(ranks, {"--quantize": quantize, "--draft": draft, "--amateur": amateur, "--out": out})
    rules = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "stop": stop,
        "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "no_repeat_ngram": no_repeat_ngram,
    }
    drawing = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "typical_p": typical}
    drawing |= {"seed": seed, "logprobs": logprobs}
    drawing |= {"slide": False if no_slide else None}
    penalties = {"power": length_penalty, "gnmt": gnmt_penalty}

    def settings_over(defaults: Given) -> "Sampling | Beam":
        if beam is None:
            return _sampling(greedy, drawing, rules, penalties, defaults)
        return _beam(beam, n, {**drawing, "greedy": greedy or None}, rules, penalties, defaults)

    settings_over({})  # what can't be is refused before anything is loaded
    if out is not None:
        check_place(out)
    prompts = ranks.share(lambda: _prompts(prompt, file))
    loaded = load_together(run, quantize=quantize)
    loaded = loaded.reading_specials() if special_tokens else loaded
    check_writes(loaded)
    usual = loaded.defaults if beam is None else loaded.beam_defaults
    settings = settings_over({"max_tokens": LONGEST_TEXT, **usual})
    say_defaults(loaded, settings, {**drawing, **rules, "temperature": 0.0 if greedy else temperature})
    if amateur is not None:
        loaded = loaded.against(load(amateur), 0.5 if contrast is None else contrast)
    if ban:
        settings = settings.replace(banned=(*settings.banned, *_ids(loaded, ban)))
    pattern = _pattern(loaded, regex, json_schema, grammar)
    remarks = Remarks(loaded, settings, pattern)
    if single:
        _stream(loaded, prompts[0], settings, pattern, draft, lookup, remarks)  # type: ignore[arg-type]
    elif out is not None or as_json or file is not None:
        asked = {"quantize": loaded.quantized, "amateur": amateur and str(amateur), "contrast": contrast}
        notes = {key: value for key, value in asked.items() if value is not None}
        for line in loaded.bulk(prompts, settings, n=n, batch=batch or 16, out=out, pattern=pattern, notes=notes):
            for each in json.loads(line)["completions"]:
                remarks.look(each["text"], each["tokens"], each["finish"], each.get("slid", False))
            if out is None:
                echo(line)
    else:
        texts = loaded.candidates(prompts, settings, n=n, pattern=pattern)[0]
        for each in texts:
            remarks.look(each.text, each.tokens, each.finish, each.slid)
        _show(prompts[0], texts)
    remarks.report()


def _mistake(line: str) -> Exception:
    from weft.errors import ConfigError

    return ConfigError(line)


def _refuse(*mistakes: tuple[bool, str]) -> None:
    for wrong, line in mistakes:
        if wrong:
            raise _mistake(line)


Given = dict[str, Any]  # what options were given; None: left out


def _sampling(greedy: bool, drawing: Given, rules: Given, penalties: Given, defaults: Given) -> "Sampling":
    from weft.api.settings import sampling, with_defaults

    if any(penalty is not None for penalty in penalties.values()):
        raise _mistake("--length-penalty and --gnmt-penalty belong to --beam")
    if greedy:
        for name in ("temperature", "seed"):
            if drawing[name] is not None:
                raise _mistake(f"--greedy and --{name} exclude each other: greedy decoding draws nothing")
        drawing = {**drawing, "temperature": 0.0}
    return sampling(**with_defaults({**drawing, **rules}, defaults))


def _beam(beams: int, n: int, drawing: Given, rules: Given, penalties: Given, defaults: Given) -> "Beam":
    from weft.api.settings import beam, with_defaults

    if drawing["slide"] is not None:
        raise _mistake("--no-slide doesn't apply to --beam: beam search always stops where the model's window is full")
    wrong = next((key for key, value in drawing.items() if value is not None), None)
    if wrong is not None:
        option = wrong.removesuffix("_p") if wrong == "typical_p" else wrong.replace("_", "-")
        raise _mistake(
            f"--{option} doesn't apply to --beam: beam search draws nothing, it looks for the likeliest text"
        )
    chosen = [{"kind": kind, "alpha": alpha} for kind, alpha in penalties.items() if alpha is not None]
    if len(chosen) == 2:
        raise _mistake("--length-penalty and --gnmt-penalty exclude each other")
    given = {"beams": beams, "n": n, "length_penalty": chosen[0] if chosen else None, **rules}
    return beam(**with_defaults(given, defaults))


def _prompts(prompt: str | None, file: str | None) -> list[str]:
    from weft.data.streams import characters, lines
    from weft.decode.bulk import read_prompts

    if file is None:
        return ["".join(characters("-")) if prompt == "-" else prompt or ""]
    return read_prompts(lines(file), "standard input" if file == "-" else file)


def _ids(run: "Run", texts: list[str]) -> tuple[int, ...]:
    ids: list[int] = []
    for text in texts:
        found = run.tokenizer.encode(text)
        if len(found) != 1:
            raise _mistake(f"--ban {text!r}: {len(found)} tokens to this tokenizer, but one token can be banned")
        ids += found
    return tuple(ids)


def _pattern(run: "Run", regex: str | None, schema: Path | None, grammar: Path | None) -> "Grammar | None":
    from weft.errors import WeftError

    file = schema or grammar
    if regex is not None:
        return run.pattern(regex)
    if file is None:
        return None
    try:
        text = file.read_text(encoding="utf-8-sig")
        return run.grammar(text) if schema is None else run.schema(json.loads(text))
    except json.JSONDecodeError as error:
        raise _mistake(f"{file}: not valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise _mistake(f"{file}: not valid UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise _mistake(f"{file}: JSON that is nested too deeply to be read") from None
    except WeftError as error:
        raise _mistake(f"{file}: {error}") from None


def _stream(
    run: "Run",
    prompt: str,
    settings: "Sampling",
    pattern: "Grammar | None",
    draft: Path | None,
    lookup: int | None,
    remarks: "Remarks",
) -> None:
    from weft.api.load import load

    smaller = None if draft is None else load(draft)
    stream = run.write(prompt, settings, pattern=pattern, draft=smaller, lookup=lookup)
    first = next(stream, None)  # what can't be done is refused before anything is shown
    write(prompt)
    text = ""
    for chunk in stream if first is None else chain([first], stream):
        text += chunk.text
        write(chunk.text)
        if chunk.finish is not None:
            remarks.look(text, chunk.tokens, chunk.finish, chunk.slid)
    write("\n")


def _show(prompt: str, texts: "list[Completion]") -> None:
    """Texts one below the other, with a line between them; tokens and their probabilities as a table."""
    for place, completion in enumerate(texts):
        if place:
            echo("---")
        echo(prompt + completion.text)
        if completion.scored:
            _table(completion)


def _table(completion: "Completion") -> None:
    import math

    from rich.console import Console
    from rich.table import Table

    table = Table("token", "probability", "likeliest here", box=None)
    table.columns[1].justify = "right"
    for each in completion.scored:
        others = "  ".join(f"{text!r} {math.exp(value):.3f}" for text, value in each.top)
        table.add_row(repr(each.text), f"{math.exp(each.logprob):.3f}", others)
    Console(markup=False, highlight=False).print(table)
