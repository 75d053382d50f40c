"""Minimal pairs: scores against plain loops, tables of pairs, and mistakes."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from tests.command import Cli

import weft
from weft.errors import ConfigError, DataError
from weft.evaluate.minimal_pairs import Accuracy, MinimalPair, PairScore, read_pairs
from weft.evaluate.pseudo_likelihood import MaskedText, pseudo_log_likelihoods
from weft.models.transformer import Transformer

RUNS = Path(__file__).parent / "runs-0.1"
PAIRS = [("the cat sat on the mat", "the cat sat the on mat"), ("a dog", "a dog dog"), ("the the", "mat the")]


@pytest.mark.parametrize("name", ["gpt", "lstm", "ngram", "muon"])
def test_causal_models_compare_sentences_and_critical_words(name: str) -> None:
    run = weft.load(RUNS / name)
    found = run.minimal_pairs(PAIRS)
    first = run.tokenizer.eos_id if run.tokenizer.bos_id is None else run.tokenizer.bos_id
    assert first is not None

    def log_p(context: list[int], ids: list[int]) -> float:
        with torch.no_grad():
            rows = run.model(torch.tensor([[*context, *ids][:-1]]))[0].log_softmax(-1)
        return float(rows[len(context) - 1 :].gather(1, torch.tensor(ids)[:, None]).sum())

    for (good, bad), score in zip(PAIRS, found.scores["sentence"], strict=True):
        expected = [log_p([first], run.tokenizer.encode(f" {text}")) for text in (good, bad)]
        assert score is not None and list(score) == pytest.approx(expected, rel=1e-4)
    prefix = run.tokenizer.encode("the cat sat")
    words = [run.tokenizer.encode(f"the cat sat {word}")[len(prefix) :] for word in ("on", "the")]
    by_prefix = found.scores["prefix"]
    assert by_prefix[0] is not None
    assert list(by_prefix[0]) == pytest.approx([log_p(prefix, ids) for ids in words], rel=1e-4)
    assert by_prefix[1] is None, "one sentence begins with the whole of the other, so no word decides"
    assert found.accuracy == sum(score.value for score in found.scores["sentence"] if score) / 3


def test_a_sentence_longer_than_the_window_is_read_in_several() -> None:
    run = weft.load(RUNS / "gpt")
    long = " ".join(["the cat sat on the mat"] * 12)
    (score,) = run.minimal_pairs([(long, f"{long} mat")]).scores["sentence"]
    assert score is not None and score.bad < score.good < 0


def test_masked_models_hide_the_later_tokens_of_a_word() -> None:
    run = weft.load(RUNS / "masked-next")
    model, tokenizer = run.model, run.tokenizer
    assert isinstance(model, Transformer)
    torch.manual_seed(0)
    with torch.no_grad():  # this run has hardly learned to look at other tokens
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    found = run.minimal_pairs(PAIRS)
    ids = [tokenizer.need("cls"), *tokenizer.encode(PAIRS[0][0]), tokenizer.need("sep")]
    tokens = [tokenizer.token(id) for id in ids]
    assert any(token.startswith("##") for token in tokens), "without such words, both orders are the same"
    sums = {"words left to right": 0.0, "single tokens": 0.0}
    for name in sums:
        for position in range(1, len(ids) - 1):
            end = position + 1
            while name != "single tokens" and tokens[end].startswith("##"):
                end += 1
            hidden = [*ids[:position], *[tokenizer.need("mask")] * (end - position), *ids[end:]]
            with torch.no_grad():
                features = model.features(torch.tensor([hidden]))[0, position]
                log_p = model.readout(features).logits().log_softmax(-1)
            sums[name] += float(log_p[ids[position]])
    for name, expected in sums.items():
        score = found.scores[name][0]
        assert score is not None and score.good == pytest.approx(expected, rel=1e-5)
    assert sums["words left to right"] != pytest.approx(sums["single tokens"], rel=1e-3)


def test_no_text_has_no_pseudo_log_likelihood() -> None:
    run = weft.load(RUNS / "masked-next")
    assert isinstance(run.model, Transformer)
    assert list(pseudo_log_likelihoods(run.model, run.tokenizer, [MaskedText((5,), range(0))])) == []


def test_an_encoder_decoder_compares_targets(tmp_path: Path, cli: Cli) -> None:
    run = weft.load(RUNS / "pairs")
    (tmp_path / "pairs.tsv").write_text("source\tgood\tbad\na b\tb a\ta b\n")
    found = cli.json("evaluate", RUNS / "pairs", "--pairs", tmp_path / "pairs.tsv", "--details")
    expected = [-sum(run.explain.surprise("a b", target=target).scored) for target in ("b a", "a b")]
    score = found["scores"][0]["target"]
    assert [score["good"], score["bad"]] == pytest.approx(expected, rel=1e-6)
    (tmp_path / "empty.csv").write_text("source,good,bad\n,b a,a b\n")
    for pairs in ([("b a", "a b")], tmp_path / "empty.csv"):
        where = "pair 1" if isinstance(pairs, list) else "empty.csv: line 2"
        with pytest.raises(DataError, match=f"{where}: .* column 'source'"):
            run.minimal_pairs(pairs)


def test_ties_count_half_and_groups_have_intervals(tmp_path: Path, cli: Cli) -> None:
    assert PairScore(-25.411731719970703, -25.41172981262207).value == 0.5  # the same p, rounded differently
    scores = [PairScore(-1, -2), PairScore(-2, -1), PairScore(-1, -1), PairScore(-float("inf"), -float("inf"))]
    values = [score.value for score in scores]
    found = Accuracy.of(values)
    assert found.accuracy == 0.5 and found.low < 0.5 < found.high
    assert Accuracy.of([PairScore(0, -1).value] * 5)[1:] == pytest.approx((1, 0.5655, 1), abs=1e-4)  # Wilson 1927
    wide, narrow = Accuracy.of(values * 2), Accuracy.of(values * 200)
    assert narrow.high - narrow.low < 0.2 * (wide.high - wide.low)

    for name, field in (("one", "syntax"), ("two", "semantics")):
        rows = [{"sentence_good": good, "sentence_bad": bad, "field": field, "UID": name} for good, bad in PAIRS]
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    values = cli.json("evaluate", RUNS / "gpt", "--pairs", tmp_path)
    assert [(group["level"], group["name"]) for group in values["groups"]] == [
        ("all", "all pairs"),
        *(("field", name) for name in ("semantics", "syntax")),
        *(("paradigm", name) for name in ("one", "two")),
    ]
    assert values["pairs"] == 6 and values["groups"][0]["accuracies"]["prefix"]["pairs"] == 4
    page = tmp_path / "page.html"
    out = cli("evaluate", RUNS / "gpt", "--pairs", tmp_path, "--out", page)
    assert "By field" in out and "differ in the number of tokens" in out and "Minimal pairs" in page.read_text()


def test_repeated_pairs_get_a_remark() -> None:
    run = weft.load(RUNS / "gpt")
    again = [("a b", "b a"), ("the cat", "cat the"), ("a b", "b a"), ("a b", "a a"), ("a b", "b a")]
    remarks = "\n".join(run.minimal_pairs(again).remarks)
    assert "3 of 5 pairs occur more than once; every occurrence counts." in remarks
    assert "more than once" not in "\n".join(run.minimal_pairs(again[:2]).remarks)
    # an encoder–decoder is asked about other sources with the same two translations
    sourced = [MinimalPair("b a", "a b", source=source) for source in ("a b", "b b")]
    assert "more than once" not in "\n".join(weft.load(RUNS / "pairs").minimal_pairs(sourced).remarks)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.jsonl", '{"good": "a b", "bad": "b a"}\n'),
        ("p.jsonl", '["a b", "b a"]\n'),
        ("p.csv", "bad,good\nb a,a b\n"),
        ("p.tsv", "a b\tb a\n"),
        ("p.json", '[{"sentence_good": "a b", "sentence_bad": "b a"}]'),
    ],
)
def test_tables_of_pairs(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    (pair,) = read_pairs(str(tmp_path / name))
    assert (pair.good, pair.bad, pair.paradigm) == ("a b", "b a", "p")


def test_an_encoding_that_is_not_utf_8(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "p.csv").write_bytes("good,bad\ncafé,thé\n".encode("cp1252"))
    (row,) = cli.json("evaluate", RUNS / "gpt", "--pairs", tmp_path / "p.csv", "--encoding", "cp1252", "--details")[
        "scores"
    ]
    assert row["good"] == "café"
    assert "leave it out" in cli.refused("evaluate", RUNS / "gpt", "--abilities", "--encoding", "cp1252")
    refused = cli.refused("evaluate", RUNS / "gpt", "--pairs", tmp_path / "p.csv", "--encoding", "nonsense")
    assert "'nonsense' is not a text encoding" in refused


def test_blimps_prefixes(tmp_path: Path) -> None:
    row = {"sentence_good": "x y z", "sentence_bad": "x w z", "one_prefix_prefix": "", "two_prefix_word": "z"}
    row |= {"two_prefix_prefix_good": "x y", "two_prefix_prefix_bad": "x w"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    (pair,) = read_pairs(str(tmp_path / "p.jsonl"))
    assert pair == MinimalPair("x y z", "x w z", critical=pair.critical, paradigm="p", where=pair.where)
    assert pair.critical == (("x y", "z"), ("x w", "z"))


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("p.jsonl", '{"good": "a", "bad": " "}', "line 1: the bad sentence is empty"),
        ("p.jsonl", '{"good": "a", "bad": "a"}', "both sentences are the same"),
        ("p.jsonl", '{"god": "a", "bad": "b"}', "no column 'good'"),
        ("p.jsonl", '{"good": 5, "bad": "b"}', "'good' holds int"),
        ("p.jsonl", '{"good": "a"', "not valid JSON"),
        ("p.jsonl", '{"good": "a\n', "not valid JSON: Invalid control character"),
        ("p.jsonl", '{"good": "a\\ud800", "bad": "b"}', "line 1: 'a\\ud800' contains a lone surrogate"),
        (
            "p.jsonl",
            '{"good": "a b", "bad": "c", "one_prefix_prefix": "a", "one_prefix_word_good": "\\ud800", '
            '"one_prefix_word_bad": "c"}',
            "line 1: '\\ud800' contains a lone surrogate",
        ),
        ("p.csv", "Good,Bad\nx,y\n", "no column 'good'"),
        ("p.jsonl", "5", "expected an object"),
        ("p.jsonl", "", "has no pairs"),
        ("p.csv", "a,b,c\nx,y,z\n", "name two columns 'good' and 'bad'"),
        ("p.txt", "a b", "expected a table of pairs"),
    ],
)
def test_mistakes_get_one_line(tmp_path: Path, name: str, text: str, line: str, cli: Cli) -> None:
    (tmp_path / name).write_text(text)
    refused = cli.refused("evaluate", RUNS / "gpt", "--pairs", tmp_path / name)
    assert line in refused and not refused.endswith(" at")


def test_what_does_not_go_with_pairs(tmp_path: Path, cli: Cli) -> None:
    assert "has no tables" in cli.refused("evaluate", RUNS / "gpt", "--pairs", tmp_path)
    assert "no such" in cli.refused("evaluate", RUNS / "gpt", "--pairs", tmp_path / "p.tsv").lower()
    assert "no such" in cli.refused("evaluate", RUNS / "gpt", "--pairs", tmp_path / "folder").lower()
    (tmp_path / "p.tsv").write_text("a\tb\n")
    for words in (["--stride", 3], ["--data", "x.txt"], ["--tasks", "blimp"]):
        assert "not available with" in cli.refused("evaluate", RUNS / "gpt", "--pairs", tmp_path / "p.tsv", *words)
    with pytest.raises(ConfigError, match="can't compare two sentences"):
        weft.load(RUNS / "classify").minimal_pairs([("a", "b")])
    with pytest.raises(DataError, match=r"pair 1.*model reads 32"):
        weft.load(RUNS / "masked-next").minimal_pairs([("the cat " * 40, "b")])
    assert "'': no such file" in cli.refused("evaluate", RUNS / "gpt", "--pairs", "")
    assert "goes with" in cli.refused("evaluate", RUNS / "gpt", "--pairs", tmp_path / "p.tsv", "--limit", 3)
    with pytest.raises(DataError, match="no pairs of sentences"):
        weft.load(RUNS / "gpt").minimal_pairs([])
    for wrong in (("a",), ("a", "b", "c"), (1, 2)):
        with pytest.raises(ConfigError, match=r"data = .*: expected"):
            weft.load(RUNS / "gpt").minimal_pairs([wrong])  # type: ignore[list-item]
    with pytest.raises(DataError, match=r"pair 1: the source has .* model reads"):
        weft.load(RUNS / "pairs").minimal_pairs([MinimalPair("a", "b", source="a b " * 200)])
    for empty in (("a", ""), MinimalPair("a", "")):
        with pytest.raises(DataError, match="pair 1: the bad sentence is empty"):
            weft.load(RUNS / "gpt").minimal_pairs([empty])
    with pytest.raises(DataError, match=r"pair 1: '\\x01' has no token of this model"):
        weft.load(RUNS / "masked-next").minimal_pairs([("\x01", "the cat")])
