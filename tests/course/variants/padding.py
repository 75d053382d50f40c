"""Correct answers to the exercise padding in other manners."""

# mypy: ignore-errors
import torch


def pad_sequence(sentences, vocabulary, length, pad, unknown):
    rows = [
        torch.tensor([vocabulary.get(w, vocabulary[unknown]) for w in s[:length]], dtype=torch.int64) for s in sentences
    ]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=vocabulary[pad])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(ids.shape[1])[None] < lengths[:, None]


def lists(sentences, vocabulary, length, pad, unknown):
    cut = [sentence[:length] for sentence in sentences]
    width = max(len(row) for row in cut)
    ids = [
        [vocabulary.get(w, vocabulary[unknown]) for w in row] + [vocabulary[pad]] * (width - len(row)) for row in cut
    ]
    return torch.tensor(ids), torch.tensor([[i < len(row) for i in range(width)] for row in cut])


def words_first(sentences, vocabulary, length, pad, unknown):
    width = min(length, max(map(len, sentences)))
    padded = [(sentence + [pad] * width)[:width] for sentence in sentences]
    ids = torch.tensor([[vocabulary[w] if w in vocabulary else vocabulary[unknown] for w in row] for row in padded])
    mask = [[True] * min(len(s), width) + [False] * max(0, width - len(s)) for s in sentences]
    return {"ids": ids, "mask": torch.tensor(mask)}
