"""Client of tqkvd, the daemon that keeps K/V caches of token sequences in compressed pages.

    import numpy as np, tqkv
    with tqkv.Client("unix:/tmp/tqkv.sock") as client, client.open("demo") as session:
        session.append(1, layer=0, k=k, v=v)          # [tokens, kv_heads, head_dim]
        out = session.decode(1, layer=0, q=q)         # [q_heads, head_dim]

tqkv.codec packs and unpacks rows in this process; append(.., packed=True) sends rows that it packed.

Threads: a Client, its Sessions and its Pipelines belong to one thread at a time; different clients are independent.
Errors are TqkvError. Every call ends by its deadline.
"""

from . import codec, http, safetensors
from .client import Client, PoolInfo, ReconnectReport, ServerInfo
from .dtypes import from_bf16, to_bf16
from .errors import ArgumentError, ArgumentTypeError, ItemResult, Status, TqkvError
from .merging import merge
from .pipeline import Future, Pipeline
from .session import Geometry, Sequence, Session

__version__ = "0.1.0"
__all__ = ["ArgumentError", "ArgumentTypeError", "Client", "Future", "Geometry", "ItemResult", "Pipeline", "PoolInfo",
           "ReconnectReport", "Sequence", "ServerInfo", "Session", "Status", "TqkvError", "codec", "from_bf16",
           "http", "merge", "safetensors", "to_bf16"]
