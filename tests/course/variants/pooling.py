"""Correct answers to the exercise pooling in other manners."""

# mypy: ignore-errors
import torch


def einsum(h, mask):
    w = mask.to(h.dtype)
    mean = torch.einsum("btd,bt->bd", h, w) / w.sum(1)[:, None]
    return mean, torch.nn.functional.cosine_similarity(mean[:, None], mean[None], dim=-1)


def rows(h, mask):
    mean = torch.stack([row[keep].mean(0) for row, keep in zip(h, mask, strict=True)])
    norms = mean.pow(2).sum(1).sqrt()
    return mean, mean @ mean.mT / torch.outer(norms, norms)


def nanmean(h, mask):
    mean = torch.where(mask[..., None], h, torch.nan).nanmean(1)
    unit = torch.nn.functional.normalize(mean, dim=1)
    return {"mean": mean, "similarity": torch.einsum("id,jd->ij", unit, unit)}
