"""K/V caches of Hugging Face models in tqkvd.

    import tqkv, tqkv.hf

    with tqkv.Client("unix:/tmp/tqkvd.sock") as client, client.open("chat") as session:
        model.set_attn_implementation("tqkv")
        ids = model.generate(**inputs, cache=tqkv.hf.TqkvCache(session))

The model is not changed: importing this module registers the attention function "tqkv", and TqkvCache stands where a
DynamicCache would. Without a TqkvCache the function computes what "sdpa" computes. Needs torch and transformers 5.20 or
later (tested with 5.24; where generate() does not know `cache` yet, its name is `past_key_values`): pip install 'tqkv[hf]'.
"""

try:
    import torch  # noqa: F401
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as error:
    raise ImportError("tqkv.hf needs torch and transformers: pip install 'tqkv[hf]'") from error

from .attention import attention, attention_mask
from .cache import TqkvCache, pool_description

__all__ = ["TqkvCache", "attention", "attention_mask", "pool_description"]

AttentionInterface.register("tqkv", attention)
AttentionMaskInterface.register("tqkv", attention_mask)
