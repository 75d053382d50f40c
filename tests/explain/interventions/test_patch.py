"""Patching: the shares recovered, paths and circuits on models that are known, and its errors in one line."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cli.test_explain import RUNS
from tests.explain.interventions.test_taps import MODELS
from tests.explain.small import IdTokenizer, sharp
from tests.spread import spread

import weft
from weft.errors import WeftError
from weft.explain.interventions.patch import Measured, ablated_accuracy, mean_activations
from weft.explain.interventions.sites import nodes, sites
from weft.explain.interventions.swap import Swap, TextPair, batches, replacements
from weft.explain.reading import Reading


def pairs_of(name: str, count: int = 6) -> list[TextPair]:
    model, generator, pairs = sharp(MODELS[name]), torch.Generator().manual_seed(0), []
    for number in range(count):
        clean, corrupt = (torch.randint(0, 40, (6 + number % 2,), generator=generator).tolist() for _ in range(2))
        clean[-1] = corrupt[-1] = 5
        both: Any = [(tuple(clean), None), (tuple(corrupt), None)]
        if MODELS[name].kind in ("encoder-decoder", "bahdanau"):
            both = [((3, 4, 5), tuple(ids)) for ids in (clean, corrupt)]
        one, two = [Reading(model, IdTokenizer(), ids, source=source) for ids, source in both]  # type: ignore[arg-type]
        pairs.append(TextPair(one, two, len(both[0][0]) - 1, 7, 9).check())
    return pairs


@pytest.mark.parametrize("name", MODELS)
def test_patching_with_itself_changes_no_bit_and_with_everything_gives_the_other_text(name: str) -> None:
    everywhere = torch.ones(1, 1, 1, dtype=torch.bool)
    for batch in batches(pairs_of(name)):
        names = [tap for site in sites(batch.model) for tap in site.taps]
        for side in ("corrupt", "clean"):
            values = {tap: (x, everywhere) for tap, x in batch.activations(side, names).items()}
            patched = batch.logits("corrupt", replacements(batch.model, values))
            if side == "corrupt":
                assert torch.equal(patched, batch.logits("corrupt"))
            else:
                torch.testing.assert_close(patched, batch.logits("clean"), atol=1e-5, rtol=1e-5)


def test_rows_of_a_batch_are_patched_separately() -> None:
    """Many swaps in one pass give what each gives alone."""
    (batch, *_) = batches(pairs_of("decoder", 4))
    variants = [[Swap(tap, node.units) for tap in node.taps] for node in nodes(batch.model)]
    variants += [[Swap("decoder.0.residual", position=n)] for n in range(6)]
    values = batch.activations("clean", list(dict.fromkeys(swap.tap for swaps in variants for swap in swaps)))
    together = torch.stack(list(batch.exchange(variants, values)))
    alone = torch.stack([next(batch.exchange([swaps], values)) for swaps in variants])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_paths_of_a_linear_model_add_up() -> None:
    """Without norms and feed-forward, layer 1 writes straight to the logits: its path to the output is its effect."""
    config = MODELS["attention alone"].replace(placement="none")
    model = sharp(config, factor=12.0)
    pairs = [
        pair._replace(clean=Reading(model, *rest(pair.clean)), corrupt=Reading(model, *rest(pair.corrupt)))
        for pair in pairs_of("attention alone", 4)
    ]
    measured = Measured(batches(pairs), 1.0)
    ends = [node for node in nodes(model) if node.name in ("head 1.0", "head 0.0", "head 0.1")]
    paths = {path.name: path for path in measured.paths(nodes(model), ends)}
    (effect,) = measured.effects([("head 1.0", [Swap(ends[-1].taps[0], ends[-1].units)])])
    assert paths["head 1.0 → output"].recovered == pytest.approx(effect.recovered, abs=1e-5)
    assert "head 0.0 → head 1.0" in paths
    assert not {"head 0.0 → head 0.1", "head 1.0 → head 0.0"} & set(paths)  # no such path exists


def rest(reading: Reading) -> tuple[Any, ...]:
    return reading.tokenizer, reading.ids


def test_ablating_everything_leaves_one_answer_for_all_texts() -> None:
    pairs = pairs_of("decoder", 40)
    parts = batches(pairs)
    means = mean_activations(parts, nodes(parts[0].model))
    (tap, mean), *_ = next(iter(means.values())).items()
    values = [parts[0].activations(side, [tap])[tap] for side in ("clean", "corrupt")]
    torch.testing.assert_close(mean, torch.cat(values).mean(0, keepdim=True))
    assert ablated_accuracy(parts, nodes(parts[0].model), means).preferred in (0.0, 0.5, 1.0)


KINDS = {"gpt": "residual stream", "lstm": "hidden", "bahdanau": "source states"}


@pytest.mark.parametrize(("name", "kind"), spread(KINDS.items(), 1))
def test_a_run_shows_maps_that_the_command_prints(name: str, kind: str, tmp_path: Path) -> None:
    run = weft.load(RUNS / name)
    if name == "bahdanau":
        found: Any = run.explain.patch("the cat", "the dog", ("cat", "dog"), target="the")
    else:
        found = run.explain.patch("Fi", "Yi", ("i", "v"))
    assert kind in [each.kind for each in found.maps]
    shares = {each.kind: each.recovered for each in found.maps}[kind]
    data = found.data()["maps"][[each.kind for each in found.maps].index(kind)]
    np.testing.assert_allclose(data["recovered"], shares, atol=1e-6)
    assert f"logit difference of {found.answers[0]} − {found.answers[1]}: " in found.text()
    assert found.save(tmp_path / "patch.svg").stat().st_size > 5000
    assert "<script" in found.save(tmp_path / "patch.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"corrupt": "the cats"}, "the two texts have 8 and 9 tokens"),
        ({"answer": "zq"}, "answer 'zq': no single token spells it here"),
        ({"corrupt": ""}, "'corrupt' is empty"),
        ({"corrupt": "cat " * 40}, "the model reads"),
        ({"corrupt": "the cat"}, "the two texts are the same to the model"),
        ({"wrong": "s"}, "the two answers are the same token"),
    ],
)
def test_unusable_pairs(row: dict[str, str], message: str, tmp_path: Path) -> None:
    table = tmp_path / "pairs.jsonl"
    good = {"clean": "the cat", "corrupt": "the bat", "answer": "s", "wrong": "t"}
    table.write_text(json.dumps(good) + "\n" + json.dumps(good | row) + "\n")
    with pytest.raises(WeftError, match=r"pairs.jsonl:2: ") as error:
        weft.load(RUNS / "gpt").explain.patch(pairs=str(table))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_table_of_another_kind_names_the_missing_column(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text("good,bad\na b,b a\n")
    with pytest.raises(WeftError, match=r"pairs.csv.*no column 'clean'"):
        weft.load(RUNS / "lstm").explain.patch(pairs=str(tmp_path / "pairs.csv"))


def test_a_difference_that_is_small_against_the_logits_has_no_shares(tmp_path: Path) -> None:
    """The answers' logits differ by 0.0003 between the two texts, and all logits by 0.06 from each other."""
    explain = weft.load(RUNS / "gpt").explain
    with pytest.raises(WeftError) as error:
        explain.patch("the cat", "the bat", ("s", "t"))
    expected = "is -0.1161 after the clean text and -0.1164 after the corrupt one: too near each other"
    assert expected in str(error.value) and "which takes 0.0006; try other texts" in str(error.value)
    row = {"clean": "Fi", "corrupt": "Yi", "answer": "i", "wrong": "v"}
    back = row | {"clean": "Yi", "corrupt": "Fi"}  # together, the two pairs differ by nothing
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, (row, back))))
    with pytest.raises(WeftError, match=r"of the answers, in the mean of 2 pairs, is .* too near each other"):
        explain.patch(pairs=str(tmp_path / "pairs.jsonl"))
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, [row, back] * 4 + [row] * 8)))
    found: Any = explain.patch(pairs=str(tmp_path / "pairs.jsonl"))  # only the first 8 differ by nothing
    assert all(abs(each.recovered).max() < 5 for each in found.maps)


def test_a_model_whose_weights_are_nan_is_refused() -> None:
    run = weft.load(RUNS / "lstm")
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(float("nan"))
    with pytest.raises(WeftError, match="logits are NaN"):
        run.explain.patch("the cat", "the bat", ("s", "t"))
    with pytest.raises(WeftError, match="probabilities are NaN"):
        run.abilities(["copying"])
    with pytest.raises(WeftError, match="probabilities are NaN"):
        run.explain.surprise("the cat")
    with pytest.raises(WeftError, match="activations are NaN"):
        run.explain.probe("builtin:number")
    assert math.isnan(run.perplexity("the cat"))


def test_what_patching_needs() -> None:
    for answer in (("s",), (1, 2)):
        with pytest.raises(WeftError, match=r"answer = .*: expected tuple\[str, str\]"):
            weft.load(RUNS / "lstm").explain.patch("the cat", "the bat", answer)  # type: ignore[arg-type]
    with pytest.raises(WeftError, match="answer ' ': no single token spells it here; this tokenizer reads "):
        weft.load(RUNS / "bahdanau").explain.patch("the cat", "the dog", (" ", "dog"))
    with pytest.raises(WeftError, match="give two texts and their answers"):
        weft.load(RUNS / "lstm").explain.patch()
    with pytest.raises(WeftError, match="--answer is missing"):
        weft.load(RUNS / "lstm").explain.patch("the cat", "the bat")
    with pytest.raises(WeftError, match="no taps"):
        weft.load(RUNS / "ngram").explain.patch("the cat", "the bat", ("s", "t"))
    with pytest.raises(WeftError, match="predicts no tokens"):
        weft.load(RUNS / "classify").explain.patch("the cat", "the bat", ("s", "t"))
    with pytest.raises(WeftError, match=r"write .* once, where the answer is predicted"):
        weft.load(RUNS / "masked-next").explain.patch("the cat", "the bat", ("s", "t"))
