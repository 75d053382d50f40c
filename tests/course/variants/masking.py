"""Correct answers to the exercise masking in other manners."""

# mypy: ignore-errors
import torch


def in_place(words, choice, fate, other, mask_id, last_special):
    tokens, chosen = words.clone(), torch.logical_and(choice < 0.15, words > last_special)
    tokens[chosen & (fate < 0.8)] = mask_id
    swap = chosen & ~(fate < 0.9)
    tokens[swap] = other[swap]
    return tokens, chosen


def loops(words, choice, fate, other, mask_id, last_special):
    tokens, chosen = words.tolist(), torch.zeros_like(words, dtype=torch.bool)
    for b, row in enumerate(words.tolist()):
        for t, word in enumerate(row):
            if word <= last_special or choice[b, t] >= 0.15:
                continue
            chosen[b, t] = True
            if fate[b, t] < 0.8:
                tokens[b][t] = mask_id
            elif fate[b, t] >= 0.9:
                tokens[b][t] = int(other[b, t])
    return torch.tensor(tokens), chosen


def arithmetic(words, choice, fate, other, mask_id, last_special):
    chosen = (choice.lt(0.15) * words.gt(last_special)).long()
    masked, kept = chosen * (fate < 0.8), chosen * ((fate >= 0.8) * (fate < 0.9))
    replaced = chosen - masked - kept
    return masked * mask_id + replaced * other + (1 - masked - replaced) * words, chosen.bool()
