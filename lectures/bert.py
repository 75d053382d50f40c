"""Lecture 4: BERT, a stack of encoders, pretrained on masked words and next sentences, then fine-tuned on a task.

    python lectures/bert.py             pretrain on generated restaurant reviews; task: is a review good?
    python lectures/bert.py book.txt    pretrain on your own text; task: is a paragraph from its first half?

Figure: fine-tuned on 400 labels, it labels 100 % of 500 other reviews correctly.
"""

import math
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

PAD, UNKNOWN, CLS, SEP, MASK = range(5)
DROPOUT, EPS = 0.1, 1e-12
Row = tuple[list[int], list[int], int]  # two sentences (the second may be empty) and a label


# ---- The encoder: without a causal mask, a word sees both sides
class Layer(nn.Module):
    """LayerNorm(x + f(x)): f is first multi-head softmax(QKᵀ/√d_k)V, then FFN(x) = GELU(x W1 + b1) W2 + b2."""

    def __init__(self, d_model: int, heads: int):
        super().__init__()
        self.heads, self.d_k, self.dropout = heads, d_model // heads, nn.Dropout(DROPOUT)
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))
        self.W1, self.W2 = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)
        self.norm1, self.norm2 = nn.LayerNorm(d_model, EPS), nn.LayerNorm(d_model, EPS)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """x (batch, time, d_model) → (batch, time, d_model); `real` (batch, time) is False at padding."""
        Q, K, V = (W(x).unflatten(-1, (self.heads, self.d_k)).transpose(1, 2) for W in (self.W_q, self.W_k, self.W_v))
        scores = (Q @ K.mT / math.sqrt(self.d_k)).masked_fill(~real[:, None, None], -math.inf)
        A = self.dropout(scores.softmax(dim=-1))
        x = self.norm1(x + self.dropout(self.W_o((A @ V).transpose(1, 2).flatten(2))))
        return self.norm2(x + self.dropout(self.W2(F.gelu(self.W1(x)))))


class Encoder(nn.Module):
    """Each token is the sum of three embeddings: of its word, its position and its segment."""

    def __init__(self, vocab_size: int, context: int, layers: int, d_model: int, heads: int):
        super().__init__()
        self.words, self.positions = nn.Embedding(vocab_size, d_model), nn.Embedding(context, d_model)
        self.segments, self.norm = nn.Embedding(2, d_model), nn.LayerNorm(d_model, EPS)
        self.dropout, self.layers = nn.Dropout(DROPOUT), nn.ModuleList(Layer(d_model, heads) for _ in range(layers))
        for weight in (weight for weight in self.parameters() if weight.dim() == 2):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        """tokens and segments (batch, time) → (batch, time, d_model)."""
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]] + self.segments(segments)
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x, tokens != PAD)
        return x


# ---- Heads
class Classifier(nn.Module):
    """One label for the whole row, from the encoder's output at [CLS]."""

    def __init__(self, d_model: int, labels: int, dropout: float = DROPOUT):
        super().__init__()
        self.pooler, self.dropout = nn.Linear(d_model, d_model), nn.Dropout(dropout)
        self.out = nn.Linear(d_model, labels)

    def forward(self, h: Tensor) -> Tensor:
        """(batch, time, d_model) → logits (batch, labels)."""
        return self.out(self.dropout(self.pooler(h[:, 0]).tanh()))


class Pretraining(nn.Module):
    """P(w | both sides) = softmax(W LayerNorm(GELU(W_d h + b_d)) + b), W the word embeddings; and next sentence."""

    def __init__(self, vocab_size: int, d_model: int):
        super().__init__()
        self.W_d, self.norm = nn.Linear(d_model, d_model), nn.LayerNorm(d_model, EPS)
        self.b, self.next_sentence = nn.Parameter(torch.zeros(vocab_size)), Classifier(d_model, 2, dropout=0.0)

    def forward(self, h: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, time, d_model) → logits (batch, time, vocab_size) and (batch, 2)."""
        return self.norm(F.gelu(self.W_d(h))) @ W.T + self.b, self.next_sentence(h)


def pretraining_loss(logits: tuple[Tensor, Tensor], words: Tensor, chosen: Tensor, is_next: Tensor) -> Tensor:
    """Sum of both tasks: mean −log P of the chosen words (batch, time), and of is_next (batch,)."""
    return F.cross_entropy(logits[0][chosen], words[chosen]) + F.cross_entropy(logits[1], is_next)


def mask_words(words: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Choose 15 % of the words (batch, time); of these, 80 % become [MASK], 10 % a random word, 10 % stay."""
    chosen, fate = (torch.rand(words.shape) < 0.15) & (words > MASK), torch.rand(words.shape)
    tokens = torch.where(chosen & (fate < 0.8), MASK, words)
    return torch.where(chosen & (fate >= 0.9), torch.randint(MASK + 1, vocab_size, words.shape), tokens), chosen


def to_batch(rows: list[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Padded tokens [CLS] a [SEP] b [SEP], segments (0 for a, 1 for b), (batch, time) each, and labels (batch,)."""
    tokens = [torch.tensor([CLS, *a, SEP, *([*b, SEP] if b else [])]) for a, b, _ in rows]
    segments = [(torch.arange(len(row)) > len(a) + 1).long() for row, (a, _, _) in zip(tokens, rows, strict=True)]
    return pad_sequence(tokens, True, PAD), pad_sequence(segments, True), torch.tensor([label for _, _, label in rows])


def next_sentence(documents: list[list[list[int]]]) -> Row:
    """A sentence and, half of the time, its successor, otherwise one from another document."""
    document, other = random.sample(documents, 2)
    i, is_next = random.randrange(len(document) - 1), random.randrange(2)
    return document[i], document[i + 1] if is_next else random.choice(other), is_next


def fit(model: nn.Module, steps: int, lr: float, loss: Callable[[], Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = lr * min(step / 50, 1 - step / (steps + 1))  # warm-up, then linear decay
        J = loss()
        optimizer.zero_grad()
        J.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step:4}  loss {J.item():.3f}", flush=True)


def fine_tune(encoder: Encoder, rows: list[Row], others: list[Row]) -> float:
    """Train on the labels of `rows`; return the accuracy on `others`."""
    model = nn.ModuleDict({"encoder": encoder, "classifier": Classifier(encoder.words.embedding_dim, 2)})

    def logits_and_labels(rows: list[Row]) -> tuple[Tensor, Tensor]:
        tokens, segments, labels = to_batch(rows)
        return model["classifier"](encoder(tokens, segments)), labels

    fit(model, 120, 1e-3, lambda: F.cross_entropy(*logits_and_labels(random.choices(rows, k=16))))
    model.eval()
    logits, labels = logits_and_labels(others)
    return (logits.argmax(dim=-1) == labels).float().mean().item()


# ---- Generated reviews, if no text is given
POOR = "poor bad awful terrible dreadful horrible nasty weak lousy dismal ghastly sad miserable".split()
GOOD = "good great lovely superb excellent pleasant fine nice perfect amazing charming brilliant splendid".split()
REASONS = {"food": ("it had no flavor", "it had enough flavor"), "service": ("they were rude", "they were kind")}


def review() -> tuple[list[str], int]:
    """An opinion and its reason, and whether the opinion is good."""
    topic, good = random.choice(sorted(REASONS)), random.randrange(2)
    return [f"the {topic} was {random.choice((POOR, GOOD)[good])}", REASONS[topic][good]], good


def main(paths: list[str]) -> int:
    random.seed(0)
    torch.manual_seed(0)
    texts, labels = map(list, zip(*(review() for _ in range(3000)), strict=True))
    try:
        if paths:
            paragraphs = re.split(r"\n\s*\n", Path(paths[0]).read_text(encoding="utf-8").lower())
            texts = [text for block in paragraphs if len(text := re.findall(r"[^.!?]*\w[.!?]", block)) > 1]
            labels = [int(n < len(texts) // 2) for n in range(len(texts))]
        if len(texts) < 500:
            raise ValueError(f"expected at least 500 paragraphs of two or more sentences, found {len(texts)}")
    except (OSError, ValueError) as error:
        print(f"{paths[0]}: {error}", file=sys.stderr)
        return 2
    common = Counter(word for text in texts for sentence in text for word in sentence.split()).most_common(4000)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(word for word, _ in common)]
    ids = {word: id for id, word in enumerate(vocabulary)}
    documents = [[[ids.get(word, UNKNOWN) for word in part.split()[:20]] for part in text] for text in texts]
    rows: list[Row] = [(text[0], [], label) for text, label in zip(documents, labels, strict=True)]
    random.shuffle(rows)
    encoder, head = Encoder(len(ids), 48, 2, 64, 4), Pretraining(len(ids), 64)

    def loss() -> Tensor:
        words, segments, is_next = to_batch([next_sentence(documents) for _ in range(32)])
        tokens, chosen = mask_words(words, len(ids))
        return pretraining_loss(head(encoder(tokens, segments), encoder.words.weight), words, chosen, is_next)

    fit(nn.ModuleList([encoder, head]), 700, 1.5e-3, loss)
    words, segments, _ = to_batch(rows[-1:])
    for i in range(1, words.shape[1] - 1):  # mask each word in turn
        tokens = words.index_fill(1, torch.tensor([i]), MASK)
        best = head(encoder(tokens, segments), encoder.words.weight)[0][0, i].topk(4).indices
        print(f"{vocabulary[words[0, i]]:>10} ←", *(vocabulary[id] for id in best))
    accuracy = fine_tune(encoder, rows[:400], rows[400:900])
    print(f"of unseen texts, {accuracy:.1%} are labelled correctly")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
