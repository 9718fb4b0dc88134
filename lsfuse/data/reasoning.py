"""Tasks of reasoning-gym (Stojanovski et al., arXiv 2505.24760): generated problems, each with a scorer of its own."""

import difflib
from collections.abc import Mapping
from typing import Any

import numpy as np

from lsfuse.data.datasets import extra
from lsfuse.data.task import Tokenizer, check_index, check_split


class ReasoningGymTask:
    """Problem i of a split is a function of the arguments here, of the split and of i.

    Args:
        dataset: a name of reasoning-gym's, "chain_sum".
        tokenizer: of the model; with a chat template, the question is a user's turn, else "Question: …\\nAnswer:".
        train_size, eval_size: problems. The held-out ones follow the others, with seeds of their own; where the space
            of problems is small, a question may still occur in both.
        seed: of the problems.
        options: the generator's own settings ({"min_terms": 2}).

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: an unknown dataset (the nearest is in the message), or settings that it does not take.
    """

    def __init__(
        self,
        dataset: str,
        tokenizer: Tokenizer,
        train_size: int = 1000,
        eval_size: int = 100,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
    ):
        gym = extra("reasoning_gym", "reasoning")
        known = sorted(gym.factory.DATASETS)
        if dataset not in known:
            near = difflib.get_close_matches(dataset, known, 3, 0.5)
            hint = f"did you mean {', '.join(near)}?" if near else f"there are {len(known)}, such as {known[0]}"
            raise ValueError(f'reasoning-gym has no dataset "{dataset}"; {hint}')
        self.tokenizer = tokenizer
        self.sizes = {"train": train_size, "eval": eval_size}
        try:
            self._problems = gym.create_dataset(dataset, seed=seed, size=train_size + eval_size, **(options or {}))
        except (TypeError, AssertionError, ValueError) as error:
            raise ValueError(f'reasoning-gym "{dataset}" does not take {dict(options or {})}: {error}') from None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return () if hasattr(self.tokenizer, "apply_chat_template") else ("\n\n", "Question:")

    def size(self, split: str) -> int:
        check_split(split)
        return self.sizes[split]

    def example(self, split: str, index: int) -> dict[str, Any]:
        check_index(index, self.size(split))
        entry = self._problems[index + (self.sizes["train"] if split == "eval" else 0)]
        chat = hasattr(self.tokenizer, "apply_chat_template")
        text = f"Question: {entry['question']}\nAnswer:"
        if chat:
            turn = [{"role": "user", "content": entry["question"]}]
            text = self.tokenizer.apply_chat_template(turn, add_generation_prompt=True)  # type: ignore[attr-defined]
        answer = str(entry["answer"])
        return {
            "prompt_ids": np.array(self.tokenizer.encode(text), np.int32),
            "prompt": text,
            "answer": answer,
            "target": answer if chat else f" {answer}",
            "entry": entry,
        }

    def reward(self, example: Mapping[str, Any], completion: str) -> float:
        """reasoning-gym's score, in [0, 1], of what stands between the last <answer> tags; of everything without."""
        gym = extra("reasoning_gym", "reasoning")
        answer = gym.utils.extract_answer(completion)
        return float(self._problems.score_answer(completion.strip() if answer is None else answer, example["entry"]))
