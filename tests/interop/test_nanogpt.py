"""Checkpoints of nanoGPT: logits compared with its model, written again here; hostile files are refused."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.errors import WeftError
from weft.interop import nanogpt, torch_file
from weft.models.build import build
from weft.models.config import Decoder
from weft.models.head_config import LMHead
from weft.text.config import BPE, Char
from weft.text.tokenizer import build_tokenizer

ARGS: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "vocab_size": 300, "dropout": 0.0}


class ReferenceBlock(nn.Module):
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


class ReferenceModel(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        d = ARGS["n_embd"]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(ARGS["vocab_size"], d),
                "wpe": nn.Embedding(ARGS["block_size"], d),
                "h": nn.ModuleList(ReferenceBlock(bias) for _ in range(ARGS["n_layer"])),
                "ln_f": nn.LayerNorm(d, bias=bias),
            }
        )
        self.lm_head = nn.Linear(d, ARGS["vocab_size"], bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](torch.arange(tokens.shape[1]))
        for block in self.transformer["h"].children():
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


def reference_model(bias: bool = True) -> ReferenceModel:
    torch.manual_seed(0)
    model = ReferenceModel(bias).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def checkpoint(model: ReferenceModel, bias: bool = True, prefix: str = "") -> dict[str, Any]:
    state = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    best = torch.tensor(1.47)
    return {"model": state, "optimizer": {}, "model_args": ARGS | {"bias": bias}, "iter_num": 5, "best_val_loss": best}


@pytest.fixture
def stored() -> dict[str, Any]:
    """The contents of a checkpoint."""
    return checkpoint(reference_model())


@pytest.fixture
def file(stored: dict[str, Any], tmp_path: Path) -> Path:
    torch.save(stored, tmp_path / "complete.pt")
    return tmp_path / "complete.pt"


def check_refused(path: Path, message: str) -> None:
    """The file is refused in one line that matches `message`."""
    with pytest.raises(WeftError, match=message) as caught:
        nanogpt.read(path)
    assert "\n" not in str(caught.value)


def check_contents_refused(contents: Any, path: Path, message: str, **options: Any) -> None:
    torch.save(contents, path, **options)
    check_refused(path, message)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_logits(bias: bool, prefix: str, tmp_path: Path) -> None:
    theirs = reference_model(bias)
    torch.save(checkpoint(theirs, bias, prefix), tmp_path / "ckpt.pt")
    bundle = nanogpt.read(tmp_path / "ckpt.pt")
    assert isinstance(bundle.model, Decoder)
    assert bundle.model.head == LMHead(tied=True)
    ours = build(bundle.model).eval()
    ours.load_state_dict({name: read() for name, read in bundle.weights.items()})
    tokens = torch.randint(300, (2, 13))
    with torch.no_grad():
        assert (ours(tokens) - theirs(tokens)).abs().max() <= 1e-5


def test_masks_of_older_versions_are_ignored(stored: dict[str, Any], tmp_path: Path) -> None:
    stored["model"]["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
    torch.save(stored, tmp_path / "ckpt.pt")
    assert nanogpt.read(tmp_path / "ckpt.pt").weights


def test_the_tokenizer_is_an_argument(file: Path, tmp_path: Path) -> None:
    assert nanogpt.read(file).tokenizer is None
    build_tokenizer(Char(), ["abc"]).save(tmp_path / "small")
    with pytest.raises(WeftError, match="tokens, but the model's vocab_size is 300"):
        nanogpt.read(file, tmp_path / "small")
    text = "the cat sat on the mat and the dog ate the rat in the hat of the man who ran from the van to the barn"
    build_tokenizer(BPE(vocab_size=300), [text] * 3).save(tmp_path / "right")
    assert nanogpt.read(file, tmp_path / "right").tokenizer is not None
    build_tokenizer(BPE(vocab_size=259), ["the"]).save(tmp_path / "unpadded")
    assert nanogpt.read(file, tmp_path / "unpadded", gpt2_sizes=(259, 300)).tokenizer is not None


class Bomb:
    """Creates a file when it is unpickled without restrictions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


REFUSED = "refused: it holds more than tensors and plain values"
POSITIONS, QKV = "transformer.wpe.weight", "transformer.h.{}.attn.c_attn.weight"
NOT_READABLE = r"not a file of torch\.save, or truncated"


def test_no_code_of_the_file_is_run(stored: dict[str, Any], file: Path, tmp_path: Path) -> None:
    bomb = Bomb(tmp_path / "ran")
    for new_format in (True, False):
        contents = {**stored, "config": bomb}
        check_contents_refused(contents, tmp_path / "a.pt", REFUSED, _use_new_zipfile_serialization=new_format)
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(bomb))
    check_refused(tmp_path / "raw.pt", NOT_READABLE)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(bomb))  # beside the checkpoint, never read
    nanogpt.read(file)
    assert not (tmp_path / "ran").exists()


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
        (lambda s: s["model_args"].update(bias=torch.ones(40, 40)), "model_args.bias = 'Tensor': expected"),
        (lambda s: s["model_args"].update(dropout=torch.ones(40, 40)), "model_args.dropout = 'Tensor': expected"),
        (lambda s: s["model_args"].update(n_layer=torch.ones(40, 40)), "model_args.n_layer = 'Tensor': expected"),
        (lambda s: s["model"].update(more=torch.zeros(3)), "'more' .* has no place"),
        (
            lambda s: s["model"].update({POSITIONS: torch.zeros(4, 32)}),
            "'transformer.wpe.weight' is .4, 32.; the settings require .16, 32.",
        ),
        (
            lambda s: s["model"].update({f"_orig_mod.{POSITIONS}": torch.zeros(16, 32)}),
            f"'_orig_mod.{POSITIONS}' and '{POSITIONS}' are names of the same tensor",
        ),
        (
            lambda s: s["model"].update({QKV.format(1): s["model"][QKV.format(0)]}),
            r"'transformer\.h\.1\.attn\.c_attn\.weight' .*each tensor needs its own",
        ),
    ],
)
def test_the_message_names_the_error(corrupt: Any, message: str, stored: dict[str, Any], tmp_path: Path) -> None:
    corrupt(stored)
    check_contents_refused(stored, tmp_path / "ckpt.pt", message)


def test_a_truncated_file_is_refused(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    for size in (0, 1, 2, 100, len(data) // 2, len(data) - 1000, len(data) - 30):
        (tmp_path / "ckpt.pt").write_bytes(data[:size])
        check_refused(tmp_path / "ckpt.pt", NOT_READABLE)
    check_refused(tmp_path / "nowhere.pt", "no such file")


def test_a_file_in_the_format_before_torch_1_6_is_read(stored: dict[str, Any], tmp_path: Path) -> None:
    torch.save(stored, tmp_path / "ckpt.pt", _use_new_zipfile_serialization=False)
    bundle = nanogpt.read(tmp_path / "ckpt.pt")
    assert torch.equal(bundle.weights["embedding.weight"](), stored["model"]["lm_head.weight"])
    data = (tmp_path / "ckpt.pt").read_bytes()
    for size in (len(torch_file.OLD), len(data) // 2, len(data) - 30):
        (tmp_path / "truncated.pt").write_bytes(data[:size])
        check_refused(tmp_path / "truncated.pt", NOT_READABLE)


# ---- tensors that are not weights

EMPTY = torch.empty(16, 32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EMPTY.to_sparse(), "is torch._utils._rebuild_sparse_tensor"),
        (lambda: EMPTY.to_sparse_csr(), "is torch._utils._rebuild_sparse_tensor"),
        (lambda: torch.empty(16, 32, device="meta"), "is torch._utils._rebuild_meta_tensor"),
        (lambda: torch.quantize_per_tensor(EMPTY, 1.0, 0, torch.qint8), "is torch._utils._rebuild_q"),
        (lambda: torch.ones(16, 32, dtype=torch.int64), "has dtype I64; weights are"),
        (lambda: torch.ones(16, 32, dtype=torch.complex64), "is torch.complex64; expected a dense tensor"),
        (lambda: torch.ones(16, 32).to(torch.float8_e4m3fn), "is torch._utils._rebuild_tensor_v3"),
        (lambda: torch.ones(1).expand(16, 32), "is .16, 32., but the file holds too few values"),
        (lambda: torch.ones(1, 32).expand(10**9, 32), "is .1000000000, 32., but the file holds too few values"),
    ],
)
def test_a_tensor_that_cannot_be_a_weight_is_refused(
    make: Any, message: str, stored: dict[str, Any], tmp_path: Path
) -> None:
    for name in (POSITIONS, "lm_head.weight"):
        contents = {**stored, "model": {**stored["model"], name: make()}}
        check_contents_refused(contents, tmp_path / "ckpt.pt", f"'{name}' {message}")


def test_slices_of_one_buffer_are_read(stored: dict[str, Any], tmp_path: Path) -> None:
    flat = torch.randn(2 * 32)
    stored["model"]["transformer.ln_f.weight"], stored["model"]["transformer.ln_f.bias"] = flat[:32], flat[32:]
    torch.save(stored, tmp_path / "ckpt.pt")
    assert torch.equal(nanogpt.read(tmp_path / "ckpt.pt").weights["decoder.norm.bias"](), flat[32:])


# ---- hostile archives and pickles


def repack(source: Path, target: Path, compression: int, **changes: bytes) -> None:
    """Write the archive again with other contents for some entries, with _ for the dot in the keyword."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for entry in old.infolist():
            name = entry.filename.rpartition("/")[2].replace(".", "_")
            new.writestr(entry.filename, changes.get(name, old.read(entry)))


def test_compressed_entries_are_refused(file: Path, tmp_path: Path) -> None:
    repack(file, tmp_path / "ckpt.pt", zipfile.ZIP_DEFLATED)
    check_refused(tmp_path / "ckpt.pt", "its entries are compressed, which torch never does")
    repack(file, tmp_path / "ckpt.pt", zipfile.ZIP_STORED)
    copy, original = (nanogpt.read(path).weights["embedding.weight"]() for path in (tmp_path / "ckpt.pt", file))
    assert torch.equal(copy, original)


def nested_key() -> bytes:
    """A pickle of 300 bytes: a dictionary with a key whose hash would take 2^60 steps."""
    code = b"\x80\x02}(" + b"X\x05\x00\x00\x00model" + b"}" + b")"
    for _ in range(60):
        code += b"q\x00h\x00\x86"  # a pair of itself and itself
    return code + b"K\x01su."


def call(module: str, name: str, argument: bytes) -> bytes:
    """A pickle that calls a function."""
    return b"\x80\x02}X\x05\x00\x00\x00model" + f"c{module}\n{name}\n".encode() + argument + b"\x85Rs."


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (b"\x80\x02}" + b"0}" * 2**20 + b".", "data.pkl has 2,097,156 bytes; the bound is 2,097,152 .WEFT_LIMITS=2"),
        (nested_key(), NOT_READABLE),
        (call("builtins", "bytearray", b"\x8a\x05\x00\x00\x00\x00\x10"), REFUSED),
        (call("os", "system", b"X\x04\x00\x00\x00true"), REFUSED),
        (call("torch", "zeros", b"\x8a\x05\x00\x00\x00\x00\x10"), "it has no 'model_args'"),
        (b"\x80\x02r\xff\xff\xff\xff.", NOT_READABLE),
        (b"\x80\x02(((((t.", "not a nanoGPT checkpoint"),
        (b"", NOT_READABLE),
    ],
)
@pytest.mark.timeout(20)
def test_pickles_that_torch_does_not_write(program: bytes, message: str, file: Path, tmp_path: Path) -> None:
    repack(file, tmp_path / "ckpt.pt", zipfile.ZIP_STORED, data_pkl=program)
    check_refused(tmp_path / "ckpt.pt", message)


def test_overlapping_entries_are_refused(file: Path) -> None:
    data = bytearray(file.read_bytes())
    offset = data.rfind(b"PK\x01\x02")
    while offset >= 0:  # every entry of the directory now claims nearly all of the file
        data[offset + 20 : offset + 28] = (len(data) - 4096).to_bytes(4, "little") * 2
        offset = data.rfind(b"PK\x01\x02", 0, offset)
    file.write_bytes(data)
    check_refused(file, "its entries overlap")


def test_weights_are_copies(file: Path) -> None:
    nanogpt.read(file).weights["embedding.weight"]().zero_()
    assert nanogpt.read(file).weights["embedding.weight"]().abs().sum() > 0
