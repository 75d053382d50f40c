"""Correct answers to the exercise kv_cache in other manners."""

# mypy: ignore-errors
import torch


def one_by_one(x, K_cache, V_cache, W_q, W_k, W_v):
    K, V, outputs = K_cache, V_cache, []
    for t in range(x.shape[1]):
        new = x[:, t : t + 1]
        K, V = torch.cat([K, new @ W_k], 1), torch.cat([V, new @ W_v], 1)
        A = torch.softmax(new @ W_q @ K.transpose(1, 2) / x.shape[-1] ** 0.5, -1)
        outputs.append(A @ V)
    return torch.cat(outputs, 1), K, V


def preallocated(x, K_cache, V_cache, W_q, W_k, W_v):
    (B, T, d), S = x.shape, K_cache.shape[1]
    K, V = x.new_zeros(B, S + T, d), x.new_zeros(B, S + T, d)
    K[:, :S], V[:, :S], K[:, S:], V[:, S:] = K_cache, V_cache, x @ W_k, x @ W_v
    mask = torch.ones(T, S + T, dtype=torch.bool).tril(S)
    return torch.nn.functional.scaled_dot_product_attention(x @ W_q, K, V, attn_mask=mask), K, V


def einsum(x, K_cache, V_cache, W_q, W_k, W_v):
    K = torch.cat((K_cache, torch.einsum("btd,de->bte", x, W_k)), 1)
    V = torch.cat((V_cache, torch.einsum("btd,de->bte", x, W_v)), 1)
    scores = torch.einsum("btd,bsd->bts", x @ W_q, K) * x.shape[-1] ** -0.5
    bias = torch.full(scores.shape[1:], float("-inf"), dtype=x.dtype).triu(K_cache.shape[1] + 1)
    return {"output": (scores + bias).softmax(2) @ V, "K": K, "V": V}
