"""nanoGPT's checkpoints: its model written out here as its authors describe it, and files that must not be trusted."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.errors import InteropError, WeftError
from weft.interop import nanogpt, torch_file
from weft.models.build import build
from weft.models.config import Decoder, LMHead
from weft.text.config import BPE, Char
from weft.text.tokenizer import build_tokenizer

ARGS: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "vocab_size": 300, "dropout": 0.0}


class TheirBlock(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        d = ARGS["n_embd"]
        self.ln_1, self.ln_2 = nn.LayerNorm(d, bias=bias), nn.LayerNorm(d, bias=bias)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(d, 3 * d, bias=bias), "c_proj": nn.Linear(d, d, bias=bias)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(d, 4 * d, bias=bias), "c_proj": nn.Linear(4 * d, d, bias=bias)})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (ARGS["n_head"], -1)).transpose(1, 2)
            for part in self.attn["c_attn"](self.ln_1(x)).split(ARGS["n_embd"], dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.attn["c_proj"](mixed)
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class TheirModel(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        d = ARGS["n_embd"]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(ARGS["vocab_size"], d),
                "wpe": nn.Embedding(ARGS["block_size"], d),
                "h": nn.ModuleList(TheirBlock(bias) for _ in range(ARGS["n_layer"])),
                "ln_f": nn.LayerNorm(d, bias=bias),
            }
        )
        self.lm_head = nn.Linear(d, ARGS["vocab_size"], bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](torch.arange(tokens.shape[1]))
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


def their_model(bias: bool) -> TheirModel:
    torch.manual_seed(0)
    model = TheirModel(bias).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def checkpoint(model: TheirModel, bias: bool, prefix: str = "") -> dict[str, Any]:
    state = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    best = torch.tensor(1.47)
    return {"model": state, "optimizer": {}, "model_args": ARGS | {"bias": bias}, "iter_num": 5, "best_val_loss": best}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_logits(bias: bool, prefix: str, tmp_path: Path) -> None:
    theirs = their_model(bias)
    torch.save(checkpoint(theirs, bias, prefix), tmp_path / "ckpt.pt")
    bundle = nanogpt.read(tmp_path / "ckpt.pt")
    assert isinstance(bundle.model, Decoder)
    assert bundle.model.head == LMHead(tied=True)
    ours = build(bundle.model).eval()
    ours.load_state_dict({name: make() for name, make in bundle.weights.items()})
    tokens = torch.randint(300, (2, 13))
    with torch.no_grad():
        assert (ours(tokens) - theirs(tokens)).abs().max() <= 1e-5


def test_masks_of_older_versions_are_passed_over(tmp_path: Path) -> None:
    stored = checkpoint(their_model(True), True)
    stored["model"]["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
    torch.save(stored, tmp_path / "ckpt.pt")
    assert nanogpt.read(tmp_path / "ckpt.pt").weights


def test_a_tokenizer_is_taken_by_name(tmp_path: Path) -> None:
    torch.save(checkpoint(their_model(True), True), tmp_path / "ckpt.pt")
    bundle = nanogpt.read(tmp_path / "ckpt.pt")
    assert bundle.tokenizer is None
    build_tokenizer(Char(), ["abc"]).save(tmp_path / "small")
    with pytest.raises(InteropError, match="tokens, but the model's vocab_size is 300"):
        nanogpt.read(tmp_path / "ckpt.pt", tmp_path / "small")
    text = "the cat sat on the mat and the dog ate the rat in the hat of the man who ran from the van to the barn"
    build_tokenizer(BPE(vocab_size=300), [text] * 3).save(tmp_path / "right")
    found = nanogpt.read(tmp_path / "ckpt.pt", tmp_path / "right")
    assert found.tokenizer is not None


def test_gpt2s_embeddings_may_be_padded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(checkpoint(their_model(True), True), tmp_path / "ckpt.pt")
    monkeypatch.setattr(nanogpt, "GPT2_SIZES", (259, 300))
    build_tokenizer(BPE(vocab_size=259), ["the"]).save(tmp_path / "gpt2")
    assert nanogpt.read(tmp_path / "ckpt.pt", tmp_path / "gpt2").tokenizer is not None


class Bomb:
    """Touches a file when it is unpickled by a reader that trusts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_no_code_of_the_file_is_run(tmp_path: Path) -> None:
    stored = checkpoint(their_model(True), True)
    stored["config"] = Bomb(tmp_path / "exploded")
    torch.save(stored, tmp_path / "ckpt.pt")
    with pytest.raises(InteropError, match="refused: it holds more than tensors and plain values"):
        nanogpt.read(tmp_path / "ckpt.pt")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(InteropError):
        nanogpt.read(tmp_path / "raw.pt")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    del stored["config"]
    torch.save(stored, tmp_path / "ckpt.pt")
    nanogpt.read(tmp_path / "ckpt.pt")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda s: s.pop("model"), "it has no 'model'"),
        (lambda s: s.pop("model_args"), "it has no 'model_args'"),
        (lambda s: s.update(model=[1]), "not a dictionary of tensors"),
        (lambda s: s["model"].update({"two\nlines": torch.zeros(3)}), "not a dictionary of tensors"),
        (lambda s: s["model_args"].update(n_layer=10**9), "model_args.n_layer = 1000000000"),
        (lambda s: s["model_args"].update(n_layer=3), "'transformer.h.2.attn.c_proj.weight' .* is missing"),
        (lambda s: s["model_args"].update(n_layer=9000), "n_layer = 9000: the file has only"),
        (lambda s: s["model_args"].update(n_head=5), "attention.heads = 5 does not divide"),
        (lambda s: s["model"].update(more=torch.zeros(3)), "'more' .* has no place"),
        (
            lambda s: s["model"].update({"transformer.wpe.weight": torch.zeros(4, 32)}),
            "'transformer.wpe.weight' is .4, 32.; the settings require .16, 32.",
        ),
    ],
)
def test_what_is_wrong_is_named(corrupt: Any, message: str, tmp_path: Path) -> None:
    stored = checkpoint(their_model(True), True)
    stored["model_args"] = dict(stored["model_args"])
    corrupt(stored)
    torch.save(stored, tmp_path / "ckpt.pt")
    with pytest.raises(WeftError, match=message) as caught:
        nanogpt.read(tmp_path / "ckpt.pt")
    assert "\n" not in str(caught.value)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    torch.save(checkpoint(their_model(True), True), tmp_path / "whole.pt")
    data = (tmp_path / "whole.pt").read_bytes()
    for place in (0, 1, 2, 100, len(data) // 2, len(data) - 1000, len(data) - 30):
        (tmp_path / "ckpt.pt").write_bytes(data[:place])
        with pytest.raises(InteropError, match=r"not a file of torch\.save, or truncated"):
            nanogpt.read(tmp_path / "ckpt.pt")
    with pytest.raises(InteropError, match="no such file"):
        nanogpt.read(tmp_path / "nowhere.pt")


# ---- tensors that are none


def test_a_file_of_the_older_kind_is_read(tmp_path: Path) -> None:
    theirs = their_model(True)
    torch.save(checkpoint(theirs, True), tmp_path / "ckpt.pt", _use_new_zipfile_serialization=False)
    bundle = nanogpt.read(tmp_path / "ckpt.pt")
    assert torch.equal(bundle.weights["embedding.weight"](), theirs.lm_head.weight)
    data = (tmp_path / "ckpt.pt").read_bytes()
    for place in (len(torch_file.OLD), len(data) // 2, len(data) - 30):
        (tmp_path / "cut.pt").write_bytes(data[:place])
        with pytest.raises(InteropError, match=r"not a file of torch\.save, or truncated"):
            nanogpt.read(tmp_path / "cut.pt")


def test_an_older_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    stored = checkpoint(their_model(True), True) | {"config": Bomb(tmp_path / "ran")}
    torch.save(stored, tmp_path / "ckpt.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(InteropError, match="refused: it holds more than tensors and plain values"):
        nanogpt.read(tmp_path / "ckpt.pt")
    assert not (tmp_path / "ran").exists()


WPE = "transformer.wpe.weight"
EMPTY = torch.empty(16, 32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: EMPTY.to_sparse(), "is torch._utils._rebuild_sparse_tensor"),
        (lambda: EMPTY.to_sparse_csr(), "is torch._utils._rebuild_sparse_tensor"),
        (lambda: torch.empty(16, 32, device="meta"), "is torch._utils._rebuild_meta_tensor"),
        (
            lambda: torch.quantize_per_tensor(EMPTY, 1.0, 0, torch.qint8),
            "is torch._utils._rebuild_q",
        ),
        (lambda: torch.ones(16, 32, dtype=torch.int64), "has dtype I64; weights are"),
        (lambda: torch.ones(16, 32, dtype=torch.complex64), "is torch.complex64; expected a dense tensor"),
        (lambda: torch.ones(16, 32).to(torch.float8_e4m3fn), "is torch._utils._rebuild_tensor_v3"),
        (lambda: torch.ones(1).expand(16, 32), "is .16, 32., but the file holds too few values"),
        (lambda: torch.ones(1, 32).expand(10**9, 32), "is .1000000000, 32., but the file holds too few values"),
    ],
)
def test_a_tensor_that_is_no_weight_is_named(made: Any, message: str, tmp_path: Path) -> None:
    for name in (WPE, "lm_head.weight"):
        stored = checkpoint(their_model(True), True)
        stored["model"][name] = made()
        torch.save(stored, tmp_path / "ckpt.pt")
        with pytest.raises(InteropError, match=f"'{name}' {message}") as caught:
            nanogpt.read(tmp_path / "ckpt.pt")
        assert "\n" not in str(caught.value)


def test_many_names_for_the_same_numbers_are_refused(tmp_path: Path) -> None:
    stored = checkpoint(their_model(True), True)
    stored["model"]["transformer.h.1.attn.c_attn.weight"] = stored["model"]["transformer.h.0.attn.c_attn.weight"]
    torch.save(stored, tmp_path / "ckpt.pt")
    with pytest.raises(InteropError, match=r"'transformer\.h\.1\.attn\.c_attn\.weight' .*each tensor needs its own"):
        nanogpt.read(tmp_path / "ckpt.pt")


def test_slices_of_one_buffer_are_taken(tmp_path: Path) -> None:
    stored = checkpoint(their_model(True), True)
    flat = torch.randn(2 * 32)
    stored["model"]["transformer.ln_f.weight"], stored["model"]["transformer.ln_f.bias"] = flat[:32], flat[32:]
    torch.save(stored, tmp_path / "ckpt.pt")
    assert torch.equal(nanogpt.read(tmp_path / "ckpt.pt").weights["decoder.norm.bias"](), flat[32:])


def test_a_tensor_under_both_of_its_names_is_refused(tmp_path: Path) -> None:
    stored = checkpoint(their_model(True), True)
    stored["model"][f"_orig_mod.{WPE}"] = torch.zeros(16, 32)
    torch.save(stored, tmp_path / "ckpt.pt")
    with pytest.raises(InteropError, match=f"'_orig_mod.{WPE}' and '{WPE}' are names of the same tensor"):
        nanogpt.read(tmp_path / "ckpt.pt")


@pytest.mark.parametrize("key", ["bias", "dropout", "n_layer"])
def test_arguments_that_are_tensors(key: str, tmp_path: Path) -> None:
    stored = checkpoint(their_model(True), True)
    stored["model_args"] = {**stored["model_args"], key: torch.ones(40, 40)}
    torch.save(stored, tmp_path / "ckpt.pt")
    with pytest.raises(InteropError, match=f"model_args.{key} = 'Tensor': expected") as caught:
        nanogpt.read(tmp_path / "ckpt.pt")
    assert "\n" not in str(caught.value)


# ---- files that are made to be read wrong, or to take too much


def repacked(source: Path, target: Path, compression: int, **changes: bytes) -> None:
    """The archive again, written by another program."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for entry in old.infolist():
            name = entry.filename.rpartition("/")[2].replace(".", "_")
            new.writestr(entry.filename, changes.get(name, old.read(entry)))


def test_compressed_parts_are_refused_rather_than_read_as_they_are(tmp_path: Path) -> None:
    torch.save(checkpoint(their_model(True), True), tmp_path / "whole.pt")
    repacked(tmp_path / "whole.pt", tmp_path / "ckpt.pt", zipfile.ZIP_DEFLATED)
    with pytest.raises(InteropError, match="its entries are compressed, which torch never does"):
        nanogpt.read(tmp_path / "ckpt.pt")
    repacked(tmp_path / "whole.pt", tmp_path / "ckpt.pt", zipfile.ZIP_STORED)
    found, whole = (nanogpt.read(tmp_path / name).weights["embedding.weight"]() for name in ("ckpt.pt", "whole.pt"))
    assert torch.equal(found, whole)


def nested_key() -> bytes:
    """A program of 300 bytes whose table has a key that takes for ever to hash."""
    code = b"\x80\x02}(" + b"X\x05\x00\x00\x00model" + b"}" + b")"
    for _ in range(60):
        code += b"q\x00h\x00\x86"  # a pair of itself and itself
    return code + b"K\x01su."


def fetched(module: str, name: str, argument: bytes) -> bytes:
    return b"\x80\x02}X\x05\x00\x00\x00model" + f"c{module}\n{name}\n".encode() + argument + b"\x85Rs."


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (b"\x80\x02}" + b"0}" * 2**20 + b".", "data.pkl has 2,097,156 bytes; the bound is 2,097,152 .WEFT_LIMITS=2"),
        (nested_key(), "not a file of torch.save, or truncated"),
        (fetched("builtins", "bytearray", b"\x8a\x05\x00\x00\x00\x00\x10"), "refused: it holds more than tensors"),
        (fetched("os", "system", b"X\x04\x00\x00\x00true"), "refused: it holds more than tensors"),
        (fetched("torch", "zeros", b"\x8a\x05\x00\x00\x00\x00\x10"), "it has no 'model_args'"),
        (b"\x80\x02r\xff\xff\xff\xff.", "not a file of torch.save, or truncated"),
        (b"\x80\x02(((((t.", "not a nanoGPT checkpoint"),
        (b"", "not a file of torch.save, or truncated"),
    ],
)
@pytest.mark.timeout(20)
def test_programs_that_torch_does_not_write(program: bytes, message: str, tmp_path: Path) -> None:
    torch.save(checkpoint(their_model(True), True), tmp_path / "whole.pt")
    repacked(tmp_path / "whole.pt", tmp_path / "ckpt.pt", zipfile.ZIP_STORED, data_pkl=program)
    with pytest.raises(InteropError, match=message) as caught:
        nanogpt.read(tmp_path / "ckpt.pt")
    assert "\n" not in str(caught.value)


def test_parts_that_overlap_are_refused(tmp_path: Path) -> None:
    torch.save(checkpoint(their_model(True), True), tmp_path / "whole.pt")
    data = bytearray((tmp_path / "whole.pt").read_bytes())
    place = data.rfind(b"PK\x01\x02")
    while place >= 0:  # every entry of the directory now claims nearly all of the file
        data[place + 20 : place + 28] = (len(data) - 4096).to_bytes(4, "little") * 2
        place = data.rfind(b"PK\x01\x02", 0, place)
    (tmp_path / "ckpt.pt").write_bytes(data)
    with pytest.raises(InteropError, match="its entries overlap"):
        nanogpt.read(tmp_path / "ckpt.pt")


def test_weights_may_be_written_to(tmp_path: Path) -> None:
    torch.save(checkpoint(their_model(True), True), tmp_path / "ckpt.pt")
    nanogpt.read(tmp_path / "ckpt.pt").weights["embedding.weight"]().zero_()
    assert nanogpt.read(tmp_path / "ckpt.pt").weights["embedding.weight"]().abs().sum() > 0
