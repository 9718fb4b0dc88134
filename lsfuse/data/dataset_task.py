"""Tasks on data sets that `experiments.build_dataset` made: prompts and answers, retrieval, GSM8K, groups."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lsfuse.data.datasets import Source, load
from lsfuse.data.groups import DatasetGroups
from lsfuse.data.gsm8k import Gsm8kTask
from lsfuse.data.retrieval import RetrievalTask
from lsfuse.data.task import Tokenizer, check_index, check_split
from lsfuse.rl.rewards import Reward, exact_match, graded_numeric_reward, numeric_reward, token_match

REWARDS: dict[str, Reward] = {
    "exact_match": exact_match,
    "token_match": token_match,
    "numeric": numeric_reward,
    "graded_numeric": graded_numeric_reward,
}
HELD_OUT = ("eval", "test", "validation")


class DatasetTask:
    """Prompts and answers of a data set; a record may have "prompt_ids", else "prompt" is tokenised.

    Args:
        train, held_out: from `lsfuse.data.load`.
        tokenizer: of the model.
        reward: (example, completion) -> float.
        max_prompt_length: tokens; None: no limit.

    Raises:
        ValueError: naming file and record: a prompt that is empty or too long. All are read and tokenised for it.
    """

    stop_strings: tuple[str, ...] = ()

    def __init__(
        self,
        train: Source,
        held_out: Source,
        tokenizer: Tokenizer,
        reward: Reward = exact_match,
        *,
        max_prompt_length: int | None = None,
    ):
        self.tokenizer, self._reward = tokenizer, reward
        self._sources = {"train": train, "eval": held_out}
        for split, source in self._sources.items():
            for i in range(len(source)):
                length = len(self.example(split, i)["prompt_ids"])
                if length == 0:
                    raise ValueError(f"{source.where(i)}: the prompt is empty")
                if max_prompt_length is not None and length > max_prompt_length:
                    raise ValueError(
                        f"{source.where(i)}: the prompt has {length} tokens, but max_prompt is {max_prompt_length};"
                        " raise it, or build the data set without it"
                    )

    @property
    def sha256(self) -> dict[str, str]:
        """Of the records of both splits; a run is not resumed with others."""
        return {split: source.sha256 for split, source in self._sources.items()}

    def size(self, split: str) -> int:
        check_split(split)
        return len(self._sources[split])

    def example(self, split: str, index: int) -> dict[str, Any]:
        check_split(split)
        check_index(index, self.size(split))
        record = self._sources[split][index]
        ids = record.get("prompt_ids")
        if ids is None:
            ids = self.tokenizer.encode(record["prompt"])
        return {"target": record["answer"], **record, "prompt_ids": np.array(ids, np.int32)}

    def reward(self, example: Mapping[str, Any], completion: str) -> float:
        return self._reward(example, completion)

    def metrics(self, example: Mapping[str, Any], completion: str) -> dict[str, float]:
        return {"exact": exact_match(example, completion)}


def open_dataset(
    name: str,
    data_dir: str | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    train_split: str = "train",
    eval_split: str | None = None,
    reward: str = "auto",
    max_prompt: int | None = None,
    max_response: int | None = None,
    append_stop: bool = False,
    **gsm8k: Any,
) -> DatasetTask | Gsm8kTask | DatasetGroups:
    """The task of a built data set, or its groups.

    Args:
        name, data_dir: as for `load`.
        tokenizer: of the model; retrieval has its own.
        eval_split: None: "eval", "test" or "validation", whichever there is; groups have none.
        reward: a key of `REWARDS`; auto: token_match for retrieval, exact_match for prompts. GSM8K has its own.
        append_stop: of groups given as text.
        gsm8k: further arguments of `Gsm8kTask`.

    Raises: ValueError, FileNotFoundError: as `load`, and for a record that is not right, naming it.
    """
    train = load(name, train_split, data_dir)
    kind = name.partition("/")[0]
    if kind == "groups":
        return DatasetGroups(
            train, tokenizer, append_stop=append_stop, max_prompt=max_prompt, max_response=max_response
        )
    if eval_split is None:
        there = load(name, None, data_dir)
        found = [split for split in HELD_OUT if split in there]
        if not found:
            raise ValueError(
                f'data set "{name}" has no split {", ".join(HELD_OUT)} to evaluate on, only {", ".join(there)}; give'
                ' one (eval_split="train[90%:]" beside train_split="train[:90%]")'
            )
        eval_split = found[0]
    held_out = load(name, eval_split, data_dir)
    rule = RetrievalTask(**train.metadata["retrieval"]) if kind == "retrieval" else None
    if rule is not None:
        tokenizer = rule.tokenizer
    if tokenizer is None:
        raise ValueError(f'data set "{name}" is text and needs a tokenizer: set config.model.path to a checkpoint')
    if kind == "gsm8k":
        return Gsm8kTask(train, held_out, tokenizer, max_prompt_length=max_prompt, **gsm8k)
    for source in (train, held_out):
        if missing := {"prompt", "answer"} - source[0].keys():
            has = ", ".join(source[0])
            raise ValueError(f"{source} has no {sorted(missing)[0]!r}, only {has}; build it as prompts/NAME")
    chosen = ("token_match" if rule is not None else "exact_match") if reward == "auto" else reward
    return DatasetTask(train, held_out, tokenizer, REWARDS[chosen], max_prompt_length=max_prompt)
