"""Correct answers to the exercise label_smoothing in other manners."""

# mypy: ignore-errors
import torch


def by_torch(logits, targets, pad, eps):
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=pad, label_smoothing=eps)


def distribution(logits, targets, pad, eps):
    q = torch.full_like(logits, eps / logits.shape[1])
    q[torch.arange(len(targets)), targets] += 1 - eps
    keep = targets != pad
    return -(q * (logits - logits.logsumexp(1, keepdim=True))).sum(1)[keep].sum() / keep.sum()


def loop(logits, targets, pad, eps):
    total, count = 0.0, 0
    for row, target in zip(logits, targets.tolist(), strict=True):
        if target != pad:
            log_p = torch.log_softmax(row, 0)
            total = total - (1 - eps) * log_p[target] - eps * log_p.sum() / len(row)
            count += 1
    return total / count
