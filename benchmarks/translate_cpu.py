"""Time translation on a CPU with beam search and OPUS-MT's shape, beside CTranslate2 in fp32 and transformers.

    python benchmarks/translate_cpu.py [--ways weft ctranslate2 transformers] [--lines 50] [--beam 5] [--rounds 2]
                                       [--threads N] [--memory 100] [--tiny]

weft           `run.translate`, as `weft translate` calls it, from a run imported from CTranslate2's folder
ctranslate2    Translator.translate_batch in float32, with all lines in one call, and with batches of 32
transformers   MarianMTModel.generate(num_beams=…, early_stopping=True), in batches of 25 lines sorted by length

All have the same random weights in Marian's shape of 6 + 6 layers, d_model 512, d_ff 2048 and 65,000 tokens; the row of
eos is fitted so that answers are about as long as their lines. All take turns in every round, and the best round
counts, by the clock and by processor time, which other load disturbs less. The number of equal answers is printed: all
three end a search when as many answers have ended as there are beams. With --memory, `weft translate` reads this many
lines in a separate process; its peak memory is printed, beside that of a process that only imports torch.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import ctranslate2
import torch
import transformers
from ctranslate2.converters.transformers import MarianMTLoader
from transformers import MarianConfig, MarianMTModel

import weft
from weft.cli.main import run as command
from weft.decode.config import Beam

EOS, UNK = 0, 1
WAYS = ("weft", "ctranslate2", "transformers")
MAX_TOKENS = 128  # of an answer
PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6)
"""
Answers = list[list[str]]  # the tokens of each line's answer


def peer(tiny: bool) -> MarianMTModel:
    """Build Marian with weights that vary its words by position; the last token is the padding, as in OPUS-MT."""
    layers, d_model, heads, d_ff, vocab = (2, 64, 4, 128, 500) if tiny else (6, 512, 8, 2048, 65001)
    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=vocab,
        d_model=d_model,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=d_ff,
        decoder_ffn_dim=d_ff,
        max_position_embeddings=512,
        activation_function="swish",
        scale_embedding=True,
        pad_token_id=vocab - 1,
        decoder_start_token_id=vocab - 1,
        eos_token_id=EOS,
        forced_eos_token_id=None,
    )
    model = MarianMTModel(config).eval()
    wide = (512 / d_model) ** 0.5
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed_positions" in name or "norm" in name:
                continue
            narrow = 0.13 if "shared" in name else 0.05 if "fc" in name else 0.02
            weight.normal_(std=0.02 if weight.ndim == 1 else narrow * wide)
        model.model.shared.weight[-1] = 0.0
        for _ in range(3):  # the encoder reads eos too, so its new row changes the features it is fitted to
            fit_end(model)
    return model


def fit_end(model: MarianMTModel) -> None:
    """Fit a row and a bias for eos: its logit grows with the answer, and exceeds the others near its end."""
    vocab, rng = model.config.vocab_size, torch.Generator().manual_seed(1)
    lengths = torch.randint(6, 41, (64,), generator=rng)
    sources = torch.randint(2, vocab - 1, (64, 40), generator=rng)
    positions = torch.arange(40)
    mask = (positions < lengths[:, None]).long()
    sources[torch.arange(64), lengths - 1] = EOS
    sources = sources.masked_fill(mask == 0, vocab - 1)
    written = torch.randint(2, vocab - 1, (64, 60), generator=rng)
    written[:, 0] = vocab - 1
    features = model.model(input_ids=sources, attention_mask=mask, decoder_input_ids=written).last_hidden_state
    top = (features[:, ::10] @ model.model.shared.weight[2:-1].T).amax(-1).mean()
    # 13 lower: the best of many beams exceeds the mean
    target = top - 13.0 + 0.5 * (torch.arange(60) - lengths[:, None])
    x = torch.cat((features.flatten(0, 1), torch.ones(64 * 60, 1)), dim=1)
    fitted = torch.linalg.solve(x.T @ x + 10.0 * torch.eye(x.shape[1]), x.T @ target.flatten())
    model.model.shared.weight[EOS] = fitted[:-1]
    model.final_logits_bias[0, EOS] = fitted[-1]


def lines(count: int, vocab: int) -> list[str]:
    """Lines of 5 to 39 words."""
    rng = torch.Generator().manual_seed(2)
    lengths = torch.randint(5, 40, (count,), generator=rng).tolist()
    return [" ".join(f"t{id}" for id in torch.randint(2, vocab - 1, (n,), generator=rng).tolist()) for n in lengths]


def folders(model: MarianMTModel, folder: Path) -> tuple[Path, Path]:
    """Write the weights for CTranslate2, and import its folder as a run of weft."""
    theirs, ours = folder / "ctranslate2", folder / "run"
    spec = MarianMTLoader().get_model_spec(model)
    tokens = ["</s>", "<unk>", *(f"t{id}" for id in range(2, model.config.vocab_size - 1))]
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.eos_token, spec.config.unk_token, spec.config.decoder_start_token = "</s>", "<unk>", "</s>"
    spec.config.add_source_eos = True
    spec.validate()
    spec.optimize()
    theirs.mkdir()
    spec.save(str(theirs))
    if command(["import", str(theirs), str(ours)]):
        raise SystemExit("weft could not import CTranslate2's folder")
    return theirs, ours


def contestants(options: argparse.Namespace, model: MarianMTModel, folder: Path) -> dict[str, Callable[[], Answers]]:
    texts = lines(options.lines, model.config.vocab_size)
    theirs, ours = folders(model, folder)
    translators: dict[str, Callable[[], Answers]] = {}
    if "weft" in options.ways:
        run = weft.load(ours)
        settings = Beam(beams=options.beam, patience=1.0)
        translators["weft"] = lambda: [text.split() for text in run.translate(texts, settings)]
    if "ctranslate2" in options.ways:
        translator = ctranslate2.Translator(
            str(theirs), compute_type="float32", inter_threads=1, intra_threads=torch.get_num_threads()
        )
        tokens = [line.split() for line in texts]
        for name, size in (("ctranslate2", 0), ("ctranslate2, 32", 32)):

            def theirs_of(size: int = size) -> Answers:
                results = translator.translate_batch(
                    tokens, max_batch_size=size, beam_size=options.beam, max_decoding_length=MAX_TOKENS
                )
                return [result.hypotheses[0] for result in results]

            translators[name] = theirs_of
    if "transformers" in options.ways:
        translators["transformers"] = lambda: translate_with_transformers(model, texts, options.beam)
    return translators


def translate_with_transformers(model: MarianMTModel, texts: list[str], beams: int) -> Answers:
    pad, order = model.config.vocab_size - 1, sorted(range(len(texts)), key=lambda number: len(texts[number].split()))
    translations: Answers = [[] for _ in texts]
    for first in range(0, len(order), 25):
        batch = order[first : first + 25]
        rows = [[*(int(word[1:]) for word in texts[number].split()), EOS] for number in batch]
        longest = max(map(len, rows))
        tokens = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
        settings: dict[str, Any] = {"num_beams": beams, "do_sample": False, "early_stopping": True}
        settings |= {"max_new_tokens": MAX_TOKENS, "bad_words_ids": [[pad]]}
        answers = model.generate(tokens, attention_mask=(tokens != pad).long(), **settings)
        for number, answer in zip(batch, answers.tolist(), strict=True):
            translations[number] = ["<unk>" if id == UNK else f"t{id}" for id in answer if id not in (EOS, pad)]
    return translations


def memory(options: argparse.Namespace, vocab: int, folder: Path) -> str:
    """Time and peak memory of `weft translate` for many lines, in a separate process."""
    (folder / "lines.txt").write_text("".join(line + "\n" for line in lines(options.memory, vocab)))
    code = "import sys; from weft.cli.main import run; sys.exit(run(sys.argv[1:]))"
    arguments = ["translate", str(folder / "run"), str(folder / "lines.txt"), "--out", str(folder / "answers.txt")]
    bare = peak([sys.executable, "-c", "import torch"])
    start = time.perf_counter()
    used = peak([sys.executable, "-c", code, *arguments, "--beam", str(options.beam)])
    took = time.perf_counter() - start
    return f"`weft translate`, {options.memory} lines: {took:.1f} s, peak {used:.0f} MB; torch alone {bare:.0f} MB"


def peak(command: list[str]) -> float:
    """Peak resident memory of a process, in megabytes (10⁶ bytes).

    A small process starts it, because a child's peak includes the memory of its parent at the fork.
    """
    return float(subprocess.run([sys.executable, "-c", PEAK, *command], check=True, stdout=subprocess.PIPE).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--lines", type=int, default=50)
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--memory", type=int, default=100)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    versions = (
        f"torch {torch.__version__}, ctranslate2 {ctranslate2.__version__}, transformers {transformers.__version__}"
    )
    print(f"{torch.get_num_threads()} threads, {versions}", flush=True)
    model = peer(options.tiny)
    with tempfile.TemporaryDirectory() as folder:
        translators = contestants(options, model, Path(folder))
        outputs: dict[str, Answers] = {}
        clock: dict[str, list[float]] = {name: [] for name in translators}
        processor: dict[str, list[float]] = {name: [] for name in translators}
        for _ in range(options.rounds):
            for name, translate in translators.items():
                start, spent = time.perf_counter(), time.process_time()
                outputs[name] = translate()
                processor[name].append(time.process_time() - spent)
                clock[name].append(time.perf_counter() - start)
                print(f"  {name}: {clock[name][-1]:.1f} s, {processor[name][-1]:.1f} s of processor time", flush=True)
        for name, answers in outputs.items():
            seconds, spent, tokens = min(clock[name]), min(processor[name]), sum(map(len, answers)) + len(answers)
            rates = f"{len(answers) / seconds:.2f} lines/s, {tokens / seconds:.0f} tokens/s"
            line = f"{name:16} {seconds:6.1f} s, {spent:6.1f} s of processor time; {rates}"
            if name != "weft" and "weft" in translators:
                same = sum(mine == other for mine, other in zip(outputs["weft"], answers, strict=True))
                times = f"{seconds / min(clock['weft']):.2f} × ({spent / min(processor['weft']):.2f} ×)"
                line += f"; weft is {times} as fast, {same} of {len(answers)} answers are equal"
            print(line)
        if options.memory and "weft" in translators:
            print(memory(options, model.config.vocab_size, Path(folder)))


if __name__ == "__main__":
    main()
