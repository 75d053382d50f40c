"""The decode engine of a served model, with a KV cache sized to the free memory."""

from weft.api.run import Run
from weft.decode.engine.engine import Engine, EngineLimits
from weft.decode.engine.paging import block_bytes
from weft.decode.generate import BLOCK_SIZE, MAX_ENGINE_LENGTH, check_quantized_cache, engine_supports
from weft.decode.prompt import context_window
from weft.machine import free_memory
from weft.models.base import device_of
from weft.serve.config import Limits

CACHE_SHARE = 0.5  # share of the memory free after loading the model that the KV cache may take
MAX_KEPT_BYTES = 128 << 20  # KV blocks of finished texts kept for reuse on a CPU, where blocks use memory once written
MIN_KV_BLOCKS = 16  # refuse to serve a model that cannot hold this many KV blocks


def build_engine(run: Run, limits: Limits) -> Engine | None:
    """Return an engine with as many KV blocks as memory allows, or None for a model that the engine cannot run."""
    model, device = run.model, device_of(run.model)
    if not run.config.objective.continues:
        return None
    max_length = min(context_window(model) or MAX_ENGINE_LENGTH, limits.max_tokens, MAX_ENGINE_LENGTH)
    if limits.quantize_cache is not None:
        check_quantized_cache(model, max_length)
    if not engine_supports(model, max_length):
        return None
    size = block_bytes(model, BLOCK_SIZE, limits.quantize_cache)
    able = int(CACHE_SHARE * free_memory(device)) // size
    blocks = kv_blocks(able, max_length, rows=limits.rows, context=model.config.context)
    bits, max_cached = limits.quantize_cache, None if device.type == "cuda" else MAX_KEPT_BYTES // size
    engine_limits = EngineLimits(blocks, BLOCK_SIZE, limits.rows, max_cached_blocks=max_cached, bits=bits)
    return Engine(model, run.tokenizer.vocab_size, engine_limits)


def kv_blocks(able: int, max_length: int, *, rows: int, context: int) -> int:
    """Return how many KV blocks to allocate, given that memory holds `able` of them.

    They hold `rows` texts of the training context, or one text of `max_length` tokens: texts may be longer than the
    context, but seldom all at the same time.
    """
    usual, longest = -(-min(max_length, context) // BLOCK_SIZE), -(-max_length // BLOCK_SIZE)
    if able < min(usual, MIN_KV_BLOCKS):
        raise MemoryError(f"no memory for the KV cache of one text of {MIN_KV_BLOCKS * BLOCK_SIZE} tokens")
    return min(max(rows * usual, longest), able)
