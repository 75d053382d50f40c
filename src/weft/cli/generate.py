"""`weft generate`: let a trained model write."""

import json
from functools import partial
from itertools import chain
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from weft.cli.console import options
from weft.cli.console.distributed import load_together, refuse_together, together
from weft.cli.console.options import option
from weft.cli.console.terminal import echo, loading, print_tables, write
from weft.cli.console.writing import DEFAULT_MAX_TOKENS, Remarks, check_writes, given_settings, log_defaults
from weft.errors import ConfigError, WeftError
from weft.figures.tables import Table
from weft.storage.files import check_writable
from weft.storage.untrusted import parse_json

if TYPE_CHECKING:
    from weft.api.run import Run
    from weft.decode.config import Beam, Sampling
    from weft.decode.constrain import Grammar

MAX_LOOKUP = 1000  # tokens that --lookup may ask for
choice = partial(option, rich_help_panel="How tokens are chosen")
rule = partial(option, rich_help_panel="Constraints")
several = partial(option, rich_help_panel="Many texts")
speed = partial(option, rich_help_panel="Speed")
Given = dict[str, Any]  # what options were given; None: left out


@together
def generate(
    context: typer.Context,
    run: options.Run,
    prompt: str | None = option(None, "The text to continue; '-' reads it from standard input.", "--prompt", "-p"),
    greedy: bool = choice(False, "Always take the likeliest token.", "--greedy"),
    temperature: float | None = choice(None, "Below 1: safer; above 1: bolder (default: the checkpoint's, or 1)."),
    top_k: int | None = choice(None, "Draw from the k likeliest tokens."),
    top_p: float | None = choice(None, "Draw from the fewest tokens that reach this probability."),
    min_p: float | None = choice(None, "Drop tokens less likely than this fraction of the best."),
    typical_p: float | None = choice(None, "Draw from the most typical tokens reaching this probability.", "--typical"),
    seed: int | None = choice(None, "The same seed writes the same text (default: 0)."),
    beam: int | None = choice(None, "Search for the likeliest text with this many beams."),
    length_penalty: float | None = choice(None, "Beam search: divide log p by the length to this power (default: 1)."),
    gnmt_penalty: float | None = choice(None, "Beam search: divide by ((5 + length) / 6) to this power instead."),
    amateur: Path | None = choice(
        None, "Prefer what this weaker run finds less likely.", value="RUN", autocompletion=options.complete_runs
    ),
    contrast: float | None = choice(None, "How strongly --amateur counts (default: 0.5)."),
    max_tokens: int | None = rule(None, "Stop after this many tokens (default: 200)."),
    no_slide: bool = rule(
        False, "Stop when the model's window is full instead of continuing from its last tokens.", "--no-slide"
    ),
    min_tokens: int | None = rule(None, "Don't let the text end before this many tokens."),
    stop: list[str] | None = rule(None, "Stop before this text; may be repeated."),
    repetition_penalty: float | None = rule(None, "Above 1: tokens that have appeared before become less likely."),
    frequency_penalty: float | None = rule(None, "Subtract this from a token's logit for each time it was written."),
    presence_penalty: float | None = rule(None, "Subtract this once from the logit of each token that was written."),
    no_repeat_ngram: int | None = rule(None, "No n-gram of this many tokens may repeat."),
    ban: list[str] | None = rule(None, "Never write this token; may be repeated."),
    regex: str | None = rule(None, "Write text that matches this regular expression."),
    json_schema: Path | None = rule(None, "Write JSON that follows the schema in this file.", value="FILE"),
    grammar: Path | None = rule(None, "Write text that follows the Lark grammar in this file.", value="FILE"),
    special_tokens: options.SpecialTokens = False,
    n: int = several(1, "How many texts to write for each prompt.", "--n", "-n"),
    file: str | None = several(None, "Read prompts, one per line ('-': standard input; .jsonl: JSON).", value="FILE"),
    out: Path | None = several(None, "Write JSON lines here; an unfinished file is continued."),
    batch: int | None = several(None, "How many prompts to work on at a time (default: 16)."),
    logprobs: int | None = several(None, "Show each token's log-probability, and this many alternatives."),
    as_json: bool = several(False, "Print one line of JSON for each prompt.", "--json"),
    draft: Path | None = speed(
        None,
        "Let this smaller run guess ahead; a seed then draws another, equally likely text.",
        value="RUN",
        autocompletion=options.complete_runs,
    ),
    lookup: int | None = speed(None, "Guess ahead from earlier matches of up to this many tokens."),
    quantize: str | None = speed(None, "Use smaller weights: bf16, int8, int4 or auto.", value="BITS"),
    quantize_cache: str | None = speed(None, "Keep keys and values of many texts in fewer bits: int8.", value="BITS"),
) -> None:
    """Continue a text with a trained model. The prompt and what follows go to stdout as they are written.

    $ weft generate runs/gpt-tiny --prompt 'It was a dark and' --max-tokens 100

    An imported checkpoint writes as its generation_config.json has it, where no option says otherwise. A model that is
    too large for one GPU is divided over several, started with torchrun:

    $ torchrun --nproc-per-node 2 --no-python -- weft generate runs/large
    """
    with loading():
        from weft.api.load import load
        from weft.parallel.ranks import join

    ranks = join()
    guesses, patterns = draft is not None or lookup is not None, (regex, json_schema, grammar)
    single = file is None and out is None and not as_json and beam is None and n == 1 and logprobs is None
    refusals = {
        "--prompt and --file exclude each other": prompt is not None and file is not None,
        f"--n {n}: at least one text": n < 1,
        f"--batch {batch}: at least one prompt": batch is not None and batch < 1,
        f"--batch {batch}: there is one prompt; many are read with --file": batch is not None and file is None,
        f"--n {n}: greedy decoding draws nothing, so all texts would be equal; --beam finds others": greedy and n > 1,
        "--draft and --lookup guess for one text; leave out --n, --beam, --file, --out, --json": guesses and not single,
        "--draft and --lookup exclude each other": draft is not None and lookup is not None,
        f"--lookup {lookup}: expected 1 … {MAX_LOOKUP} tokens": lookup is not None and not 1 <= lookup <= MAX_LOOKUP,
        "--regex, --json-schema and --grammar exclude each other": sum(each is not None for each in patterns) > 1,
        "--amateur doesn't go with --draft and --lookup: what guesses ahead guesses for one model": (
            amateur is not None and guesses
        ),
        "--quantize-cache is for many texts: give --file, and no --beam": (
            quantize_cache is not None and (file is None or beam is not None)
        ),
        "--contrast sets how strongly to contrast; name the weaker run with --amateur": (
            contrast is not None and amateur is None
        ),
    }
    for line, wrong in refusals.items():
        if wrong:
            raise ConfigError(line)
    fewer_bits = {"--quantize": quantize, "--quantize-cache": quantize_cache}
    refuse_together(ranks, {**fewer_bits, "--draft": draft, "--amateur": amateur, "--out": out})
    given = given_settings(context, greedy)
    penalties = {"power": length_penalty, "gnmt": gnmt_penalty}
    drawn = {**given, "greedy": None if beam is None else greedy or None}
    settings_over = partial(_settings, drawn, beam, n, penalties)
    settings_over({})  # what can't be is refused before anything is loaded
    if out is not None:
        check_writable(out)
    prompts = ranks.share(lambda: _prompts(prompt, file))
    loaded = load_together(run, quantize=quantize)
    loaded = loaded.reading_specials() if special_tokens else loaded
    check_writes(loaded)
    usual = loaded.defaults if beam is None else loaded.beam_defaults
    settings = settings_over({"max_tokens": DEFAULT_MAX_TOKENS, **usual})
    log_defaults(loaded, settings, given)
    if amateur is not None:
        loaded = loaded.against(load(amateur), 0.5 if contrast is None else contrast)
    for text in ban or ():
        ids = loaded.tokenizer.encode(text)
        if len(ids) != 1:
            raise ConfigError(f"--ban {text!r}: {len(ids)} tokens to this tokenizer, but one token can be banned")
        settings = settings.replace(banned=(*settings.banned, *ids))
    pattern = _pattern(loaded, regex, json_schema, grammar)
    remarks = Remarks(loaded, settings, pattern)
    if single:
        smaller = None if draft is None else load(draft)
        stream = loaded.write(prompts[0], settings, pattern=pattern, draft=smaller, lookup=lookup)  # type: ignore[arg-type]
        first = next(stream, None)  # what can't be done is refused before anything is shown
        write(prompts[0])
        for text in remarks.passing(stream if first is None else chain([first], stream)):
            write(text)
        write("\n")
    elif out is not None or as_json or file is not None:
        asked = {"quantize": loaded.quantized, "amateur": amateur and str(amateur), "contrast": contrast}
        notes = {key: value for key, value in asked.items() if value is not None}
        written = partial(loaded.bulk, prompts, settings, n=n, batch=batch or 16, out=out, pattern=pattern)
        for line in written(quantize_cache=quantize_cache, notes=notes):
            for each in json.loads(line)["completions"]:
                remarks.look(each["text"], each["tokens"], each["finish"], each.get("slid", False))
            if out is None:
                echo(line)
    else:
        for place, each in enumerate(loaded.candidates(prompts, settings, n=n, pattern=pattern)[0]):
            remarks.look(each.text, each.tokens, each.finish, each.slid)
            if place:
                echo("---")
            echo(prompts[0] + each.text)
            if each.scored:
                rows = [
                    (repr(t.text), f"{exp(t.logprob):.3f}", "  ".join(f"{text!r} {exp(p):.3f}" for text, p in t.top))
                    for t in each.scored
                ]
                print_tables(Table(("token", "probability", "likeliest here"), rows, text=(0, 2)))
    remarks.report()


def _settings(given: Given, beams: int | None, n: int, penalties: Given, defaults: Given) -> "Sampling | Beam":
    from weft.api.settings import beam, sampling, with_defaults
    from weft.decode.config import Rules

    chosen = [{"kind": kind, "alpha": alpha} for kind, alpha in penalties.items() if alpha is not None]
    if beams is None:
        if chosen:
            raise ConfigError("--length-penalty and --gnmt-penalty belong to --beam")
        return sampling(**with_defaults(given, defaults))
    if given["slide"] is not None:
        raise ConfigError("--no-slide doesn't apply to --beam: a search always stops where the model's window is full")
    wrong = next((key for key, value in given.items() if value is not None and key not in Rules.model_fields), None)
    if wrong is not None:
        option = "typical" if wrong == "typical_p" else wrong.replace("_", "-")
        raise ConfigError(
            f"--{option} doesn't apply to --beam: a search draws nothing, it looks for the likeliest text"
        )
    if len(chosen) == 2:
        raise ConfigError("--length-penalty and --gnmt-penalty exclude each other")
    rules = {key: value for key, value in given.items() if key in Rules.model_fields}
    searching = {"beams": beams, "n": n, "length_penalty": chosen[0] if chosen else None}
    return beam(**with_defaults(searching | rules, defaults))


def _prompts(prompt: str | None, file: str | None) -> list[str]:
    from weft.data.streams import characters, lines
    from weft.decode.bulk import read_prompts

    if file is None:
        return ["".join(characters("-")) if prompt == "-" else prompt or ""]
    return read_prompts(lines(file), "standard input" if file == "-" else file)


def _pattern(run: "Run", regex: str | None, schema: Path | None, grammar: Path | None) -> "Grammar | None":
    file = schema or grammar
    if regex is not None:
        return run.pattern(regex)
    if file is None:
        return None
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not valid UTF-8: {error.reason} at byte {error.start}") from None
    tree = None if schema is None else parse_json(text, str(file), ConfigError)
    try:
        return run.grammar(text) if schema is None else run.schema(tree)
    except WeftError as error:
        raise ConfigError(f"{file}: {error}") from None
