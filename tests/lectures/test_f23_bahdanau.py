"""F23 (lecture 1): attention as a soft alignment of target words with source words."""

import torch
from torch import Tensor, nn

from weft.models.bahdanau import Bahdanau as Model
from weft.models.config import Bahdanau

SYMBOLS, MAX_LENGTH, START = 8, 6, 8


class Copies:
    """Random sequences of 3 to 6 symbols to copy; `tokens` and `mask` are the source."""

    def __init__(self, batch: int, generator: torch.Generator):
        lengths = torch.randint(3, MAX_LENGTH + 1, (batch, 1), generator=generator)
        self.tokens = torch.randint(SYMBOLS, (batch, MAX_LENGTH), generator=generator)
        self.mask = torch.arange(MAX_LENGTH) < lengths
        self.inputs = torch.cat([torch.full((batch, 1), START), self.tokens[:, :-1]], dim=1)


def attend(model: Model, copies: Copies) -> tuple[Tensor, Tensor]:
    """Logits, and the attention probabilities (batch, target time, source time)."""
    seen: list[Tensor] = []
    stop = model.alignment.watch(seen.append)
    with torch.no_grad():
        logits = model(copies.inputs, source=copies)
    stop()
    return logits, seen[0]


def build() -> Model:
    torch.manual_seed(0)
    # Elman cells: a GRU has enough memory to copy a word one step after attending to it.
    return Model(Bahdanau(vocab_size=SYMBOLS + 1, d_model=32, cell="elman"))


def test_f23_rows_sum_to_one_over_real_words() -> None:
    copies = Copies(16, torch.Generator().manual_seed(1))
    _, a = attend(build(), copies)
    assert a.shape == (16, MAX_LENGTH, MAX_LENGTH) and (a >= 0).all()
    torch.testing.assert_close(a.sum(-1), torch.ones(16, MAX_LENGTH))
    assert (a[~copies.mask[:, None].expand_as(a)] == 0).all()


def test_f23_a_model_that_copies_attends_along_the_diagonal() -> None:
    model, generator = build(), torch.Generator().manual_seed(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(220):
        copies = Copies(32, generator)
        logits = model(copies.inputs, source=copies)
        loss = nn.functional.cross_entropy(logits[copies.mask], copies.tokens[copies.mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    unseen = Copies(200, torch.Generator().manual_seed(3))
    logits, a = attend(model.eval(), unseen)
    right = (logits.argmax(-1) == unseen.tokens)[unseen.mask].float().mean()
    diagonal = (a.argmax(-1) == torch.arange(MAX_LENGTH))[unseen.mask].float().mean()
    assert right > 0.95, f"only {right:.3f} of the symbols are copied"
    assert diagonal > 0.85, f"only {diagonal:.3f} of the target words attend to their source word"
    long = unseen.mask.all(1)
    assert a[long].mean(0).argmax(-1).tolist() == list(range(MAX_LENGTH))
