"""The expected numbers of exercises are those of lectures/ and of weft."""

from collections.abc import Callable
from typing import Any

import torch
from tests.lectures.textbook.lecture import load
from torch import Tensor

from weft.course.exercises import exercise
from weft.course.values import Draw, gap

DRAW = Draw(0)


def reference(name: str) -> Callable[..., Any]:
    return getattr(exercise(name).reference(), name)


def close(one: Any, other: Any) -> bool:
    return gap(one, other) < 1e-9


def test_attention_and_positions() -> None:
    gpt, llama, transformer, bahdanau = map(load, ("gpt", "llama", "transformer", "bahdanau"))
    Q, K, V = (DRAW.normal(2, 5, 4) for _ in range(3))
    causal = torch.ones(2, 5, 5, dtype=torch.bool).tril()
    assert close(reference("attention")(Q, K, V, causal), gpt.attention(Q[:, None], K[:, None], V[:, None])[:, 0])
    assert close(reference("sinusoids")(7, 8), transformer.sinusoids(7, 8))
    m = torch.arange(3, 8)
    assert gap(reference("rotary")(Q, m, 10000.0), llama.rotate(Q, m, 10000.0)) < 1e-6  # its angles are float32
    theirs = bahdanau.Attention(4, 3).double()
    s, h, mask = DRAW.normal(2, 4), DRAW.normal(2, 5, 8), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    W_a, U_a, v_a = theirs.W_a.weight, theirs.U_a.weight, theirs.v_a.weight[0]
    assert close(list(reference("bahdanau")(s, h, mask, W_a, U_a, v_a)), list(theirs(s, h, mask)))


def test_layers() -> None:
    llama, rnn, gpt = map(load, ("llama", "rnn", "gpt"))
    x, g = DRAW.normal(3, 6), torch.zeros(3, 6, dtype=torch.float64)
    ones, zeros = torch.ones(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    assert close(reference("rms_norm")(x, ones, 1e-5, g)[0], llama.RMSNorm(6, 1e-5).double()(x))
    assert close(reference("layer_norm")(x, ones, zeros, 1e-5, g)[0], gpt.LayerNorm(6).double()(x))
    ffn = llama.FFN(6, 9).double()
    assert close(reference("swiglu")(x[None], ffn.W_g.weight.T, ffn.W_u.weight.T, ffn.W_d.weight.T), ffn(x[None]))
    cell = rnn.LSTM(6, 4).double()
    h, c = DRAW.normal(3, 4), DRAW.normal(3, 4)
    W = torch.cat([cell.W_ax, cell.W_ah], dim=1)
    assert close(list(reference("lstm")(x, h, c, W, cell.b_a)), list(cell(x, (h, c))))


def test_the_network_of_the_lecture() -> None:
    backprop = load("backprop")
    x, alpha, beta = [1.0, 0.5, -2.0], DRAW.normal(4, 3), DRAW.normal(2, 5)
    nodes = [[[backprop.Node(float(w)) for w in row] for row in matrix] for matrix in (alpha, beta)]
    layers = backprop.nn_forward(x[1:], 1, *nodes)
    backprop.backward(layers.J)
    J, g_alpha, g_beta = reference("mlp")(torch.tensor(x, dtype=torch.float64), 1, alpha, beta)
    assert close(J, layers.J.value)
    assert close(g_alpha, [[node.g for node in row] for row in nodes[0]])
    assert close(g_beta, [[node.g for node in row] for row in nodes[1]])


def test_counts_and_tokens() -> None:
    ngram, bpe = load("ngram"), load("bpe")
    texts = [tuple(snippet.split()) for snippet in ngram.SNIPPETS.split(" / ")]
    p = reference("mle")([list(text) for text in texts], 3)
    assert p["cows", "eat"] == {"corn": 4 / 11, "grass": 3 / 11, "hay": 2 / 11, "if": 1 / 11, "which": 1 / 11}
    model = ngram.MaximumLikelihood(texts, 3)
    assert all(close(share, model.p(w, h)) for h, die in p.items() for w, share in die.items())
    log_p = torch.tensor([[1 / 4, 1 / 3, 1 / 4, 1 / 3]], dtype=torch.float64).log()
    assert close(reference("perplexity")(log_p, log_p < 0, 9)[0], ngram.perplexity([1 / 4, 1 / 3, 1 / 4, 1 / 3]))
    merges = reference("bpe_merges")({"low": 5, "lower": 2, "newest": 6, "widest": 3}, 8)
    ranks = {(a.encode(), b.encode()): rank for rank, (a, b) in enumerate(merges)}
    for word in ("lowest", "newer", "wide"):
        assert reference("bpe_encode")(word, merges) == [piece.decode() for piece in bpe.bpe(word, ranks)]


def test_training_and_decoding() -> None:
    transformer, gpt = load("transformer"), load("gpt")
    logits, targets = DRAW.normal(6, 5), torch.tensor([1, 0, 3, 2, 0, 4])
    assert transformer.PAD == 0
    assert close(reference("label_smoothing")(logits, targets, 0, 0.1), transformer.smoothed_loss(logits, targets, 0.1))
    assert close(reference("warmup")(1000, 512, 4000), transformer.lrate(1000, 512, 4000))
    filtered: Tensor = gpt.top_p(gpt.top_k(gpt.with_temperature(logits, 0.7), 4), 0.8)
    assert close(reference("sampling")(logits, 0.7, 4, 0.8), filtered.softmax(-1))
    sizes = [
        reference("parameters")(50257, 1024, layers, d) for layers, d in ((12, 768), (24, 1024), (36, 1280), (48, 1600))
    ]
    assert sizes == [124_439_808, 354_823_168, 774_030_080, 1_557_611_200]
