import torch
from torch import Tensor


def speculative(p: Tensor, q: Tensor, guesses: list[int], u: Tensor, r: float) -> list[int]:
    """Return the accepted guesses, and one token more."""
    accepted = ...  # guess x_i is kept if u_i < p_i(x_i)/q_i(x_i), until the first that is not
    rest = ...  # after a rejection at i: max(0, p_i − q_i), normalised; if all were kept: p of the next position
    tokens = ...  # the kept guesses, and the first token whose cumulative probability in `rest` exceeds r
    return tokens
