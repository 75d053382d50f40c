"""Generation: read the prompts once, then one token at a time with what the model remembers.

`generate` works on token ids and yields each as it is chosen; `writing` turns them into text. Rows of a batch are
independent: a row's text follows from its prompt, its seed and its settings, whoever its neighbours are.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from weft.decode.config import Rules, Sampling
from weft.decode.fast import cpu as lean
from weft.decode.fast import cuda as fused
from weft.decode.fast.cuda_graphs import Chooser, FixedStep, can_be_fixed, run_ahead
from weft.decode.room import make_room, start
from weft.decode.sampling import choose
from weft.decode.shaping import Past, ban, check_ids, needs_past, shaped
from weft.errors import ModelError
from weft.models.base import LanguageModel, Source, State
from weft.models.transformer import Transformer, TransformerState

Finish = Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class Token:
    """One token of one row. `finish` says why the row ends with it: the model ended the text itself ("eos"), the
    caller or a constraint stopped it ("stop"), or the token limit or the model's window is reached ("length").

    `logprob` is what the model gave this token and `top` the likeliest ones, as (id, log-probability), if asked for.
    """

    row: int
    id: int
    finish: Finish | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Constraint(Protocol):
    """Says which tokens one row may write next."""

    def allowed(self) -> Tensor:
        """(V,), True where a token may follow; never all False while the text is not over."""
        ...

    def push(self, token: int) -> None:
        """This token was written."""
        ...

    @property
    def over(self) -> bool:
        """Nothing but the end of the text may follow."""
        ...


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    settings: Sampling | Sequence[Sampling],
    *,
    copies: int = 1,
    eos_id: int | None = None,
    vocab_size: int | None = None,
    seeds: Sequence[int] | None = None,
    source: Source | None = None,
    stops: Callable[[int, int], bool] | None = None,
    constraints: Sequence[Constraint] | None = None,
) -> Iterator[Token]:
    """Continue `prompts`, ragged lists of ids, none empty; tokens come step by step, rows in order within a step.

    Each prompt has settings of its own, or all share one. With `copies` each prompt is read once and continued so many
    times: rows 0 … copies − 1 belong to the first one. A row ends with `eos_id`, after `max_tokens`, where the model's
    window is full, where `stops(row, id)` says so, or where its constraint is over. Only ids below `vocab_size` are
    chosen: a model may have more rows than its tokenizer has tokens. Row i draws from a generator seeded with seeds[i],
    by default its settings' seed + i.
    """
    window = longest_text(model)
    check_prompts(model, prompts, window)
    several = [settings] * len(prompts) if isinstance(settings, Sampling) else list(settings)
    assert len(several) == len(prompts), "one setting a prompt"
    if copies < 1:
        raise ModelError(f"n = {copies}: at least one text a prompt")
    several = [each for each in several for _ in range(copies)]
    size = chosen_size(model, vocab_size)
    check_ids(several, size)
    seeds = [each.seed + row for row, each in enumerate(several)] if seeds is None else seeds
    assert len(seeds) == len(several), "one seed a row"
    assert constraints is None or len(constraints) == len(several), "one constraint a row"
    return _steps(model, prompts, several, copies, window, eos_id, size, seeds, source, stops, constraints)


@torch.inference_mode()  # as a decorator: a `with` would stay in force in the caller, between two tokens
def _steps(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    settings: Sequence[Sampling],
    copies: int,
    window: int | None,
    eos_id: int | None,
    vocab_size: int,
    seeds: Sequence[int],
    source: Source | None,
    stops: Callable[[int, int], bool] | None,
    constraints: Sequence[Constraint] | None,
) -> Iterator[Token]:
    device = device_of(model)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    lengths = [len(prompt) for prompt in prompts for _ in range(copies)]
    rows = list(range(len(lengths)))  # those still being continued, by batch row
    room = max_room(lengths, settings, window)
    state, logits = read_prompts(model, prompts, copies, room, source)
    fixed = device.type == "cuda" and state.max_len == room and can_be_fixed(model, state)
    if fixed and constraints is None and all(map(unshaped, settings)):
        yield from _ahead(model, state, logits, settings, generators, lengths, window, eos_id, vocab_size, stops)
        return
    step = stepper(model, state)
    past = Past([p for p in prompts for _ in range(copies)], vocab_size, device) if needs_past(settings) else None
    count = 0
    while True:
        logits = logits[:, :vocab_size]
        mine = [settings[row] for row in rows]
        ready = shaped(logits, mine, past, count, eos_id)
        if constraints is not None:
            ready = ban(ready, ~torch.stack([constraints[row].allowed() for row in rows]).to(device))
        newest = choose(ready, mine, [generators[row] for row in rows])
        chosen: list[int] = newest.tolist()
        said = reports(logits, chosen, mine)
        count += 1
        going: list[int] = []
        for place, (row, token) in enumerate(zip(rows, chosen, strict=True)):
            # the newest token isn't read yet, so a full window still gave it
            full = count == settings[row].max_tokens or (window is not None and lengths[row] == window)
            stopped = stops is not None and stops(row, token)
            if constraints is not None and token != eos_id:
                constraints[row].push(token)
                stopped = stopped or constraints[row].over
            finish: Finish | None = "eos" if token == eos_id else "stop" if stopped else "length" if full else None
            yield Token(row, token, finish, *said[place])
            if finish is None:
                going.append(place)
        if not going:
            return
        if past is not None:
            past.push(newest)
        if len(going) < len(rows):
            index = torch.tensor(going, device=device)
            state.reorder(index)
            if past is not None:
                past.reorder(index)
            rows = [rows[place] for place in going]
            chosen = [chosen[place] for place in going]
            longest = max(lengths[row] for row in rows)
            if state.longest > longest:
                state.truncate(longest)  # forgets nothing: it gives the room of the ended rows to the others
            step = stepper(model, state)
        if make_room(state, 1, room):
            step = stepper(model, state)
        for row in rows:
            lengths[row] += 1
        logits = step(torch.tensor(chosen, device=device))


def stepper(model: LanguageModel, state: State) -> Callable[[Tensor], Tensor]:
    """From the next tokens (batch,) to logits (batch, V): one step of the model, by the fastest way that fits."""
    if state.lengths.is_cuda and can_be_fixed(model, state):
        assert isinstance(model, Transformer) and isinstance(state, TransformerState)
        return FixedStep(model, state)
    if lean.fits(model, state):
        assert isinstance(model, Transformer) and isinstance(state, TransformerState)
        return lean.Lean(model, state)
    return lambda tokens: model.step(tokens.unsqueeze(1), state)[:, -1]


def unshaped(rules: Sampling) -> bool:
    """Whether the next token follows from the logits alone, and nobody asks for more than the token."""
    wishes = rules.logit_bias or rules.banned or rules.forced or rules.min_tokens
    return not wishes and not rules.penalises and rules.logprobs is None


def _ahead(
    model: LanguageModel,
    state: State,
    logits: Tensor,
    settings: Sequence[Sampling],
    generators: Sequence[torch.Generator],
    lengths: Sequence[int],
    window: int | None,
    eos_id: int | None,
    vocab_size: int,
    stops: Callable[[int, int], bool] | None,
    record: bool | None = None,
) -> Iterator[Token]:
    """The same with steps that choose by themselves; rows that have ended go on unseen until all have."""
    assert isinstance(model, Transformer) and isinstance(state, TransformerState)
    most = [
        each.max_tokens if window is None else min(each.max_tokens, window - length + 1)
        for each, length in zip(settings, lengths, strict=True)
    ]
    chooser = Chooser(settings, generators, max(most), vocab_size, logits.device)
    going = list(range(len(settings)))
    for count, chosen in enumerate(run_ahead(model, state, logits, chooser, max(most), record), start=1):
        for row in list(going):
            token = chosen[row]
            stopped = stops is not None and stops(row, token)
            full = count == most[row]
            finish: Finish | None = "eos" if token == eos_id else "stop" if stopped else "length" if full else None
            if finish is not None:
                going.remove(row)
            yield Token(row, token, finish)
        if not going:
            return


Report = tuple[float | None, tuple[tuple[int, float], ...]]


def reports(logits: Tensor, chosen: Sequence[int], settings: Sequence[Sampling]) -> list[Report]:
    """For each row of logits (B, V) that asks for it, log p of the chosen token and of the likeliest ones."""
    wanted = [each.logprobs for each in settings]
    most = max((want for want in wanted if want is not None), default=None)
    if most is None:
        return [(None, ())] * len(chosen)
    log_p = logits.float().log_softmax(dim=-1)
    values, ids = log_p.topk(min(most, logits.shape[-1]), dim=-1)
    tops = [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    own = log_p.gather(-1, torch.tensor(chosen, device=logits.device).unsqueeze(-1)).squeeze(-1).tolist()
    return [(None, ()) if want is None else (own[row], tuple(tops[row][:want])) for row, want in enumerate(wanted)]


def read_prompts(
    model: LanguageModel, prompts: Sequence[Sequence[int]], copies: int, room: int, source: Source | None
) -> tuple[State, Tensor]:
    """The state after the prompts, which can grow to `room`, and logits (B · copies, V) after the last token of each.

    Only these places go through the head, and a prompt that is continued several times is read once.
    """
    device = device_of(model)
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    last = torch.tensor(lengths, device=device)
    ragged = min(lengths) < longest
    state = start(model, len(prompts), longest, room, device, source)
    features = fused.read(model, tokens.to(device), state, last if ragged else None)
    logits = model.head(features[torch.arange(len(prompts), device=device), last - 1].unsqueeze(1))[:, 0]
    if copies > 1:
        index = torch.arange(len(prompts), device=device).repeat_interleave(copies)
        state.reorder(index)
        logits = logits[index]
    return state, logits


def max_room(lengths: Sequence[int], rules: Sequence[Rules], window: int | None) -> int:
    """The most tokens that any row can reach."""
    # rows step together and the cache is as wide as the longest prompt, so the two maxima add up
    room = max(lengths) + max(rule.max_tokens for rule in rules)
    return room if window is None else min(room, window)


def longest_text(model: LanguageModel) -> int | None:
    """The most tokens the model can read, or None where nothing limits it."""
    return getattr(model.config, "longest", None)


def chosen_size(model: LanguageModel, vocab_size: int | None) -> int:
    """How many tokens there are to choose from."""
    own: int = getattr(model.config, "vocab_size", 0)
    return own if vocab_size is None else min(own, vocab_size)


def device_of(model: LanguageModel) -> torch.device:
    for tensor in [*model.parameters(), *model.buffers()]:
        return tensor.device
    return torch.device("cpu")


def check_prompts(model: LanguageModel, prompts: Sequence[Sequence[int]], window: int | None) -> None:
    assert prompts, "nothing to continue"
    if model.training:
        raise ModelError("the model is in training mode, where dropout changes what it writes; call model.eval() first")
    vocab_size: int = getattr(model.config, "vocab_size", 0)
    for row, prompt in enumerate(prompts):
        which = "the prompt" if len(prompts) == 1 else f"prompt {row}"
        if not prompt:
            raise ModelError(f"{which} is empty; it needs at least one token to start from")
        if window is not None and len(prompt) > window:
            raise ModelError(f"{which} is {len(prompt)} tokens long, but the model reads at most {window}")
        wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ModelError(f"{which} holds the id {wrong}, outside the model's vocabulary of {vocab_size}")
