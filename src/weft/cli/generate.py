"""`weft generate`: continue texts with a trained model."""

import json
from functools import partial
from itertools import chain
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.console import generation, options
from weft.cli.console.distributed import distributed_command, load_sharded, refuse_sharded
from weft.cli.console.generation import DEFAULT_MAX_TOKENS, PANELS, Settings, TextRemarks, generation_options
from weft.cli.console.options import option, run_option
from weft.cli.console.terminal import echo, loading, print_tables, write
from weft.errors import ConfigError, WeftError
from weft.figures.tables import Table
from weft.storage.files import check_writable
from weft.storage.untrusted import parse_json

if TYPE_CHECKING:
    from weft.api.run import Run
    from weft.decode.config import Beam, Sampling
    from weft.decode.constrain import Grammar
    from weft.decode.text import Completion

MAX_LOOKUP = 1000  # tokens of an n-gram that --lookup may match
sampling_option = partial(option, rich_help_panel=PANELS["sampling"])
search_option = partial(option, rich_help_panel=PANELS["beam"])
constraint = partial(option, rich_help_panel=PANELS["rules"])
many_texts = partial(option, rich_help_panel="Many texts")
speed = partial(option, rich_help_panel="Speed")


@distributed_command
@generation_options(
    "temperature top_k top_p min_p typical_p seed logprobs beams length_penalty max_tokens slide min_tokens stop"
    " repetition_penalty frequency_penalty presence_penalty no_repeat_ngram",
    defaults={"max_tokens": str(DEFAULT_MAX_TOKENS), "seed": "0", "beams": "no search"},
)
def generate(
    run: options.Run,
    settings: Settings,
    prompt: str | None = option(None, "The text to continue; '-' reads it from standard input.", "--prompt", "-p"),
    greedy: bool = sampling_option(False, "Always take the likeliest token.", "--greedy"),
    amateur: Path | None = run_option(
        "Contrastive decoding: prefer what this weaker run finds less likely.", PANELS["sampling"]
    ),
    contrast: float | None = sampling_option(None, "The strength of --amateur. (default: 0.5)"),
    gnmt_penalty: float | None = search_option(None, "Instead: divide log p by ((5 + length) / 6) to this power."),
    ban: list[str] | None = constraint(None, "Never generate this token. May be repeated."),
    regex: str | None = constraint(None, "Generate text that matches this regular expression."),
    json_schema: Path | None = constraint(None, "Generate JSON that follows the schema in this file.", value="FILE"),
    grammar: Path | None = constraint(None, "Generate text that follows the Lark grammar in this file.", value="FILE"),
    special_tokens: options.SpecialTokens = False,
    n: int = many_texts(1, "Number of texts per prompt.", "--n", "-n"),
    file: str | None = many_texts(None, "Prompts, one per line ('-': standard input; .jsonl: JSON).", value="FILE"),
    out: Path | None = many_texts(None, "Write JSON lines to this file; an unfinished file is continued."),
    batch: int | None = many_texts(None, "Number of prompts per batch. (default: 16)"),
    as_json: bool = many_texts(False, "Print one line of JSON per prompt.", "--json"),
    draft: Path | None = run_option(
        "Speculative decoding with this smaller run; samples differ, equally likely.", "Speed"
    ),
    lookup: int | None = speed(None, "Speculative decoding from earlier matches of up to this many tokens."),
    quantize: str | None = speed(None, "Quantise the weights: bf16, int8, int4 or auto.", value="BITS"),
    quantize_cache: str | None = speed(None, "Quantise the KV cache of many texts: int8.", value="BITS"),
) -> None:
    """Continue a text with a trained model. The prompt and its continuation are printed while they are generated.

    $ weft generate runs/gpt-tiny --prompt 'It was a dark and' --max-tokens 100

    An imported checkpoint uses the settings of its generation_config.json unless an option overrides them. A model that
    is too large for one GPU is sharded over several with torchrun:

    $ torchrun --nproc-per-node 2 --no-python -- weft generate runs/large
    """
    with loading():
        from weft.api.load import load
        from weft.parallel.ranks import join

    ranks, beams = join(), settings.get("beams")
    drafts, patterns = draft is not None or lookup is not None, (regex, json_schema, grammar)
    one_text = file is None and out is None and not as_json and beams is None and n == 1
    one_text = one_text and "logprobs" not in settings
    refusals = {
        "--prompt and --file exclude each other": prompt is not None and file is not None,
        f"--n {n}: expected 1 or more texts": n < 1,
        f"--batch {batch}: expected 1 or more prompts": batch is not None and batch < 1,
        f"--batch {batch}: there is only one prompt; --file reads many": batch is not None and file is None,
        f"--n {n}: greedy decoding draws nothing, so all texts would be equal; use --beam": greedy and n > 1,
        "--draft and --lookup write one text; leave out --n, --beam, --file, --out, --json": drafts and not one_text,
        "--draft and --lookup exclude each other": draft is not None and lookup is not None,
        f"--lookup {lookup}: expected 1 … {MAX_LOOKUP} tokens": lookup is not None and not 1 <= lookup <= MAX_LOOKUP,
        "--regex, --json-schema and --grammar exclude each other": sum(each is not None for each in patterns) > 1,
        "--amateur cannot be combined with --draft or --lookup, which speculate for one model": amateur and drafts,
        "--quantize-cache is for many texts: give --file, and no --beam": (
            quantize_cache is not None and (file is None or beams is not None)
        ),
        "--contrast needs --amateur, the weaker run to contrast with": contrast is not None and amateur is None,
    }
    for message, refused in refusals.items():
        if refused:
            raise ConfigError(message)
    quantized = {"--quantize": quantize, "--quantize-cache": quantize_cache}
    refuse_sharded(ranks, {**quantized, "--draft": draft, "--amateur": amateur, "--out": out})
    if beams is None:
        settings = generation.with_greedy(settings, greedy)
    elif greedy:
        settings["greedy"] = True
    settings_with = partial(_sampling_or_beam, settings, n, gnmt_penalty)
    settings_with({})  # refuse invalid settings before anything is loaded
    if out is not None:
        check_writable(out)
    prompts = ranks.share(lambda: _prompts(prompt, file))
    loaded = load_sharded(run, special_tokens=special_tokens, quantize=quantize)
    loaded.objective.check_continues("continue a text")
    defaults = loaded.defaults if beams is None else loaded.beam_defaults
    chosen = settings_with({"max_tokens": DEFAULT_MAX_TOKENS, **defaults})
    generation.log_checkpoint_defaults(loaded, chosen, settings)
    if amateur is not None:
        loaded = loaded.against(load(amateur), 0.5 if contrast is None else contrast)
    for text in ban or ():
        ids = loaded.tokenizer.encode(text)
        if len(ids) != 1:
            raise ConfigError(f"--ban {text!r}: {len(ids)} tokens in this tokenizer; only single tokens can be banned")
        chosen = chosen.replace(banned=(*chosen.banned, *ids))
    pattern = _pattern(loaded, regex, json_schema=json_schema, grammar=grammar)
    remarks = TextRemarks(loaded, chosen, pattern)
    if one_text:
        draft_run = None if draft is None else load(draft)
        stream = loaded.write(prompts[0], chosen, pattern=pattern, draft=draft_run, lookup=lookup)  # type: ignore[arg-type]
        first = next(stream, None)  # errors come before the prompt is printed
        write(prompts[0])
        for text in remarks.counted(stream if first is None else chain([first], stream)):
            write(text)
        write("\n")
    elif out is not None or as_json or file is not None:
        notes = {"quantize": loaded.quantized, "amateur": amateur and str(amateur), "contrast": contrast}
        lines = loaded.bulk(
            prompts,
            chosen,
            n=n,
            batch=batch or 16,
            out=out,
            pattern=pattern,
            quantize_cache=quantize_cache,
            notes={key: value for key, value in notes.items() if value is not None},
        )
        for line in lines:
            for each in json.loads(line)["completions"]:
                remarks.count(each["text"], each["tokens"], each["finish"], slid=each.get("slid", False))
            if out is None:
                echo(line)
    else:
        for index, completion in enumerate(loaded.candidates(prompts, chosen, n=n, pattern=pattern)[0]):
            remarks.count(completion.text, completion.tokens, completion.finish, slid=completion.slid)
            if index:
                echo("---")
            echo(prompts[0] + completion.text)
            if completion.scored:
                print_tables(_logprobs_table(completion))
    remarks.log()


def _sampling_or_beam(settings: Settings, n: int, gnmt_penalty: float | None, defaults: Settings) -> "Sampling | Beam":
    """Return the settings of sampling or, with `beams`, of beam search; refuse options of the other."""
    from weft.api.settings import beam, sampling, with_defaults
    from weft.decode.config import Beam, Rules

    if "beams" not in settings:
        if "length_penalty" in settings or gnmt_penalty is not None:
            raise ConfigError("--length-penalty and --gnmt-penalty need --beam")
        return sampling(**with_defaults(settings, defaults))
    if "slide" in settings:
        raise ConfigError("--no-slide does not apply to --beam: a search always stops where the window is full")
    other = next((name for name in settings if name not in Beam.model_fields), None)
    if other is not None:
        option = "typical" if other == "typical_p" else other.replace("_", "-")
        raise ConfigError(f"--{option} does not apply to --beam: a search draws nothing, it finds the likeliest text")
    if "length_penalty" in settings and gnmt_penalty is not None:
        raise ConfigError("--length-penalty and --gnmt-penalty exclude each other")
    rules = {name: value for name, value in settings.items() if name in Rules.model_fields}
    search = {"beams": settings["beams"], "n": n, "length_penalty": None}
    if gnmt_penalty is not None:
        search["length_penalty"] = {"kind": "gnmt", "alpha": gnmt_penalty}
    elif "length_penalty" in settings:
        search["length_penalty"] = {"kind": "power", "alpha": settings["length_penalty"]}
    return beam(**with_defaults(search | rules, defaults))


def _prompts(prompt: str | None, file: str | None) -> list[str]:
    from weft.data.streams import characters, lines
    from weft.decode.bulk import read_prompts

    if file is None:
        return ["".join(characters("-")) if prompt == "-" else prompt or ""]
    return read_prompts(lines(file), "standard input" if file == "-" else file)


def _pattern(run: "Run", regex: str | None, *, json_schema: Path | None, grammar: Path | None) -> "Grammar | None":
    file = json_schema or grammar
    if regex is not None:
        return run.pattern(regex)
    if file is None:
        return None
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not valid UTF-8: {error.reason} at byte {error.start}") from None
    tree = None if json_schema is None else parse_json(text, str(file), ConfigError)
    try:
        return run.grammar(text) if json_schema is None else run.schema(tree)
    except WeftError as error:
        raise ConfigError(f"{file}: {error}") from None


def _logprobs_table(completion: "Completion") -> Table:
    rows = []
    for token in completion.scored:
        likeliest = "  ".join(f"{text!r} {exp(logprob):.3f}" for text, logprob in token.top)
        rows.append((repr(token.text), f"{exp(token.logprob):.3f}", likeliest))
    return Table(("token", "probability", "likeliest here"), rows, text=(0, 2))
