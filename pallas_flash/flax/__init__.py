"""Flax on top of `pallas_flash.attention`: a drop-in, a self-attention module, and caches.

Letters of shapes: `*batch` any number of batch axes, T query length, S key/value length, N query
heads, K key/value heads (N is a multiple of K), H head dim of query and key, V head dim of value,
F features.
"""

try:
    from pallas_flash.flax._cache import KVCache
    from pallas_flash.flax._drop_in import attention_fn
    from pallas_flash.flax._layer import SelfAttention
    from pallas_flash.flax._paged_cache import PagedKVCache
    from pallas_flash.flax._rope import apply_rope
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ModuleNotFoundError(
        "`pallas_flash.flax` needs the package flax: run pip install 'pallas-flash[flax]', or "
        "pip install '.[flax]' in a checkout.",
        name="flax",
    ) from None

__all__ = ["KVCache", "PagedKVCache", "SelfAttention", "apply_rope", "attention_fn"]
