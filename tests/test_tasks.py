"""Tasks: determinism, disjoint splits, rewards by rule, files that are not right."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from helpers import Bytes

from lsfuse.data import (
    Gsm8kTask,
    JsonlGroups,
    RetrievalTask,
    SymbolTokenizer,
    Task,
    Tokenizer,
    cut_completion,
    make_batch,
    sft_group,
)
from lsfuse.rl import exact_match

DATA = pathlib.Path(__file__).parent / "data"
SMALL = RetrievalTask(prompt_length=60, num_pairs=4, num_keys=6, num_values=16)


class ChatBytes(Bytes):
    def apply_chat_template(self, messages, add_generation_prompt=True):
        turns = "".join(f"[{m['role']}]{m['content']}" for m in messages)
        return turns + "[assistant]" * add_generation_prompt


def test_the_protocols_hold():
    assert isinstance(SMALL, Task) and isinstance(SMALL.tokenizer, Tokenizer) and isinstance(Bytes(), Tokenizer)


# --- retrieval --------------------------------------------------------------------------------------------------------


def answer_by_reading(prompt: str) -> str:
    """The rule, on the text alone: the words between the asked key and the next "."."""
    words = prompt.split()
    assert words[-2] == "?"
    after = words[words.index(words[-1]) + 1 :]
    return " ".join(after[: after.index(".")])


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_answer_is_in_the_prompt(split):
    for index in range(50):
        example = SMALL.example(split, index)
        assert len(example["prompt_ids"]) == 60 and example["prompt_ids"].dtype == np.int32
        assert example["answer"] == answer_by_reading(example["prompt"])
        assert SMALL.reward(example, example["answer"]) == 1.0
        assert SMALL.tokenizer.encode("<s> " + example["prompt"]) == example["prompt_ids"].tolist()
        words = example["prompt"].split()
        values = [w for w in words if w[0] == "v"]
        assert len(values) == len(set(values)) == 12
        assert words.count(".") == 4


def test_examples_are_a_function_of_seed_split_and_index():
    again = dataclasses.replace(SMALL)
    np.testing.assert_array_equal(SMALL.example("train", 7)["prompt_ids"], again.example("train", 7)["prompt_ids"])
    variants = [SMALL.example("train", 7), SMALL.example("train", 8), SMALL.example("eval", 7)]
    variants.append(dataclasses.replace(SMALL, seed=1).example("train", 7))
    assert len({tuple(v["prompt_ids"]) for v in variants}) == 4
    assert hash(SMALL) == hash(again)


def test_no_pair_is_asked_for_in_both_splits():
    task = RetrievalTask(prompt_length=16, num_pairs=2, num_keys=3, num_values=8, answer_length=2)
    asked = {
        split: {(e["prompt"].split()[-1], e["answer"]) for e in (task.example(split, i) for i in range(800))}
        for split in ("train", "eval")
    }
    assert asked["train"].isdisjoint(asked["eval"])
    assert len(asked["train"]) > 100 and len(asked["eval"]) > 10
    queried = set()
    for i in range(300):
        words = task.tokenizer.decode(task.supervised("train", i).completion_ids[0].tolist()).split(" ? ")
        queried |= {(w.split()[0], " ".join(w.split()[1:-1])) for w in words[1:]}
    assert queried and queried.isdisjoint(asked["eval"])


def test_ragged_prompts():
    task = dataclasses.replace(SMALL, min_prompt_length=30)
    lengths = [len(task.example("train", i)["prompt_ids"]) for i in range(200)]
    assert min(lengths) >= 30 and max(lengths) <= 60 and len(set(lengths)) > 20


def test_supervised_target_asks_about_several_pairs_and_masks_the_questions():
    group = SMALL.supervised("train", 3)
    example = SMALL.example("train", 3)
    np.testing.assert_array_equal(group.prompt_ids, example["prompt_ids"])
    ids, mask = group.completion_ids[0], group.completion_masks[0]
    assert len(ids) <= SMALL.max_supervised_length()
    text = example["prompt"] + " " + SMALL.tokenizer.decode(ids.tolist())
    for question in text.split(" ? ")[1:]:
        key, *answer = question.split()
        assert answer == [*answer_by_reading(f"{example['prompt'].split(' ? ')[0]} ? {key}").split(), "."]
    words = SMALL.tokenizer.decode(ids.tolist()).split()
    assert [w[0] in "v." for w in words] == mask.astype(bool).tolist()
    one = sft_group(dataclasses.replace(SMALL, num_queries=1), "train", 3)
    np.testing.assert_array_equal(one.completion_ids[0], ids[:4])
    assert one.completion_masks[0].all()


def test_a_shorter_task_holds_the_pairs_that_fit():
    task = RetrievalTask()
    assert [task.at_length(n).num_pairs for n in (8, 16, 20, 32, 512)] == [1, 2, 3, 4, 4]
    assert task.at_length(16).tokenizer.symbols == task.tokenizer.symbols
    assert len(task.at_length(16).example("train", 0)["prompt_ids"]) == 16


def test_values_that_repeat():
    task = RetrievalTask(prompt_length=300, num_pairs=20, num_keys=20, num_values=8, distinct_values=False)
    example = task.example("eval", 0)
    assert example["answer"] == answer_by_reading(example["prompt"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_keys": 3}, "num_pairs 4 needs as many distinct keys, but num_keys is 3"),
        ({"num_values": 11}, "need num_values ≥ 12, got 11"),
        ({"prompt_length": 22}, "22 to 22 tokens; the shortest must hold the 23 tokens"),
        ({"min_prompt_length": 600}, "600 to 512"),
        ({"num_fillers": 0}, "num_fillers must be at least 1"),
        ({"num_pairs": 2.0}, "num_pairs must be at least 1, a whole number, got 2.0"),
        ({"seed": True}, "seed must be at least 0, a whole number, got True"),
        ({"num_queries": 0}, "num_queries must be None or a whole number of at least 1, got 0"),
        ({"distinct_values": 1}, "distinct_values must be True or False, got 1"),
        ({"score": 3}, "score must be a function"),
        ({"num_pairs": 1, "answer_length": 1, "num_keys": 2, "num_values": 5}, "fewer than 64"),
    ],
)
def test_impossible_retrieval_tasks_raise(changes, message):
    with pytest.raises(ValueError, match=message):
        RetrievalTask(**changes)


def test_split_and_index_are_checked():
    with pytest.raises(ValueError, match="'test'.*train, eval"):
        SMALL.example("test", 0)
    with pytest.raises(IndexError, match="-1"):
        SMALL.example("train", -1)


def test_symbols():
    tokenizer = SymbolTokenizer(["_", "a", ".", "b"], "_", ".", hidden=["_"])
    assert tokenizer.encode("a b .") == [1, 3, 2] and tokenizer.decode([0, 1, 3, 0]) == "a b"
    with pytest.raises(ValueError, match="'c'"):
        tokenizer.encode("a c")
    assert tokenizer.decode([1, 4]) == "a <4>"  # of a padded vocabulary
    with pytest.raises(ValueError, match="distinct"):
        SymbolTokenizer(["a", "a"], "a", "a")


# --- where a response ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stop", "length", "kept"),
    [
        ("12\n\nmore", None, 4, "12"),
        ("12", None, 2, "12"),
        ("12", 2, 3, "12"),  # a stop id behind it
        ("12\n\nmore", 8, 4, "12"),  # the string comes first
        ("1\n\n", 1, 2, "1"),  # the id comes first
        ("Q: Question: 5", None, 12, "Q: "),
        ("", None, 0, ""),
    ],
)
def test_cut_completion(text, stop, length, kept):
    ids = Bytes().encode(text)
    if stop is not None:
        ids.insert(stop, 256)
    strings = ("\n\n", "Question:")
    assert cut_completion(Bytes(), ids, None, strings) == (length, kept)
    padded = np.array([*ids, 50, 10, 10], np.int32)
    assert cut_completion(Bytes(), padded, len(ids), strings) == (length, kept)


# --- GSM8K ------------------------------------------------------------------------------------------------------------


def gsm8k(tokenizer=None, num_shots=1, **changes):
    files = {"train_path": DATA / "problems_train.jsonl", "eval_path": DATA / "problems_eval.jsonl"}
    return Gsm8kTask(**(files | changes), tokenizer=tokenizer or Bytes(), num_shots=num_shots)


def test_few_shot_prompt():
    task = gsm8k()
    assert isinstance(task, Task)
    assert (task.size("train"), task.size("eval")) == (2, 2)
    example = task.example("eval", 0)
    assert example["prompt"] == (
        "Question: A shelf holds 4 boxes with 6 pens each. How many pens are on the shelf?\n"
        "Answer: There are 4 * 6 = 24 pens on the shelf.\n#### 24\n\n"
        "Question: A ticket costs $7. What do 3 tickets cost?\nAnswer:"
    )
    assert Bytes().decode(example["prompt_ids"]) == example["prompt"]
    assert task.example("train", 0)["question"].startswith("Mira")  # the shot is no training problem
    assert task.reward(example, " 3 * 7 = 21\n#### 21") == 1.0
    assert task.reward(example, " 3 * 7 = 21") > task.reward(example, "22") > task.reward(example, "?") == 0.0
    assert task.metrics(example, "21") == {"accuracy": 1.0, "has_answer": 0.0}
    group = sft_group(task, "eval", 0)
    assert Bytes().decode(group.completion_ids[0]) == " 3 tickets cost 3 * 7 = $21.\n#### 21"
    assert group.completion_ids[0][-1] == 256


def test_no_shots_chosen_shots_and_own_reward():
    assert gsm8k(num_shots=0).example("train", 0)["prompt"].startswith("Question: A shelf")
    task = gsm8k(num_shots=2, shots=[2, 0], reward=exact_match)
    assert task.prompt("Why?").startswith("Question: A tank") and task.size("train") == 1
    assert task.reward({"answer": "a b"}, "a  b") == 1.0


def test_chat_style():
    task = gsm8k(ChatBytes(), prompt_style="chat")
    assert task.prompt("Why?") == (
        "[user]A shelf holds 4 boxes with 6 pens each. How many pens are on the shelf?"
        "[assistant]There are 4 * 6 = 24 pens on the shelf.\n#### 24[user]Why?[assistant]"
    )
    assert task.stop_strings == ()
    with pytest.raises(ValueError, match="apply_chat_template"):
        gsm8k(prompt_style="chat")


def test_long_prompts():
    lengths = [len(gsm8k().example(split, i)["prompt_ids"]) for split in ("train", "eval") for i in range(2)]
    assert gsm8k(max_prompt_length=max(lengths)).size("train") == 2
    with pytest.raises(ValueError, match=f"line 3: the prompt has {max(lengths)} tokens.*{max(lengths) - 1}"):
        gsm8k(max_prompt_length=max(lengths) - 1)
    assert gsm8k(max_prompt_length=max(lengths) - 1, long_prompts="drop").size("train") == 1
    with pytest.raises(ValueError, match="no problem"):
        gsm8k(max_prompt_length=10, long_prompts="drop")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "q", "answer": "#### 1"', "line 2: not JSON.*cut short"),
        ('{"question": "q"}', "line 2: field 'answer'"),
        ('{"question": 3, "answer": "#### 1"}', "line 2: field 'question'.*got 3"),
        ('{"question": "q", "answer": "1"}', "line 2: field 'answer' must end in '#### number'"),
        ("[1]", "line 2: expected a JSON object, got list"),
    ],
)
def test_bad_problem_files(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "q", "answer": "#### 1"}\n' + line)
    with pytest.raises(ValueError, match=message):
        gsm8k(eval_path=path)


def test_bad_gsm8k_settings(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing.jsonl"):
        gsm8k(train_path=tmp_path / "nothing.jsonl")
    with pytest.raises(ValueError, match="4 shots.*3 problems"):
        gsm8k(num_shots=4)
    with pytest.raises(ValueError, match="no problem of .* is left for the train split"):
        gsm8k(num_shots=3)
    with pytest.raises(ValueError, match="plain, chat"):
        gsm8k(prompt_style="few")
    with pytest.raises(ValueError, match="error, drop"):
        gsm8k(long_prompts="cut")


# --- groups from elsewhere --------------------------------------------------------------------------------------------

LINE = {"prompt_ids": [3, 4], "response_ids": [[5], [6, 7]], "rewards": [1.0, 0.0]}


def write(tmp_path, *rows, end="\n"):
    path = tmp_path / "groups.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + end)
    return path


def test_groups_of_ids(tmp_path):
    full = LINE | {"masks": [[1], [1, 0]], "old_logps": [[-1], [-0.5, None]], "ref_logps": [[-1], [-2, float("nan")]]}
    groups = JsonlGroups(write(tmp_path, full, "", LINE), vocab_size=8)
    assert len(groups) == 2 and groups.largest == (2, 2, 2) and len(groups[:5]) == 2
    batch = make_batch([groups[0]], max_prompt=2, max_response=2, num_groups=1, num_branches=2)
    np.testing.assert_array_equal(batch.completion_ids[0], [[5, 0], [6, 7]])
    np.testing.assert_array_equal(batch.completion_mask[0], [[1, 0], [1, 0]])
    np.testing.assert_array_equal(batch.old_per_token_logps[0], [[-1, 0], [-0.5, np.nan]])
    np.testing.assert_array_equal(batch.rewards, [[1, 0]])
    assert groups[1].name.endswith("line 3") and groups[-1].old_per_token_logps is None
    with pytest.raises(IndexError):
        groups[2]


def test_groups_of_text(tmp_path):
    path = write(tmp_path, {"prompts": ["ab", "ab"], "responses": ["c", ""], "rewards": [1, 0]})
    group = JsonlGroups(path, Bytes(), append_stop=True)[0]
    assert group.prompt_ids.tolist() == [97, 98]
    assert [ids.tolist() for ids in group.completion_ids] == [[99, 256], [256]]
    assert JsonlGroups(path, Bytes())[0].completion_ids[1].tolist() == []
    with pytest.raises(ValueError, match="'responses' is text.*no tokenizer"):
        JsonlGroups(path)
    with pytest.raises(ValueError, match="append_stop"):
        JsonlGroups(path, append_stop=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": [[3, 4], [3, 5]], "prompt_ids": None}, "field 'prompts': row 1 differs from row 0"),
        ({"prompts": [[3, 4]], "prompt_ids": None}, "'prompts' has 1 prompts for 2 responses"),
        ({"prompt": "ab"}, "give one of prompt, prompt_ids or prompts; got prompt, prompt_ids"),
        ({"prompt_ids": None}, "got none"),
        ({"prompt_ids": None, "prompt": [3]}, "'prompt' must be a text"),
        ({"rewards": [1.0, float("nan")]}, "branch 1: rewards must be finite, got nan"),
        ({"rewards": [1.0, None]}, "branch 1: rewards must be finite, got null"),
        ({"rewards": [1.0]}, "1 rewards for 2 responses"),
        ({"rewards": "high"}, "'rewards' must be a list of numbers"),
        ({"masks": [[1], [1]]}, "branch 1: masks has length 1, the response 2 tokens"),
        ({"masks": [[1], [1, None]]}, "'masks' must hold numbers"),
        ({"masks": [[1], None]}, "'masks' must have a list for every response"),
        ({"old_logps": [[-1], [-1, None]]}, "branch 1, token 1: old_logps is nan"),
        ({"old_logps": [[-1]]}, "1 rows of old_logps"),
        ({"old_logps": [[-1], [-1, 0.5]]}, "branch 1, token 1: old_logps is 0.5, but .*never positive"),
        ({"masks": []}, "0 rows of masks for 2 responses"),
        ({"rewards": [1.0, 10**400]}, "'rewards' must be numbers of float32, got 1000"),
        ({"rewards": [1.0, 1e300]}, "branch 1: rewards must be finite, got 1e.300"),
        ({"response_ids": [[5], [6, 8]]}, "branch 1: response, token 1: id 8 is outside the vocabulary of 8"),
        ({"response_ids": [[5], [6, 7.0]]}, "branch 1 must be a list of integer"),
        ({"response_ids": []}, "'response_ids' must be a list that is not empty"),
        ({"prompt_ids": [-1]}, "prompt, token 0: id -1"),
        ({"prompt_ids": [3] * 5}, "the prompt has 5 tokens, but max_prompt is 4"),
        ({"response_ids": [[5], [5] * 4]}, "branch 1: the response has 4 tokens, but max_response is 3"),
        ({"prompt_ids": [3] * 4, "response_ids": [[5], [5] * 3]}, "branch 1: prompt .4. and response .3. are 7.*is 6"),
        ({"reward": [1, 2]}, "unknown field 'reward'"),
    ],
)
def test_bad_groups_are_named_by_line_before_any_work(tmp_path, changes, message):
    row = {k: v for k, v in (LINE | changes).items() if v is not None}
    path = write(tmp_path, LINE, row)
    with pytest.raises(ValueError, match=f"groups.jsonl, line 2.*{message}"):
        JsonlGroups(path, vocab_size=8, max_prompt=4, max_response=3, context=6)


def test_lines_that_json_takes_but_nothing_after_it(tmp_path):
    digits = '{"prompt_ids": [' + "1" * 5000 + "]}"
    for line, message in (
        ('{"prompt": ' + "[" * 100_000, "nested too deeply"),
        ('{"prompt": "\\ud800", "responses": ["b"]}', "half of a surrogate pair"),
        (digits, "Exceeds the limit"),
    ):
        with pytest.raises(ValueError, match=f"groups.jsonl, line 1: .*{message}"):
            JsonlGroups(write(tmp_path, line), Bytes())
    assert len(JsonlGroups(write(tmp_path, '{"prompt": "\\ud83d\\ude00", "responses": ["b"]}'), Bytes())) == 1


def test_truncated_and_missing_group_files(tmp_path):
    with pytest.raises(ValueError, match="line 2: not JSON.*cut short"):
        JsonlGroups(write(tmp_path, LINE, json.dumps(LINE)[:-5], end=""))
    with pytest.raises(ValueError, match="holds no groups"):
        JsonlGroups(write(tmp_path, ""))
    with pytest.raises(FileNotFoundError, match="nothing"):
        JsonlGroups(tmp_path / "nothing")


def test_preference_pairs(tmp_path):
    """Pairs become responses chosen, rejected, …: of ids, of text, one or several."""
    file = tmp_path / "pairs.jsonl"
    file.write_text(
        '{"prompt_ids": [1, 2], "chosen": [3, 4], "rejected": [5]}\n'
        '{"prompt_ids": [1], "chosen": [[3], [4]], "rejected": [[5], [6, 7]]}\n'
    )
    one, two = JsonlGroups(file)
    assert [r.tolist() for r in one.completion_ids] == [[3, 4], [5]]
    assert [r.tolist() for r in two.completion_ids] == [[3], [5], [4], [6, 7]]


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"prompt_ids": [1], "chosen": [3]}', "line 1: field 'rejected' is missing"),
        ('{"prompt_ids": [1], "chosen": [[3], [4]], "rejected": [[5]]}', "2 chosen but 1 rejected"),
        ('{"prompt_ids": [1], "chosen": [3], "rejected": [5], "response_ids": [[3]]}', "or response_ids, not both"),
        ('{"prompt_ids": [1], "chosen": 3, "rejected": [5]}', "'chosen' must be a text, a list"),
        ('{"prompts": [[1], [2]], "chosen": [3], "rejected": [5]}', "row 1 differs from row 0"),
        ('{"prompt_ids": [1], "chosen": [3], "rejected": [3]}', "pair 0: chosen and rejected are equal"),
        ('{"prompt_ids": [1], "chosen": [3], "rejected": [5], "rewards": [1, 0]}', "leave 'rewards' out"),
        ('{"prompt": "a", "chosen": [{"role": "user"}], "rejected": "b"}', "'chosen' holds a conversation"),
    ],
)
def test_bad_pairs_are_named(tmp_path, line, message):
    (tmp_path / "pairs.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        JsonlGroups(tmp_path / "pairs.jsonl")
