"""Tasks, tokenizers and groups sampled elsewhere."""

from lsfuse.data.batching import Group, check_group, make_batch
from lsfuse.data.groups import JsonlGroups
from lsfuse.data.gsm8k import Gsm8kTask
from lsfuse.data.harness import harness_model
from lsfuse.data.order import counter_rng, indices
from lsfuse.data.retrieval import RetrievalTask
from lsfuse.data.symbols import SymbolTokenizer
from lsfuse.data.task import Task, Tokenizer, cut_completion, sft_group

__all__ = [
    "Group",
    "Gsm8kTask",
    "JsonlGroups",
    "RetrievalTask",
    "SymbolTokenizer",
    "Task",
    "Tokenizer",
    "check_group",
    "counter_rng",
    "cut_completion",
    "harness_model",
    "indices",
    "make_batch",
    "sft_group",
]
