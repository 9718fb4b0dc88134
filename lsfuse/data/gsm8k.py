"""GSM8K (Cobbe et al., arXiv 2110.14168): grade-school word problems from jsonl, few-shot, with a numeric reward."""

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lsfuse.data.datasets import Source
from lsfuse.data.jsonl import read_jsonl
from lsfuse.data.task import Tokenizer, check_index, check_split
from lsfuse.files import sha256_of
from lsfuse.rl.rewards import Reward, extract_number, graded_numeric_reward, numeric_reward

PROMPT_STYLES = ("plain", "chat")
LONG_PROMPTS = ("error", "drop")


class Gsm8kTask:
    """Problems with fields "question" and "answer" ("reasoning\\n#### number"), one JSON object a line.

    Args:
        train_path, eval_path: the two files, or splits of the data set that was built of them.
        tokenizer: of the model; with `prompt_style="chat"` it needs `apply_chat_template`.
        num_shots: solved problems before the question, from the train file, the same for all prompts (8 are about 1,000
            tokens). They are left out of the training problems.
        shots: lines of the train file (from 0) to use as shots; None: the first `num_shots` problems.
        prompt_style: "plain": "Question: …\\nAnswer: …" and blank lines; a response ends before the next blank line.
            "chat": the shots are earlier turns of a conversation in the tokenizer's chat template.
        max_prompt_length: tokens; None: no limit.
        long_prompts: what to do with longer ones: "error" or "drop" the problem.
        reward: `(example, completion) -> float`; default graded for answer, format and nearness, so that groups of a
            weak model have spread.

    Raises:
        FileNotFoundError, ValueError: naming file, line and field, before any work.
    """

    def __init__(
        self,
        train_path: str | pathlib.Path | Source,
        eval_path: str | pathlib.Path | Source,
        tokenizer: Tokenizer,
        num_shots: int = 8,
        *,
        shots: Sequence[int] | None = None,
        prompt_style: str = "plain",
        max_prompt_length: int | None = None,
        long_prompts: str = "error",
        reward: Reward = graded_numeric_reward,
    ):
        for field, value, valid in (
            ("prompt_style", prompt_style, PROMPT_STYLES),
            ("long_prompts", long_prompts, LONG_PROMPTS),
        ):
            if value not in valid:
                raise ValueError(f"Gsm8kTask: {field} {value!r} is unknown; valid: {', '.join(valid)}")
        if prompt_style == "chat" and not hasattr(tokenizer, "apply_chat_template"):
            raise ValueError("Gsm8kTask: prompt_style 'chat' needs a tokenizer with apply_chat_template")
        self.tokenizer, self.prompt_style, self._reward = tokenizer, prompt_style, reward
        train = _read(train_path)
        self._given = {"train": train_path, "eval": eval_path}
        chosen = list(range(num_shots)) if shots is None else [int(i) for i in shots]
        if len(set(chosen)) != num_shots or any(not 0 <= i < len(train) for i in chosen):
            raise ValueError(
                f"Gsm8kTask: {num_shots} shots need as many distinct lines of {train_path}, which has {len(train)}"
                f" problems; got {chosen}"
            )
        self._shots = [train[i] for i in chosen]
        problems = {"train": [p for i, p in enumerate(train) if i not in set(chosen)], "eval": _read(eval_path)}
        self._problems = {k: self._check_lengths(v, max_prompt_length, long_prompts) for k, v in problems.items()}
        for split, path in (("train", train_path), ("eval", eval_path)):
            if not self._problems[split]:
                raise ValueError(f"Gsm8kTask: no problem of {path} is left for the {split} split")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return ("\n\n", "Question:") if self.prompt_style == "plain" else ()

    @property
    def sha256(self) -> dict[str, str]:
        """Of both files, or of the records; a run is not resumed with others."""
        return {k: v.sha256 if isinstance(v, Source) else sha256_of(v) for k, v in self._given.items()}

    def size(self, split: str) -> int:
        check_split(split)
        return len(self._problems[split])

    def reward(self, example: Mapping[str, Any], completion: str) -> float:
        return self._reward(example, completion)

    def metrics(self, example: Mapping[str, Any], completion: str) -> dict[str, float]:
        return {"accuracy": numeric_reward(example, completion), "has_answer": float("####" in completion)}

    def prompt(self, question: str) -> str:
        """The text before the answer to `question`, shots included."""
        if self.prompt_style == "plain":
            solved = "".join(f"Question: {shot['question']}\nAnswer: {shot['answer']}\n\n" for shot in self._shots)
            return f"{solved}Question: {question}\nAnswer:"
        messages = []
        for shot in self._shots:
            messages.append({"role": "user", "content": shot["question"]})
            messages.append({"role": "assistant", "content": shot["answer"]})
        return self.tokenizer.apply_chat_template(  # type: ignore[attr-defined]
            [*messages, {"role": "user", "content": question}], add_generation_prompt=True
        )

    def example(self, split: str, index: int) -> dict[str, Any]:
        check_split(split)
        check_index(index, self.size(split))
        problem = self._problems[split][index]
        text = self.prompt(problem["question"])
        target = problem["answer"] if self.prompt_style == "chat" else " " + problem["answer"]
        return {
            "prompt_ids": np.array(self.tokenizer.encode(text), np.int32),
            "prompt": text,
            "question": problem["question"],
            "answer": problem["answer"],
            "target": target,
        }

    def _check_lengths(self, problems: list[dict[str, str]], limit: int | None, long_prompts: str) -> list:
        """`problems` whose prompts are within the limit. Only prompts that may come near it are tokenised."""
        if limit is None:
            return problems
        shared = len(self.tokenizer.encode(self.prompt("")))
        kept, longest, number = [], ("", 0), 0
        for problem in problems:
            question = problem["question"]
            # A token is a byte or more; the 16 are for tokens that join differently at the seams.
            length = shared + len(question.encode()) + 16
            if length > limit:
                length = shared + len(self.tokenizer.encode(question)) + 16
            if length > limit:
                length = len(self.tokenizer.encode(self.prompt(question)))
            if length <= limit:
                kept.append(problem)
                continue
            number += 1
            longest = max(longest, (problem["where"], length), key=lambda item: item[1])
        if number and long_prompts == "error":
            raise ValueError(
                f"{longest[0]}: the prompt has {longest[1]} tokens (about {shared} of them shared by all), more than"
                f" max_prompt_length {limit}, and so have {number - 1} others; raise it, take fewer shots, or set"
                " long_prompts='drop'"
            )
        return kept


def check_problem(where: str, row: Mapping[str, Any]) -> dict[str, str]:
    """A line's question, its answer without calculator annotations, and `where`.

    Raises: ValueError, starting with `where`, for a field that is missing or not right.
    """
    for field in ("question", "answer"):
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise ValueError(f"{where}: field {field!r} must be a text that is not empty, got {row.get(field)!r}")
    answer = re.sub(r"<<[^<>]*>>", "", row["answer"]).strip()  # calculator annotations
    if "####" not in answer or extract_number(answer) is None:
        raise ValueError(f"{where}: field 'answer' must end in '#### number', got {answer[-40:]!r}")
    return {"question": row["question"].strip(), "answer": answer, "where": where}


def _read(given: str | pathlib.Path | Source) -> list[dict[str, str]]:
    rows = given.rows() if isinstance(given, Source) else read_jsonl(given)
    problems = [check_problem(where, row) for where, row in rows]
    if not problems:
        raise ValueError(f"{given} holds no problems")
    return problems
