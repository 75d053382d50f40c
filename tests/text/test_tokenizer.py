"""Files, special tokens, batches, processes and chat."""

import json
import multiprocessing
import os
import pickle
import random
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers as backend
from tests.text.conftest import TEXTS
from tokenizers import decoders, models, pre_tokenizers, processors

from weft.errors import TokenizerError
from weft.text.config import BPE, Pretrained, Specials
from weft.text.tokenizer import Tokenizer, build_tokenizer

LOOK_ALIKE = "a <eos> <bos><pad> [MASK] [CLS] <unk> </s> <0x41> b"


@pytest.fixture
def byte(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["byte"]


@pytest.fixture
def bpe(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["bpe"]


def foreign_unigram(special: list[str], *pieces: str) -> backend.Tokenizer:
    """Another program's unigram model, which begins with special tokens; the last of them is unk."""
    vocab = [*((token, 0.0) for token in special), *((piece, -3.0) for piece in pieces)]
    foreign = backend.Tokenizer(models.Unigram(vocab, unk_id=len(special) - 1))
    foreign.pre_tokenizer, foreign.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    foreign.add_special_tokens(special)
    return foreign


# ---- files


@pytest.mark.parametrize("name", ["run", "run/tokenizer.json"])
def test_a_saved_tokenizer_is_unchanged(tokenizer: Tokenizer, tmp_path: Path, name: str) -> None:
    tokenizer.chat_template = None
    tokenizer.save(tmp_path / name)
    loaded = Tokenizer.load(tmp_path / name)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert (loaded.kind, loaded.roles, loaded.vocab_size) == (tokenizer.kind, tokenizer.roles, tokenizer.vocab_size)
    for text in [*TEXTS, LOOK_ALIKE]:
        assert loaded.encode(text) == tokenizer.encode(text)
    assert build_tokenizer(Pretrained(path=str(tmp_path / name)), ["ignored"]).fingerprint == tokenizer.fingerprint
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_transformers_loads_it_and_agrees(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    for loader in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
        theirs = loader.from_pretrained(tmp_path)
        assert len(theirs) == tokenizer.vocab_size
        assert (theirs.pad_token_id, theirs.eos_token_id) == (tokenizer.pad_id, tokenizer.eos_id)
        for text in [*TEXTS[:4], "unseen: ñandú 𝄞\r\n"]:
            ids = theirs(text, add_special_tokens=False)["input_ids"]
            assert ids == tokenizer.encode(text)
            assert theirs.decode(ids) == tokenizer.decode(ids, specials=True)
        if tokenizer.kind == "wordpiece":  # a sentence has BERT's frame
            framed = [tokenizer.cls_id, *tokenizer.encode("the fox"), tokenizer.sep_id]
            assert theirs("the fox")["input_ids"] == framed


def test_roles_come_from_tokenizer_config_or_customary_names(tmp_path: Path) -> None:
    specials = Specials(pad="<nothing>", bos="<s>", eos="</s>")
    build_tokenizer(BPE(specials=specials), TEXTS).save(tmp_path)
    assert Tokenizer.load(tmp_path).roles == specials.roles()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}, "mask_token": "[ABSENT]"}')
    assert Tokenizer.load(tmp_path).roles == {"eos": "</s>"}
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.load(tmp_path).roles == {"bos": "<s>", "eos": "</s>"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "", "not a tokenizer"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer.json", "[1, 2", "not a tokenizer"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "its vocabulary is empty"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[]", "expected a JSON object"),
    ],
)
def test_broken_files_are_named(byte: Tokenizer, tmp_path: Path, name: str, content: str, message: str) -> None:
    byte.save(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=message) as raised:
        Tokenizer.load(tmp_path)
    assert str(raised.value).startswith(str(tmp_path / name))
    assert "\n" not in str(raised.value)


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no such tokenizer file or folder"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json in this folder"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TokenizerError, match="not UTF-8 text"):
        Tokenizer.load(tmp_path)


def test_a_failed_write_keeps_the_old_file(byte: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    byte.save(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TokenizerError, match="cannot be written: No space left on device"):
        build_tokenizer(BPE(), TEXTS).save(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_saved_files_have_the_usual_permissions(byte: Tokenizer, tmp_path: Path) -> None:
    byte.save(tmp_path)
    (tmp_path / "plain").touch()
    expected = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert stat.S_IMODE((tmp_path / "tokenizer.json").stat().st_mode) == expected


def test_padding_and_truncation_of_a_foreign_file_are_ignored(bpe: Tokenizer) -> None:
    foreign = backend.Tokenizer.from_str(bpe.to_json())
    foreign.enable_truncation(3)
    foreign.enable_padding(length=3)
    assert Tokenizer.from_json(foreign.to_str()).encode(TEXTS[0]) == bpe.encode(TEXTS[0])


def test_a_foreign_unigram_model_finds_no_special_tokens_in_a_text() -> None:
    foreign = foreign_unigram(["</s>", "<unk>"], "▁", "a", "<", "/", "s", ">")
    ours = Tokenizer.from_json(foreign.to_str())
    assert [ours.token(id) for id in ours.encode("a</s>")] == ["▁", "a", "<", "/", "s", ">"]
    assert ours.decode(ours.encode("a </s> a")) == "a </s> a"
    assert ours.to_json() == foreign.to_str()


def test_decoders_that_look_ahead_are_refused() -> None:
    foreign = backend.Tokenizer(models.BPE(vocab={"a</w>": 0}, merges=[]))
    foreign.decoder = decoders.BPEDecoder()
    with pytest.raises(TokenizerError, match="decoder BPEDecoder is not supported"):
        Tokenizer.from_json(foreign.to_str())


# ---- special tokens


def test_special_tokens_are_added_on_request_only(bpe: Tokenizer) -> None:
    assert bpe.encode("fox", bos=True, eos=True) == [bpe.bos_id, *bpe.encode("fox"), bpe.eos_id]
    assert bpe.encode("<bos>fox<eos>", specials=True) == [bpe.bos_id, *bpe.encode("fox"), bpe.eos_id]
    assert bpe.encode("<bos>fox<eos>") != bpe.encode("<bos>fox<eos>", specials=True)


def test_decoding_leaves_special_tokens_out_by_default(tokenizers: dict[str, Tokenizer]) -> None:
    word = tokenizers["word"]
    ids = word.encode("The xyzzy fox", bos=True, eos=True)
    assert word.decode(ids) == "The <unk> fox"  # an unknown word is part of the text
    assert word.decode(ids, specials=True) == "<bos> The <unk> fox <eos>"


def test_an_unknown_piece_is_left_out() -> None:
    ours = Tokenizer.from_json(foreign_unigram(["<unk>"], "▁", "a", "b").to_str())
    assert ours.unk_id in ours.encode("a x b")
    assert ours.decode(ours.encode("a x b")) == "a  b" == "".join(map(ours.stream().push, ours.encode("a x b")))
    assert ours.decode(ours.encode("a x b"), specials=True) == "a <unk> b"


def test_a_trusting_tokenizer_reads_special_tokens(bpe: Tokenizer) -> None:
    finds, text = bpe.reading_specials(), "<bos>fox<eos>"
    expected = [bpe.need("bos"), *bpe.encode("fox"), bpe.need("eos")]
    assert finds.encode(text) == finds.encode_batch([text])[0] == expected != bpe.encode(text)
    assert [span.id for span in finds.token_spans(text)] == expected
    assert pickle.loads(pickle.dumps(finds)).encode(text) == expected
    assert finds.fingerprint == bpe.fingerprint and finds.decode(expected) == "fox"


def test_a_missing_role_or_template_is_refused(tokenizers: dict[str, Tokenizer]) -> None:
    message = r"wordpiece tokenizer has no bos token \(it has pad, unk, cls, sep, mask\)"
    assert tokenizers["wordpiece"].bos_id is None
    with pytest.raises(TokenizerError, match=message):
        tokenizers["wordpiece"].encode("fox", bos=True)
    with pytest.raises(TokenizerError, match="has no chat template"):
        tokenizers["wordpiece"].chat([])


def test_roles_may_share_a_token() -> None:
    shared = Specials(pad="<|endoftext|>", bos="<|endoftext|>", eos="<|endoftext|>", extra=("<|user|>",))
    bpe = build_tokenizer(BPE(specials=shared), TEXTS)
    assert bpe.special_tokens == {"<|endoftext|>": 0, "<|user|>": 1}
    assert bpe.pad_id == bpe.bos_id == bpe.eos_id == 0


def test_tokens_and_ids(tokenizer: Tokenizer) -> None:
    assert all(tokenizer.id(tokenizer.token(id)) == id for id in range(tokenizer.vocab_size))
    with pytest.raises(TokenizerError, match="'fxo fxo' is not in the vocabulary"):
        tokenizer.id("fxo fxo")


# ---- batches and processes


def test_a_batch_equals_single_texts(tokenizer: Tokenizer) -> None:
    many = [*TEXTS, "", LOOK_ALIKE, "x" * 5000]
    assert tokenizer.encode_batch(many) == [tokenizer.encode(text) for text in many]
    assert tokenizer.encode_batch([]) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_encodes_without_warnings(bpe: Tokenizer, capfd: pytest.CaptureFixture[str]) -> None:
    bpe.encode_batch(TEXTS)  # starts its threads
    with multiprocessing.get_context("fork").Pool(1) as pool:
        forked = pool.apply_async(bpe.encode_batch, (TEXTS,)).get(timeout=30)
    assert forked == bpe.encode_batch(TEXTS)
    assert "parallelism" not in capfd.readouterr().err


def test_a_tokenizer_can_be_pickled(tokenizer: Tokenizer) -> None:
    loaded = pickle.loads(pickle.dumps(tokenizer))
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.encode(LOOK_ALIKE) == tokenizer.encode(LOOK_ALIKE)


def test_configs_import_no_heavy_library() -> None:
    program = "import sys, weft.text.config as c; c.BPE(); print({'torch', 'tokenizers', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "set()"


# ---- ids


@pytest.mark.parametrize("id", [10**6, 10**8, 4_000_000_000])
@pytest.mark.parametrize("kind", ["bpe", "word", "wordpiece"])
def test_an_id_far_beyond_the_others(tokenizers: dict[str, Tokenizer], kind: str, id: int, tmp_path: Path) -> None:
    """It is refused before anything is allocated for it."""
    tree = json.loads(tokenizers[kind].to_json())
    tree["model"]["vocab"]["zz"] = id
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TokenizerError, match=f"the token 'zz' has id {id}, far beyond its .* tokens") as raised:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(raised.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_a_vocabulary_may_skip_ids(bpe: Tokenizer) -> None:
    tree = json.loads(bpe.to_json())
    tree["model"]["vocab"]["zz"] = 50_000
    loaded = Tokenizer.from_json(json.dumps(tree))
    assert (loaded.vocab_size, loaded.id("zz")) == (50_001, 50_000)


def test_gpt2_files_with_an_excessive_id_are_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2 * 10**9}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    with pytest.raises(TokenizerError, match="the token 'ab' has id 2000000000"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("id", [10**8, 4_000_000_000])
def test_an_added_token_with_an_excessive_id_takes_no_memory(bpe: Tokenizer, id: int) -> None:
    """The library renumbers added tokens after the others."""
    tree = json.loads(bpe.to_json())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tree["added_tokens"].append({"id": id, "content": "<zz>", "special": True, **flags})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loaded = Tokenizer.from_json(json.dumps(tree))
    assert loaded.id("<zz>") == loaded.vocab_size - 1 == bpe.vocab_size
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    tree["model"]["vocab"]["<zz>"] = id
    with pytest.raises(TokenizerError, match=f"the token '<zz>' has id {id}"):
        Tokenizer.from_json(json.dumps(tree))


def test_a_post_processor_with_an_invalid_id_is_refused(bpe: Tokenizer) -> None:
    framed = backend.Tokenizer.from_str(bpe.to_json())
    framed.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 4_000_000_000)])
    with pytest.raises(TokenizerError, match="puts id 4000000000 around a text"):
        _ = Tokenizer.from_json(framed.to_str(), bpe.roles).leading


def test_the_frame_is_that_of_the_post_processor(bpe: Tokenizer, tokenizers: dict[str, Tokenizer]) -> None:
    piece = tokenizers["wordpiece"]
    assert bpe.frame == ((), ())
    assert piece.frame == ((piece.need("cls"),), (piece.need("sep"),))
    ids = [("<bos>", bpe.need("bos")), ("<eos>", bpe.need("eos"))]
    for single, frame in (
        ("<bos> $A", ((bpe.bos_id,), ())),
        ("$A <eos>", ((), (bpe.eos_id,))),
        ("<bos> <bos> $A <eos>", ((bpe.bos_id, bpe.bos_id), (bpe.eos_id,))),
    ):
        framed = backend.Tokenizer.from_str(bpe.to_json())
        framed.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
        found = Tokenizer.from_json(framed.to_str(), bpe.roles)
        assert (found.frame, found.leading) == (frame, frame[0])


# ---- chat

TEMPLATE = """{%- for message in messages %}
{{ bos_token }}{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ bos_token }}assistant:{% endif %}"""


def test_a_chat_template_renders_and_is_saved(byte: Tokenizer, tmp_path: Path) -> None:
    Tokenizer.from_json(byte.to_json(), byte.roles, TEMPLATE).save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    text = loaded.chat([{"role": "user", "content": "Hi"}])
    assert text == "<bos>user: Hi<eos><bos>assistant:"
    assert loaded.chat([{"role": "user", "content": "Hi"}], reply=False) == "<bos>user: Hi<eos>"
    assert loaded.encode(text, specials=True).count(loaded.need("bos")) == 2
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE


def test_special_tokens_in_messages_are_text(tokenizer: Tokenizer) -> None:
    chatty, rng = Tokenizer.from_json(tokenizer.to_json(), tokenizer.roles, TEMPLATE), random.Random(0)
    special = set(chatty.special_tokens.values()) - {chatty.unk_id}
    words = [*chatty.special_tokens, "<", "s>", "the ", " ", "\n", "[SE", "P]"]

    def read(content: str, tokenizer: Tokenizer = chatty) -> list[int]:
        return tokenizer.chat_ids(tokenizer.chat(tokenizer.to_chat([{"role": "user", "content": content}])))

    frame = [id for id in read("the") if id in special]
    for _ in range(30):
        content = "".join(rng.choices(words, k=rng.randrange(1, 9)))
        ids = read(content)
        assert [id for id in ids if id in special] == frame, content
        if chatty.kind in ("byte", "bpe"):
            assert chatty.decode(ids, specials=True) == chatty.chat([{"role": "user", "content": content}])
    mark = next(token for token, id in chatty.special_tokens.items() if id in special)
    assert len([id for id in read(mark, chatty.reading_specials()) if id in special]) == len(frame) + 1
