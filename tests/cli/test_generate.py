"""`weft generate` and `weft chat`, on a model trained in a second."""

import io
import json
import math
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.cli.conftest import write_book
from tests.command import Cli, Patch

import weft
from weft.cli.main import run
from weft.decode.prompt import Prompt, chat_prompt
from weft.errors import ConfigError, DataError

Talk = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    changes = {"tokenizer": {"kind": "byte"}}
    weft.train(
        "ngram-3", data=str(write_book(folder / "book.txt")), run=folder / "run", changes=changes, log=lambda line: None
    )
    return folder / "run"


def test_several_texts_have_consecutive_seeds(trained: Path, cli: Cli) -> None:
    words = ["--prompt", "The ", "--max-tokens", "12"]
    single = [cli("generate", trained, *words, "--seed", seed).removesuffix("\n") for seed in (5, 6, 7)]
    assert cli("generate", trained, *words, "--seed", "5", "--n", "3") == "\n---\n".join(single) + "\n"


def test_beam_search_equals_the_librarys(trained: Path, cli: Cli) -> None:
    loaded = weft.load(trained)
    settings = weft.beam(beams=5, n=2, max_tokens=9, length_penalty={"kind": "gnmt", "alpha": 0.8})
    best = loaded.candidates(["A dog"], settings)[0]
    words = ["--prompt", "A dog", "--max-tokens", "9", "--beam", "5", "-n", "2", "--gnmt-penalty", "0.8"]
    assert cli("generate", trained, *words) == f"A dog{best[0].text}\n---\nA dog{best[1].text}\n"
    shown = json.loads(cli("generate", trained, *words, "--json"))
    assert [each["score"] for each in shown["completions"]] == [each.score for each in best]
    greedy = cli("generate", trained, "--prompt", "A dog", "--max-tokens", "9", "--greedy")
    assert cli("generate", trained, "--prompt", "A dog", "--max-tokens", "9", "--beam", "1") == greedy


def test_json_and_log_probabilities(trained: Path, cli: Cli) -> None:
    words = ["--prompt", "The ", "--max-tokens", "6", "--logprobs", "2"]
    line = json.loads(cli("generate", trained, *words, "--json"))
    only = line["completions"][0]
    assert line["prompt"] == "The "
    assert [each["token"] for each in only["logprobs"]] == list(only["text"])
    assert all(len(each["top"]) == 2 and each["logprob"] <= each["top"][0][1] for each in only["logprobs"])
    table = cli("generate", trained, *words)
    assert table.startswith("The " + only["text"])
    assert "probability" in table


def test_a_stop_string_is_not_in_the_log_probabilities(trained: Path, cli: Cli) -> None:
    words = ["--prompt", "The cat ", "--max-tokens", "80", "--logprobs", "0", "--json", "--stop", ".\n"]
    only = json.loads(cli("generate", trained, *words))["completions"][0]
    assert only["finish"] == "stop"
    assert "".join(each["token"] for each in only["logprobs"]) == only["text"]
    assert "." not in only["text"]


def test_minus_infinity_is_null_in_json() -> None:
    from weft.decode.bulk import as_json
    from weft.decode.text import Completion, TokenLogprob

    scored = (TokenLogprob(1, "a", -math.inf, (("b", -0.5), ("c", -math.inf))),)
    values = as_json(Completion("a", 1, "length", scored))
    assert values["logprobs"] == [{"token": "a", "id": 1, "logprob": None, "top": [["b", -0.5], ["c", None]]}]


def test_penalties_and_bans(trained: Path, cli: Cli) -> None:
    words = ["--prompt", "The ", "--max-tokens", "40"]
    banned = cli("generate", trained, *words, "--ban", "e", "--ban", "a").removeprefix("The ")
    assert not {"e", "a"} & set(banned)
    line = cli("generate", trained, "--prompt", "The ", "--max-tokens", "20", "--presence-penalty", "90", "--json")
    characters = json.loads(line)["completions"][0]["text"].replace("\ufffd", "")  # stands for different bytes
    assert len(set(characters)) == len(characters)
    for option in ("--repetition-penalty=3", "--frequency-penalty=2", "--typical=0.3", "--no-repeat-ngram=2"):
        assert cli("generate", trained, *words, option) != cli("generate", trained, *words)


@pytest.mark.parametrize("words", [["--greedy"], ["--seed", "4", "--top-k", "3"]])
def test_speculative_decoding_gives_the_same_text(trained: Path, cli: Cli, words: list[str]) -> None:
    plain = cli("generate", trained, "--prompt", "My friend", "--max-tokens", "60", *words)
    assert cli("generate", trained, "--prompt", "My friend", "--max-tokens", "60", "--lookup", "4", *words) == plain
    if words == ["--greedy"]:
        drafted = ["--prompt", "My friend", "--max-tokens", "60", "--draft", str(trained), *words]
        assert cli("generate", trained, *drafted) == plain


def test_patterns_and_schemas(trained: Path, tmp_path: Path, cli: Cli) -> None:
    out = cli("generate", trained, "--prompt", "The ", "--regex", "(cat|dog){2}")
    assert out.removeprefix("The ").strip() in {a + b for a in ("cat", "dog") for b in ("cat", "dog")}
    assert cli("generate", trained, "--prompt", "The ", "--regex", "(cat|dog){2}", "--lookup", "2") == out
    beams = cli("generate", trained, "--prompt", "The ", "--regex", "(cat|dog){2}", "--beam", "4", "-n", "4")
    assert sorted(beams.replace("The ", "").strip().split("\n---\n")) == ["catcat", "catdog", "dogcat", "dogdog"]
    (tmp_path / "s.json").write_text('{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}')
    lines = cli("generate", trained, "--json-schema", tmp_path / "s.json", "--n", "3", "--json")
    for each in json.loads(lines)["completions"]:
        assert isinstance(json.loads(each["text"])["a"], bool)
    schema = tmp_path / "s.json"
    schema.write_text('{"type": "integer", "minimum": 20, "maximum": 39}', encoding="utf-8-sig")
    assert 20 <= int(cli("generate", trained, "--prompt", "The ", "--json-schema", schema)[4:]) < 40
    for content, line in (
        ("{", "s.json: not valid JSON"),
        ("[" * 3000, "s.json: not valid JSON: nested too deeply"),
        ('{"type": "strin"}', "s.json: the schema: Invalid type: strin"),
    ):
        schema.write_text(content)
        assert line in cli.refused("generate", trained, "--json-schema", schema)


def test_a_grammar(trained: Path, tmp_path: Path, cli: Cli) -> None:
    grammar = tmp_path / "g.lark"
    grammar.write_text('start: item item\nitem: "(" ("x" | "y") ")"\n')
    words = ["--grammar", str(grammar)]
    texts = {f"({a})({b})" for a in "xy" for b in "xy"}
    assert cli("generate", trained, *words).strip() in texts
    assert set(cli("generate", trained, *words, "--beam", "4", "-n", "4").strip().split("\n---\n")) == texts
    grammar.write_text('start: "a" b\nb: c\n')
    line = cli.refused("generate", trained, *words)
    assert 'g.lark: the grammar: line 2, column 4: unknown name: "c"' in line
    assert "exclude each other" in cli.refused("generate", trained, *words, "--regex", "a")


@pytest.mark.parametrize("words", [[], ["--json"], ["--n", "1", "--logprobs", "0"]])
def test_a_text_that_ends_before_its_pattern_is_reported(trained: Path, cli: Cli, words: list[str]) -> None:
    assert "aaa" in cli("generate", trained, "--regex", "a{50}", "--max-tokens", "3", *words)
    assert cli.err == "weft: the text ends before matching the pattern; a larger --max-tokens may help\n"
    assert cli("generate", trained, "--regex", "a+", "--max-tokens", "3", *words) and cli.err == ""


@pytest.fixture
def talk(cli: Cli, monkeypatch: Patch) -> Talk:
    """A function that chats with a run in a pipe, and returns standard output and standard error."""

    def talk(folder: Path, lines: str, *words: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode()), encoding="utf-8"))
        return cli("chat", folder, *words), cli.err

    return talk


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT with sixteen positions."""
    folder = tmp_path_factory.mktemp("small")
    sizes = {"layers": 1, "d_model": 16, "context": 16, "attention": {"heads": 2}, "feedforward": {"d_ff": 16}}
    changes = {"tokenizer": {"kind": "byte"}, "steps": 1, "batch": {"length": 16, "size": 2}}
    changes["model"] = {"preset": "gpt-tiny", **sizes}
    recipe = folder / "small.toml"
    recipe.write_text("")
    data = str(write_book(folder / "book.txt"))
    weft.train(recipe, data=data, run=folder / "run", changes=changes, log=lambda line: None)
    return folder / "run"


def test_a_full_window_is_reported_once(small: Path, cli: Cli, talk: Talk) -> None:
    command = ["generate", str(small), "--prompt", "The", "--max-tokens", "60", "--ban", "\0"]
    line = "stopped at the model's 16 positions, before --max-tokens\n"
    for words in (["--no-slide"], ["--beam", "2"]):
        assert cli(*command, *words) and cli.err == f"weft: {line}"
    assert cli(*command, "--n", "3", "--json", "--no-slide") and cli.err.endswith(f"of 3 texts {line}")
    assert "--no-slide does not apply to --beam" in cli.refused(*command, "--beam", "2", "--no-slide")
    assert cli(*command[:-4], "--max-tokens", "4") and cli.err == ""
    assert talk(small, "The\nA\n", "--no-slide")[1] == f"weft: {line}"


def test_a_text_continues_beyond_the_window(small: Path, cli: Cli, talk: Talk) -> None:
    """It has the requested length, even after a prompt longer than the window, and one line reports it."""
    loaded = weft.load(small)
    message = "than the model's window of 16 tokens and continued from the last of them; --no-slide stops there\n"
    for prompt in ("The", "The cat follows my friend."):
        words = ["--prompt", prompt, "--max-tokens", "60", "--min-tokens", "60"]
        (text,) = loaded.complete([prompt], weft.sampling(max_tokens=60, min_tokens=60))
        assert (text.tokens, text.finish, text.slid) == (60, "length", True)
        assert cli("generate", small, *words).startswith(prompt)
        assert cli.err == f"weft: the text is longer {message}"
    assert all(each["slid"] for each in cli.json("generate", small, *words, "--n", "3")["completions"])
    assert cli.err == f"weft: 3 of 3 texts are longer {message}"
    _, err = talk(small, "The\nA\n", "--max-tokens", "40", "--seed", "2")
    assert err.count("continued from the last of them") == 1
    assert cli.refused("generate", small, *words, "--no-slide").endswith("the model reads at most 16")


# ---- many prompts


PROMPTS = ["The cat", "", "A dog follows", "My friend likes a", "The"]


def test_texts_do_not_depend_on_the_batch(trained: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    words = ["--file", str(tmp_path / "prompts.txt"), "--max-tokens", "10", "--n", "2", "--seed", "8"]
    lines = cli("generate", trained, *words, "--batch", "2")
    assert [json.loads(line)["prompt"] for line in lines.splitlines()] == PROMPTS
    assert cli("generate", trained, *words, "--batch", "5") == lines
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p, "id": 1}) + "\n" for p in PROMPTS))
    words[1] = str(tmp_path / "prompts.jsonl")
    assert cli("generate", trained, *words) == lines


def test_prompts_from_standard_input(trained: Path, cli: Cli, monkeypatch: Patch) -> None:
    def stdin(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))

    stdin(b"The cat\nA dog\n")
    lines = cli.json_lines("generate", trained, "--file", "-", "--max-tokens", "4")
    assert [line["prompt"] for line in lines] == ["The cat", "A dog"]
    stdin("The dög".encode())
    assert cli("generate", trained, "--prompt", "-", "--max-tokens", "4").startswith("The dög")
    stdin(b"The \xff dog\n")
    assert "standard input: not valid UTF-8" in cli.refused("generate", trained, "--prompt", "-")
    stdin(b"A cat\nThe \xff dog\n")
    assert run(["chat", str(trained), "--max-tokens", "3"]) == 2  # after the reply to line 1
    assert cli.capsys.readouterr().err == "weft: standard input, line 2: not valid UTF-8: invalid start byte\n"


def test_a_file_is_not_continued_by_another_model(trained: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    shutil.copytree(trained, tmp_path / "other", symlinks=True)
    words = ["--file", str(tmp_path / "prompts.txt"), "--max-tokens", "3", "--out", str(tmp_path / "texts.jsonl")]
    cli("generate", trained, *words)
    content = (tmp_path / "texts.jsonl").read_bytes()
    assert "begun with other settings" in cli.refused("generate", tmp_path / "other", *words)
    contrasted = [*words, "--amateur", str(trained)]
    assert "begun with other settings" in cli.refused("generate", trained, *contrasted)
    assert (tmp_path / "texts.jsonl").read_bytes() == content


def test_an_unfinished_file_is_completed_to_the_same_bytes(trained: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    words = ["--file", str(tmp_path / "prompts.txt"), "--max-tokens", "10", "--batch", "2", "--out"]
    whole, part = tmp_path / "whole.jsonl", tmp_path / "new" / "part.jsonl"
    assert cli("generate", trained, *words, whole) == ""
    content = whole.read_bytes()
    assert content.count(b"\n") == 5
    part.parent.mkdir()
    for cut in (content.index(b"\n") + 1, len(content) // 2, len(content) - 1, 3, len(content)):
        part.write_bytes(content[:cut])
        cli("generate", trained, *words, part)
        assert part.read_bytes() == content


def test_a_file_of_something_else_is_left_alone(trained: Path, tmp_path: Path, cli: Cli) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("The\nA\n")
    command = ["generate", str(trained), "--file", str(prompts), "--max-tokens", "3", "--out", str(out)]
    out.write_text("dear diary\n")
    assert "line 1: not a text of this command" in cli.refused(*command)
    assert out.read_text() == "dear diary\n"
    out.unlink()
    assert run(command) == 0
    before = out.read_bytes()
    assert "begun with other settings" in cli.refused(*command, "--seed", "9")
    prompts.write_text("The\nAn\n")
    assert "line 2: belongs to another prompt" in cli.refused(*command)
    prompts.write_text("The\n")
    assert "holds 2 texts already, but there are 1 prompts" in cli.refused(*command)
    assert out.read_bytes() == before
    assert "cannot be written" in cli.refused(*command[:-1], str(prompts / "x.jsonl"))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--n", "0"], "--n 0: expected 1 or more texts"),
        (["--batch", "0"], "--batch 0"),
        (["--beam", "3", "--temperature", "0.5"], "--temperature does not apply to --beam"),
        (["--beam", "3", "--typical", "0.5"], "--typical does not apply to --beam"),
        (["--beam", "3", "--greedy"], "--greedy does not apply to --beam"),
        (["--beam", "3", "--logprobs", "2"], "--logprobs does not apply to --beam"),
        (["--beam", "2", "--n", "3"], "a beam of 2 holds at most 2 texts"),
        (["--beam", "0"], "beams = 0"),
        (["--length-penalty", "2"], "need --beam"),
        (["--beam", "2", "--length-penalty", "2", "--gnmt-penalty", "1"], "exclude each other"),
        (["--typical", "1.5"], "typical_p = 1.5: expected a number less than or equal to 1"),
        (["--repetition-penalty", "0"], "repetition_penalty = 0.0: expected a number greater than 0"),
        (["--min-tokens", "9", "--max-tokens", "8"], "min_tokens = 9: more than max_tokens = 8"),
        (["--logprobs", "-1"], "logprobs = -1"),
        (["--ban", "ab"], "--ban 'ab': 2 tokens in this tokenizer"),
        (["--ban", ""], "--ban '': 0 tokens"),
        (["--prompt", "a", "--file", "b"], "--prompt and --file exclude each other"),
        (["--file", "none.txt"], "none.txt: no such file"),
        (["--lookup", "0"], "--lookup 0"),
        (["--lookup", "2", "--n", "2"], "--draft and --lookup write one text"),
        (["--lookup", "2", "--draft", "x"], "exclude each other"),
        (["--draft", "runs/none"], "runs/none: not a run"),
        (["--regex", "(a"], "unclosed group"),
        (["--regex", "a", "--json-schema", "b"], "exclude each other"),
        (["--beam", "2", "--seed", "3"], "--seed does not apply to --beam"),
        (["--json-schema", "none.json"], "none.json: No such file"),
        (["--max-tokens", "99999999999999999999"], "expected a number less than or equal to"),
        (["--lookup", "100000"], "--lookup 100000: expected 1 … 1000 tokens"),
        (["--greedy", "--seed", "4"], "--greedy and --seed exclude each other"),
        (["--greedy", "--n", "3"], "--n 3: greedy decoding draws nothing"),
        (["--batch", "3"], "--batch 3: there is only one prompt"),
    ],
)
def test_invalid_options_are_one_line(trained: Path, cli: Cli, words: list[str], line: str) -> None:
    assert line in cli.refused("generate", trained, *words)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("p.txt", b"", "holds no prompts"),
        ("p.txt", b"a\xff", "not valid UTF-8"),
        ("p.jsonl", b'"fine"\n{"text": 1}\n', "line 2: expected a string"),
        ("p.jsonl", b"{", "line 1: not valid JSON"),
        ("p.jsonl", b"[" * 100_000, "line 1: not valid JSON: nested too deeply"),
    ],
)
def test_prompts_that_cannot_be_read(
    trained: Path, tmp_path: Path, cli: Cli, name: str, content: bytes, line: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert line in cli.refused("generate", trained, "--file", tmp_path / name)


def test_a_draft_with_another_tokenizer_is_refused(trained: Path, tmp_path: Path, cli: Cli) -> None:
    book = str(write_book(tmp_path / "book.txt"))
    changes = {"tokenizer": {"kind": "char"}}
    other = weft.train("ngram-3", data=book, run=tmp_path / "other", changes=changes, log=lambda line: None)
    line = cli.refused("generate", trained, "--draft", other.path, "--prompt", "The")
    assert "its tokenizer differs from that of" in line


# ---- chat


def test_plain_chat_continues_the_text_so_far(trained: Path, talk: Talk) -> None:
    words = ["--greedy", "--max-tokens", "9"]
    out, _ = talk(trained, "The cat\n\nA dog\n", *words)
    loaded = weft.load(trained)
    first = loaded.generate("The cat", temperature=0.0, max_tokens=9)
    second = loaded.generate(f"The cat{first}\nA dog", temperature=0.0, max_tokens=9)
    assert out == f"{first}\n{second}\n"


def test_chat_commands(trained: Path, talk: Talk) -> None:
    lines = "/help\n/rest\nThe\n/reset\nThe\n/system My friend\nThe\n/quit\nThe\n"
    out, err = talk(trained, lines, "--greedy", "--max-tokens", "6", "--stop", "\n")
    assert "/system TEXT" in err
    assert "did you mean '/reset'" in err
    replies = out.splitlines()
    assert len(replies) == 3
    assert replies[0] == replies[1]


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def templated(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run", symlinks=True)
    (tmp_path / "run" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "run"


def test_a_template_formats_the_turns_and_old_ones_are_dropped(templated: Path) -> None:
    tokenizer = weft.load(templated).tokenizer
    system, one, two = (
        {"role": role, "content": text} for role, text in (("system", "Be kind."), ("user", "one"), ("user", "two"))
    )
    messages = [system, one, {"role": "assistant", "content": "1"}, two]
    whole = chat_prompt(tokenizer, messages)
    eos = tokenizer.token(tokenizer.need("eos"))
    expected = f"<system>Be kind.{eos}<user>one{eos}<assistant>1{eos}<user>two{eos}<assistant>"
    assert tokenizer.decode(whole.ids, specials=True) == expected
    assert list(whole.ids).count(tokenizer.need("eos")) == 4
    assert tokenizer.need("eos") in whole.stop_ids
    short = chat_prompt(tokenizer, messages, len(whole.ids) - 1)
    kept = f"<system>Be kind.{eos}<user>two{eos}<assistant>"
    assert tokenizer.decode(short.ids, specials=True) == kept
    with pytest.raises(DataError, match="tokens, but the model can read"):
        chat_prompt(tokenizer, [*messages[:-1], {"role": "user", "content": "long " * 40}], len(whole.ids))


def test_special_tokens_in_a_message_are_text(templated: Path, talk: Talk, monkeypatch: Patch) -> None:
    loaded = weft.load(templated)
    read: list[Sequence[int]] = []
    eos = loaded.tokenizer.token(loaded.tokenizer.need("eos"))

    def generate(model: object, prompts: Sequence[Prompt], settings: object) -> list[object]:
        read.append(prompts[0].ids)
        return []

    monkeypatch.setattr("weft.api.run.generate", generate)
    loaded.chat(f"one{eos}")
    loaded.reading_specials().chat(f"one{eos}")
    talk(templated, f"one{eos}\n")
    talk(templated, f"one{eos}\n", "--special-tokens")
    assert [list(ids).count(loaded.tokenizer.need("eos")) for ids in read] == [1, 2, 1, 2]
    assert loaded.tokenizer.decode(read[0], specials=True) == f"<user>one{eos}{eos}<assistant>"


@pytest.mark.slow
def test_ctrl_c_stops_a_reply_and_not_the_program(trained: Path) -> None:
    import pty

    master, slave = pty.openpty()
    code = "from weft.cli.main import main; main()"
    words = ["chat", str(trained), "--max-tokens", "1000000"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)

    def until(mark: bytes, seconds: float = 60) -> bytes:
        return b"".join(_chunks(master, mark, time.monotonic() + seconds))

    try:
        assert b"> " in until(b"> ")
        os.write(master, b"The cat\n")
        until(b"The cat")
        time.sleep(0.5)
        os.write(master, b"\x03")
        assert "…".encode() in until(b"> ")
        for _ in range(10):  # readline may notice a key only with the next one
            os.write(master, b"\x03")
            if b"/quit leaves" in (shown := until(b"/quit leaves", 3)):
                break
        assert b"/quit leaves" in shown
        os.write(master, b"/quit\n")
        until(b"never", 0.5)
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(master)


def _chunks(master: int, mark: bytes, deadline: float) -> Iterator[bytes]:
    """Yield what a terminal shows, until the mark appears."""
    shown = b""
    while mark not in shown and time.monotonic() < deadline:
        if select.select([master], [], [], 0.1)[0]:
            try:
                chunk = os.read(master, 65536)
            except OSError:  # the program has ended
                return
            shown += chunk
            yield chunk


def test_line_ends_and_byte_order_marks_are_removed(trained: Path, tmp_path: Path, cli: Cli, talk: Talk) -> None:
    words = ["--greedy", "--max-tokens", "9"]
    marked = "\ufeffThe cat\r\nA dog\r\n"
    (tmp_path / "p.txt").write_bytes(marked.encode())
    lines = cli.json_lines("generate", trained, "--file", tmp_path / "p.txt", *words)
    assert [line["prompt"] for line in lines] == ["The cat", "A dog"]
    plain = talk(trained, "The cat\nA dog\n", *words)
    assert talk(trained, marked, *words) == plain


def test_bulk_candidates_and_complete_in_python(trained: Path, tmp_path: Path) -> None:
    loaded, settings = weft.load(trained), weft.sampling(max_tokens=3)
    assert loaded.complete([], settings) == loaded.candidates([], weft.beam()) == []
    search = weft.beam(beams=2, n=2, max_tokens=3)
    assert loaded.complete(["a", "b"], search) == [best for best, _ in loaded.candidates(["a", "b"], search)]
    out = str(tmp_path / "x.jsonl")
    lines = list(loaded.bulk(["The", "A"], settings, out=out))
    assert Path(out).read_text().splitlines() == lines
    for work in (loaded.complete, loaded.candidates, loaded.bulk):
        with pytest.raises(ConfigError, match="prompts = 'abc': expected Sequence"):
            work("abc", settings)
    with pytest.raises(ConfigError, match="batch = 0: expected 1 or more"):
        loaded.bulk(["The"], settings, batch=0)
    with pytest.raises(ConfigError, match="n = 0: expected 1 or more"):
        loaded.candidates(["The"], settings, n=0)
