"""Correct answers to the exercise pre_post_norm in other manners."""

# mypy: ignore-errors
import torch


def by_hand(x, W1, W2):
    def norm(z):
        mean = z.mean(-1, keepdim=True)
        return (z - mean) / torch.sqrt(((z - mean) ** 2).mean(-1, keepdim=True) + 1e-5)

    return norm(x + torch.clamp(x @ W1, min=0) @ W2), x + torch.clamp(norm(x) @ W1, min=0) @ W2


def modules(x, W1, W2):
    norm = torch.nn.LayerNorm(x.shape[-1], elementwise_affine=False)
    first, second = torch.relu(torch.einsum("btd,df->btf", x, W1)), torch.relu(torch.einsum("btd,df->btf", norm(x), W1))
    return norm(x + torch.einsum("btf,fd->btd", first, W2)), x + torch.einsum("btf,fd->btd", second, W2)


def flat(x, W1, W2):
    rows = x.reshape(-1, x.shape[-1])
    n = torch.nn.functional.layer_norm(rows, rows.shape[1:])
    pre = rows + (n @ W1).maximum(torch.zeros(())).mm(W2)
    post = torch.nn.functional.layer_norm(torch.addmm(rows, (rows @ W1).relu(), W2), rows.shape[1:])
    return post.view_as(x), pre.view_as(x)
