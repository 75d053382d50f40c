"""Correct answers to the exercise flops in other manners."""

# mypy: ignore-errors
import torch


def matrices(layers, d_model, d_ff, T, vocab_size):
    def product(rows, columns):
        return 2 * rows * columns

    parts = [layers * 4 * product(d_model, d_model), layers * 2 * product(d_model, T)]
    parts += [layers * (product(d_model, d_ff) + product(d_ff, d_model)), product(d_model, vocab_size)]
    return sum(parts), [part / sum(parts) for part in parts]


def tensors(layers, d_model, d_ff, T, vocab_size):
    parts = (
        torch.tensor([8 * d_model * layers, 4 * T * layers, 4 * d_ff * layers, 2 * vocab_size], dtype=torch.float64)
        * d_model
    )
    return parts.sum(), parts / parts.sum()


def layer_by_layer(layers, d_model, d_ff, T, vocab_size):
    totals = {"projections": 0, "scores": 0, "feedforward": 0, "logits": vocab_size * d_model * 2}
    for _ in range(layers):
        totals["projections"] += 2 * 4 * d_model * d_model
        totals["scores"] += 2 * T * d_model + 2 * T * d_model
        totals["feedforward"] += 2 * d_model * d_ff * 2
    whole = sum(totals.values())
    return whole, tuple(value / whole for value in totals.values())
