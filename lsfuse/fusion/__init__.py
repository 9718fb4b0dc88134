"""FFN fusion: where FFNs are independent, transforms of weight trees, and what they cost.

    texts = fusion.windows(text, tokenizer, 512)
    scores = fusion.removal_scores(config, params, texts)           # which attentions matter least
    surgery = fusion.chain(fusion.remove_attention(range(6, 10)), fusion.fuse_ffn([(6, 8)]))
    child = surgery(config, params)
    fusion.evaluate(child, texts, parent=(config, params))          # perplexity, KL, agreement
"""

from lsfuse.fusion.analysis import (
    Dependency,
    cosine_distance,
    dependency,
    ffn_importance,
)
from lsfuse.fusion.costs import choice_costs, decode_seconds, measured_seconds
from lsfuse.fusion.describe import check_tensor_parallel, dry_run, place
from lsfuse.fusion.evaluate import evaluate, greedy_agreement
from lsfuse.fusion.fuse import fuse_ffn, reverse, wide_ffn
from lsfuse.fusion.parallel import parallel_blocks, parallel_parts
from lsfuse.fusion.planner import (
    Choice,
    Infeasible,
    apply_plan,
    attention_free_runs,
    block_windows,
    cheapest_run,
    fusion_spans,
    shortlist,
    solve,
)
from lsfuse.fusion.quantize import quantize
from lsfuse.fusion.results import load_dependency, plot_dependency, save_dependency
from lsfuse.fusion.scores import plan_scores, removal_scores, replacement_scores
from lsfuse.fusion.store import fingerprint
from lsfuse.fusion.surgery import (
    chain,
    cut,
    linear_attention,
    prune_ffn,
    reduce_kv_heads,
    remove_attention,
    remove_blocks,
    remove_ffn,
    replace_spans,
)
from lsfuse.fusion.texts import Texts, from_lists, windows
from lsfuse.fusion.tree import Transform, block_sources

__all__ = [
    "Choice",
    "Dependency",
    "Infeasible",
    "Texts",
    "Transform",
    "apply_plan",
    "attention_free_runs",
    "block_sources",
    "block_windows",
    "chain",
    "cheapest_run",
    "check_tensor_parallel",
    "choice_costs",
    "cosine_distance",
    "cut",
    "decode_seconds",
    "dependency",
    "dry_run",
    "evaluate",
    "ffn_importance",
    "fingerprint",
    "from_lists",
    "fuse_ffn",
    "fusion_spans",
    "greedy_agreement",
    "linear_attention",
    "load_dependency",
    "measured_seconds",
    "parallel_blocks",
    "parallel_parts",
    "place",
    "plan_scores",
    "plot_dependency",
    "prune_ffn",
    "quantize",
    "reduce_kv_heads",
    "remove_attention",
    "remove_blocks",
    "remove_ffn",
    "removal_scores",
    "replace_spans",
    "replacement_scores",
    "reverse",
    "save_dependency",
    "shortlist",
    "solve",
    "wide_ffn",
    "windows",
]
