"""Tasks, tokenizers, data sets and groups sampled elsewhere."""

from lsfuse.data.batching import Group, check_group, make_batch
from lsfuse.data.dataset_task import REWARDS, DatasetTask, open_dataset
from lsfuse.data.datasets import Source, load, ordered
from lsfuse.data.groups import DatasetGroups, Groups, JsonlGroups
from lsfuse.data.gsm8k import Gsm8kTask
from lsfuse.data.harness import harness_model
from lsfuse.data.order import counter_rng, indices
from lsfuse.data.reasoning import ReasoningGymTask
from lsfuse.data.retrieval import RetrievalTask
from lsfuse.data.sentences import sentence_tokenizer, sentences
from lsfuse.data.symbols import SymbolTokenizer
from lsfuse.data.task import Task, Tokenizer, cut_completion, sft_group

__all__ = [
    "REWARDS",
    "DatasetGroups",
    "DatasetTask",
    "Group",
    "Gsm8kTask",
    "Groups",
    "JsonlGroups",
    "ReasoningGymTask",
    "RetrievalTask",
    "Source",
    "SymbolTokenizer",
    "Task",
    "Tokenizer",
    "check_group",
    "counter_rng",
    "cut_completion",
    "harness_model",
    "indices",
    "load",
    "make_batch",
    "open_dataset",
    "ordered",
    "sentence_tokenizer",
    "sentences",
    "sft_group",
]
