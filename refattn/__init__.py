"""refattn: the golden reference for attention, an executable, numbered specification on the Python Array API."""

from __future__ import annotations

from . import biases, cost, errors, masks
from .cached import attend
from .clauses import CHAPTERS, CLAUSES, Clause, clause
from .contiguous import KVCache
from .goldens import Golden, golden
from .gradients import Gradients, attention_vjp
from .heads import kv_head_of, merge_heads, pool_kv_heads, split_heads
from .layer import AttentionWeights, LayerResult, multi_head_attention
from .paged import PagedKVCache
from .partials import Partial, merge
from .pipeline import Stages, attention, attention_stages, attention_with_lse
from .registry import backends
from .rolling import RollingKVCache
from .rotary import Rotary, rope

__version__ = "0.1.0"

__all__ = [
    "CHAPTERS",
    "CLAUSES",
    "AttentionWeights",
    "Clause",
    "Golden",
    "Gradients",
    "KVCache",
    "LayerResult",
    "PagedKVCache",
    "Partial",
    "RollingKVCache",
    "Rotary",
    "Stages",
    "attend",
    "attention",
    "attention_stages",
    "attention_vjp",
    "attention_with_lse",
    "backends",
    "biases",
    "clause",
    "cost",
    "errors",
    "golden",
    "kv_head_of",
    "masks",
    "merge",
    "merge_heads",
    "multi_head_attention",
    "pool_kv_heads",
    "rope",
    "split_heads",
]
