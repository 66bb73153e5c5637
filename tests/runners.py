"""A model that is loaded already, over another cache: small enough for a test to fill it.

Decides nothing but the cache's shape, which is the model's.
"""

from __future__ import annotations

from forerun.cache.paged import PagedCache
from forerun.models.decoder import Decoder
from forerun.models.runner import Runner


def with_cache(decoder: Decoder, num_tokens: int, block_size: int = 16) -> Runner:
    """The same weights over a cache of their own."""
    c = decoder.config
    shape = {"layers": c.layers, "kv_heads": c.kv_heads, "head_dim": c.head_dim}
    cache = PagedCache(**shape, num_tokens=num_tokens, dtype=decoder.dtype, block_size=block_size)
    return Runner(decoder, cache)
