"""GRPO on GSM8K with a real checkpoint: SmolLM2-135M-Instruct, prompts of eight solved problems.

    python -m experiments.launch --config=configs/grpo_gsm8k.py:CHECKPOINT --workdir=runs/gsm8k \\
        --config.task.gsm8k.train_path=train.jsonl --config.task.gsm8k.eval_path=test.jsonl

CHECKPOINT is a folder in Hugging Face layout (config.json, model.safetensors, tokenizer.json); without it the hub's id
is used, which needs the extra [hf] and a network. The two files are those that GSM8K's authors publish.

Needs 4 GB of memory; 25 minutes on one CPU core. Graded reward on the 32 held-out items: 0.13 before, 0.19 after; four
steps show that everything works, not what the model can learn.

All prompts share about 1,090 tokens of solved problems. The reward is graded (answer, format, nearness): a model of
this size is seldom right, and a group without spread in its rewards has no gradient.
"""

from ml_collections import ConfigDict

from lsfuse.train import default_config

CI = (
    "--config.model.path=../SmolLM2-135M-Instruct",
    "--config.task.gsm8k.train_path=../shared/data/gsm8k/train.jsonl",
    "--config.task.gsm8k.eval_path=../shared/data/gsm8k/test.jsonl",
    "--config.rl.steps=2",
    "--config.rl.num_prompts=1",
    "--config.rl.max_response=24",
    "--config.eval.num_prompts=2",
)


def get_config(checkpoint: str = "HuggingFaceTB/SmolLM2-135M-Instruct") -> ConfigDict:
    config = default_config()

    config.model.path = checkpoint

    config.task.name = "gsm8k"
    config.task.gsm8k.train_path = "data/gsm8k/train.jsonl"
    config.task.gsm8k.eval_path = "data/gsm8k/test.jsonl"
    config.task.gsm8k.long_prompts = "drop"

    config.rl.steps = 4
    config.rl.num_prompts = 2
    config.rl.num_generations = 8
    config.rl.max_prompt = 1280
    config.rl.max_response = 128
    config.rl.optimizer.learning_rate = 1e-5
    config.rl.optimizer.warmup_steps = 1

    config.eval.every = 0
    config.eval.num_prompts = 32
    config.checkpoint.every = 2
    config.report.parameter_change = True
    return config
