"""Lectures 1 and 3: recurrent language models. Elman, LSTM and GRU cells, trained by truncated back-propagation.

    python lectures/rnn.py                  train an LSTM on sentences of a small grammar, character by character
    python lectures/rnn.py book.txt         train on your own text
    python lectures/rnn.py book.txt elman   choose the cell: elman, lstm or gru

Figure: the LSTM reaches a held-out loss of 0.185 nats per character; the grammar's entropy is 0.183.
"""

import math
import random
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

State = tuple[Tensor, ...]  # vectors that a cell passes from token to token, (B, d_h) each; the first is h_t


# ---- Cells: x_t (B, d_x) and the previous state → the next state


class Cell(nn.Module):
    """W_ax, W_ah and b_a of all gates of a cell, stacked."""

    gates, parts = 1, 1  # number of gates, and of vectors in a state

    def __init__(self, d_x: int, d_h: int) -> None:
        super().__init__()
        width = d_h**-0.5
        self.W_ax = nn.Parameter(torch.empty(self.gates * d_h, d_x).uniform_(-width, width))
        self.W_ah = nn.Parameter(torch.empty(self.gates * d_h, d_h).uniform_(-width, width))
        self.b_a = nn.Parameter(torch.zeros(self.gates * d_h))


class Elman(Cell):
    """a_t = W_ah h_{t−1} + W_ax x_t + b_a,  h_t = σ(a_t)  (Elman 1990)."""

    sigma = staticmethod(torch.tanh)

    def forward(self, x: Tensor, state: State) -> State:
        (h,) = state
        a = h @ self.W_ah.T + x @ self.W_ax.T + self.b_a
        return (self.sigma(a),)


class LSTM(Cell):
    """i, f, o = σ(…), g = tanh(…),  c_t = f ⊙ c_{t−1} + i ⊙ g,  h_t = o ⊙ tanh(c_t)  (Hochreiter and Schmidhuber 1997).

    From c_{t−1} to c_t there are only one product and one sum, so that gradients survive many steps.
    """

    gates, parts = 4, 2

    def forward(self, x: Tensor, state: State) -> State:
        h, c = state
        a = h @ self.W_ah.T + x @ self.W_ax.T + self.b_a
        i, f, g, o = a.chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class GRU(Cell):
    """r, z = σ(…), n = tanh(W_nx x_t + b_n + r ⊙ (W_nh h_{t−1} + b_nh)),  h_t = (1 − z) ⊙ n + z ⊙ h_{t−1}.

    Cho et al. 2014: r gates how much of the past enters the candidate n, z how much of the past is kept.
    """

    gates = 3

    def __init__(self, d_x: int, d_h: int) -> None:
        super().__init__(d_x, d_h)
        self.b_nh = nn.Parameter(torch.zeros(d_h))

    def forward(self, x: Tensor, state: State) -> State:
        (h,) = state
        r_x, z_x, n_x = (x @ self.W_ax.T + self.b_a).chunk(3, dim=-1)
        r_h, z_h, n_h = (h @ self.W_ah.T).chunk(3, dim=-1)
        r, z = torch.sigmoid(r_x + r_h), torch.sigmoid(z_x + z_h)
        n = torch.tanh(n_x + r * (n_h + self.b_nh))
        return ((1 - z) * n + z * h,)


CELLS: dict[str, type[Cell]] = {"elman": Elman, "lstm": LSTM, "gru": GRU}


class RNNLM(nn.Module):
    """p(w_t | f_θ(w_{t−1}, …, w_1)): embeddings x_t, layers of cells, and y_t = softmax(W_yh h_t + b_y)."""

    def __init__(self, cell: type[Cell], V: int, d_x: int, d_h: int, layers: int = 1, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(V, d_x) * d_x**-0.5)
        self.cells = nn.ModuleList(cell(d_h if layer else d_x, d_h) for layer in range(layers))
        self.W_yh = self.embedding if tied else nn.Parameter(torch.randn(V, d_h) * d_h**-0.5)
        self.b_y = nn.Parameter(torch.zeros(V))
        self.parts, self.d_h = cell.parts, d_h

    def forward(self, tokens: Tensor, carried: list[State] | None = None) -> tuple[Tensor, list[State]]:
        """tokens (B, T) → logits W_yh h_t + b_y (B, T, V) of the token after each, and the states after the last."""
        zeros = self.b_y.new_zeros(len(tokens), self.d_h)  # "initialize the hidden state h_0 to zeros"
        states, h = list(carried or [(zeros,) * self.parts] * len(self.cells)), []
        for x in self.embedding[tokens].unbind(1):  # for t in 1 to T
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(x, states[layer])
                x = states[layer][0]
            h.append(x)
        return torch.stack(h, dim=1) @ self.W_yh.T + self.b_y, states


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean of ℓ_t = −Σ_k (y*_t)_k log (y_t)_k, where y*_t is 1 at the true token and 0 elsewhere."""
    return -logits.log_softmax(dim=-1).gather(-1, targets[..., None]).mean()


def train(model: RNNLM, text: Tensor, steps: int, B: int = 32, T: int = 32) -> None:
    """Truncated back-propagation through time: each step reads T tokens of B parallel streams.

    States are carried from step to step, but gradients stop at the beginning of a step.
    """
    streams = text[: len(text) // B * B].view(B, -1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    states, start = None, 0
    for step in range(1, steps + 1):
        if start + T >= streams.shape[1]:  # end of the text: restart
            states, start = None, 0
        x, targets = streams[:, start : start + T], streams[:, start + 1 : start + T + 1]
        logits, states = model(x, states and [tuple(part.detach() for part in state) for state in states])
        J = loss(logits, targets)
        optimizer.zero_grad()
        J.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # challenge 2: exploding gradients
        optimizer.step()
        schedule.step()
        start += T
        if step % (steps // 10) == 0:
            print(f"step {step:4}: loss {J.item():.3f}", flush=True)


@torch.no_grad()
def sample(model: RNNLM, prompt: list[int], length: int, generator: torch.Generator) -> list[int]:
    """Roll the die p(w_t | h_t), read the token that lands face up, repeat; return the generated tokens."""
    output, new, states = [], prompt, None
    for _ in range(length):
        logits, states = model(torch.tensor([new]), states)
        new = torch.multinomial(logits[0, -1].softmax(-1), 1, generator=generator).tolist()
        output += new
    return output


def make_text(sentences: int) -> tuple[str, float]:
    """Generate sentences; return them and their entropy in nats per character: a choice among k adds log k.

    Challenge 1: verbs agree with distant nouns, as in "the cows the dog sees eat hay".
    """
    rng, nats, text = random.Random(0), 0.0, ""

    def choose(options: str) -> str:
        nonlocal nats
        nats += math.log(len(options.split("|")))
        return rng.choice(options.split("|"))

    for _ in range(sentences):
        s = choose("|s")
        text += f"the {choose('cow|goat|horse')}{s}"
        if choose("alone|seen") == "seen":
            text += " the " + choose("dog sees|dogs see|child sees")
        text += f" {choose('eat|want')}{'' if s else 's'} {choose('grass|hay|corn|leaves')}.\n"
    return text, nats / len(text)


def main() -> None:
    (text, entropy), steps, name = make_text(6000), 400, (sys.argv[2:] or ["lstm"])[0]
    try:
        if len(sys.argv) > 1:
            text, steps = Path(sys.argv[1]).read_text(encoding="utf-8"), 600
        if len(text) < 5000 or name not in CELLS:
            raise ValueError("expected a text of at least 5,000 characters, and a cell: elman, lstm or gru")
    except (OSError, ValueError) as error:
        print(f"rnn.py: {sys.argv[1]}: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
        sys.exit(2)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # such small matrices gain nothing from more threads
    ids = {char: id for id, char in enumerate(sorted(set(text)))}
    tokens = torch.tensor([ids[char] for char in text])
    held_out = tokens[-min(len(tokens) // 10, 20_000) :][None]
    model = RNNLM(CELLS[name], V=len(ids), d_x=64, d_h=128 if len(sys.argv) == 1 else 192)
    train(model, tokens[: -held_out.numel()], steps)
    with torch.no_grad():
        J = loss(model(held_out[:, :-1])[0], held_out[:, 1:])
    print(f"held-out loss {J:.3f} nats per character", f"(entropy {entropy:.3f})" if len(sys.argv) == 1 else "")
    output = sample(model, tokens[:20].tolist(), 400, torch.Generator().manual_seed(0))
    print(text[:20] + "".join(list(ids)[token] for token in output))


if __name__ == "__main__":
    main()
