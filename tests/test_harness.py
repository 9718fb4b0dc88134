"""lm-eval's tasks on our models: the parts by the oracle, and local tasks end to end where lm-eval is installed."""

import dataclasses
import json

import jax
import numpy as np
import oracle
import pytest
from helpers import random_params, tiny

from lsfuse import data
from lsfuse.data import harness
from lsfuse.model import BlockConfig

CONFIG = tiny(vocab_size=32, blocks=(BlockConfig("full", 2, 24), BlockConfig("none", 1, 8)), max_position_embeddings=24)
PARAMS = random_params(CONFIG, dtype=np.float32)
RNG = np.random.default_rng(0)


class Letters:
    """Ids 1 … 26 are letters, 27 a space; 0 begins and 30 ends."""

    vocab_size, bos_token_id, eos_token_id, stop_ids = 31, 0, 30, (30,)
    text = "\0abcdefghijklmnopqrstuvwxyz ??\3"

    def encode(self, text, add_special_tokens=False):
        return [0] * add_special_tokens + [self.text.index(c) for c in text]

    def decode(self, ids):
        return "".join(self.text[i] if i < 31 else "?" for i in ids)


def direct(context, continuation, room=24):
    """(log-probability, greedy) by the oracle, one token after the other."""
    ids = [*context, *continuation][-(room + 1) :]
    logps = np.asarray(jax.nn.log_softmax(oracle.logits(CONFIG, PARAMS, ids[:-1])))[-len(continuation) :]
    return sum(p[i] for p, i in zip(logps, continuation, strict=True)), all(logps.argmax(-1) == continuation)


@pytest.mark.slow
def test_continuations_of_any_length():
    pairs = [([3], [4, 5]), ([1, 2, 3, 4], [9]), (RNG.integers(0, 32, 40).tolist(), [7, 8, 9])]
    likeliest = int(oracle.logits(CONFIG, PARAMS, [5, 6])[-1].argmax())
    got = harness.score_continuations(CONFIG, PARAMS, [*pairs, ([5, 6], [likeliest])], batch_size=4)
    for (logp, greedy), pair in zip(got, [*pairs, ([5, 6], [likeliest])], strict=True):
        want, want_greedy = direct(*pair)
        np.testing.assert_allclose(logp, want, rtol=1e-5)
        assert greedy == want_greedy
    assert got[-1][1]
    for pair in (([], [1]), ([1], []), ([1], [1] * 25)):
        with pytest.raises(ValueError, match="pair 0 has"):
            harness.score_continuations(CONFIG, PARAMS, [pair])


def test_stops_and_settings():
    assert harness.cut_at("one. two\nthree", ["\n", "."]) == "one" and harness.cut_at("one", ["x", ""]) == "one"
    assert harness._settings({"until": "\n", "temperature": 0.7, "do_sample": False}, 9) == (("\n",), 9, 0.0, 1.0)
    sampled = {"until": ["a"], "do_sample": True, "max_new_tokens": 3, "top_p": 0.9}
    assert harness._settings(sampled, 9) == (("a",), 3, 1.0, 0.9)
    with pytest.raises(ValueError, match="needs prompts of at least one token"):
        harness.generate(CONFIG, PARAMS, [[1]], 24)


def write_tasks(folder):
    """A multiple choice, a perplexity and a generation task over one file of four documents."""
    docs = [
        {"question": "ab", "choices": [" cd", " e"], "answer": 0, "text": "abc de"},
        {"question": "hello", "choices": [" x", " world"], "answer": 1, "text": "the quick brown fox jumps over a dog"},
        {"question": "q", "choices": [" z", " zz"], "answer": 0, "text": "q"},
        {"question": "long question here", "choices": [" a", " b"], "answer": 1, "text": "zz"},
    ]
    (folder / "docs.jsonl").write_text("".join(json.dumps(d) + "\n" for d in docs))
    data_files = f"dataset_kwargs:\n  data_files:\n    test: {folder / 'docs.jsonl'}\n"
    common = f"dataset_path: json\n{data_files}test_split: test\n"
    (folder / "choice.yaml").write_text(
        f"task: local_choice\n{common}output_type: multiple_choice\ndoc_to_text: '{{{{question}}}}'\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: '{{answer}}'\ntarget_delimiter: ''\n"
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
    )
    (folder / "rolling.yaml").write_text(
        f"task: local_rolling\n{common}output_type: loglikelihood_rolling\ndoc_to_text: ''\n"
        "doc_to_target: '{{text}}'\nmetric_list:\n  - metric: byte_perplexity\n"
    )
    (folder / "answer.yaml").write_text(
        f"task: local_answer\n{common}output_type: generate_until\ndoc_to_text: '{{{{question}}}}'\n"
        "doc_to_target: '{{text}}'\ngeneration_kwargs:\n  until: ['e']\n  max_gen_toks: 4\n"
        "metric_list:\n  - metric: exact_match\n"
    )
    return docs


@pytest.mark.slow
def test_local_tasks(tmp_path, monkeypatch):
    """Accuracy, byte perplexity and answers of lm-eval are those computed directly from the oracle's logits."""
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra [eval])")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    from lm_eval.tasks import TaskManager

    docs, letters = write_tasks(tmp_path), Letters()
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    lm = data.harness_model(CONFIG, PARAMS, letters, batch_size=3)
    tasks = ["local_choice", "local_rolling", "local_answer"]
    out = lm_eval.simple_evaluate(lm, tasks=tasks, task_manager=manager, bootstrap_iters=0)

    right = []
    for d in docs:
        scores = [direct(letters.encode(d["question"]), letters.encode(c))[0] for c in d["choices"]]
        right.append(int(np.argmax(scores)) == d["answer"])
    assert out["results"]["local_choice"]["acc,none"] == np.mean(right)

    nats = 0.0
    for d in docs:  # windows of 24 that share one token, the first after the prefix token
        ids = letters.encode(d["text"])
        nats += direct([0], ids[:24])[0]
        if ids[24:]:
            context = [*ids[:24]][-(24 + 1 - len(ids[24:])) :]
            nats += direct(context, ids[24:])[0]
    size = sum(len(d["text"]) for d in docs)
    got = out["results"]["local_rolling"]["byte_perplexity,none"]
    np.testing.assert_allclose(got, np.exp(-nats / size), rtol=1e-5)

    for sample, d in zip(out["samples"]["local_answer"], docs, strict=True):
        ids = letters.encode(d["question"])
        made = []
        while len(made) < 4 and 30 not in made:
            made.append(int(oracle.logits(CONFIG, PARAMS, [*ids, *made])[-1].argmax()))
        assert sample["resps"][0][0] == harness.cut_at(letters.decode([i for i in made if i != 30]), ["e"])


@pytest.mark.slow
def test_bad_input():
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra [eval])")
    with pytest.raises(ValueError, match="the tokenizer has 31 ids, the model's vocabulary 30"):
        data.harness_model(dataclasses.replace(CONFIG, vocab_size=30), PARAMS, Letters())
