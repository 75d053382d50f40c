"""Correct answers to the exercise next_sentence in other manners."""

# mypy: ignore-errors
import torch


def branches(documents, d, i, coin, other, j, cls, sep):
    if coin < 0.5:
        second, label = documents[d][i + 1], True
    else:
        second, label = documents[other][j], False
    head = [cls] + documents[d][i] + [sep]
    return head + second + [sep], [0 for _ in head] + [1 for _ in second] + [1], label


def tensors(documents, d, i, coin, other, j, cls, sep):
    follows = 1 if coin < 0.5 else 0
    first, second = documents[d][i], (documents[other][j], documents[d][min(i + 1, len(documents[d]) - 1)])[follows]
    tokens = torch.tensor([cls, *first, sep, *second, sep])
    return tokens, (torch.arange(len(tokens)) > len(first) + 1).long(), follows


def as_a_dict(documents, d, i, coin, other, j, cls, sep):
    pair = [documents[d][i], documents[d][i + 1] if coin < 0.5 else documents[other][j]]
    tokens, segments = [cls], [0]
    for number, sentence in enumerate(pair):
        tokens += [*sentence, sep]
        segments += [number] * (len(sentence) + 1)
    return {"tokens": tokens, "segments": segments, "label": int(coin < 0.5)}
