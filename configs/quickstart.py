"""Quickstart: nothing is downloaded; two CPU cores, five minutes.

    python -m experiments.launch --config=configs/quickstart.py --workdir=runs/quickstart

A Llama-shaped model of 0.1 M parameters learns key-value retrieval: first, supervised, on short contexts of up to 48
tokens; then by group RL (GRPO, exact branch replay) on contexts of 512 tokens, from the reward alone.
"""

from ml_collections import ConfigDict

from lsfuse.train import default_config

CI = (
    "--config.warm_start.stages=()",
    "--config.warm_start.steps=2",
    "--config.warm_start.optimizer.warmup_steps=1",
    "--config.rl.optimizer.warmup_steps=1",
    "--config.rl.steps=2",
    "--config.eval.num_prompts=4",
    "--config.checkpoint.every=1",
)


def get_config() -> ConfigDict:
    config = default_config()

    config.model.hidden_size = 64
    config.model.num_blocks = 2
    config.model.num_heads = 8
    config.model.num_kv_heads = 8
    config.model.head_dim = 16
    config.model.ffn_width = 128
    config.model.rope_theta = 1e5
    config.model.max_position_embeddings = 1024

    config.task.name = "retrieval"
    config.task.retrieval.prompt_length = 512
    config.task.retrieval.num_pairs = 4
    config.task.retrieval.answer_length = 2
    config.task.retrieval.num_keys = 8
    config.task.retrieval.num_values = 16
    config.task.retrieval.num_fillers = 4

    # Two pairs first: from these the model finds "look for the token, copy what followed it", and then keeps it.
    config.warm_start.stages = (
        (400, 64, (("prompt_length", 16), ("num_pairs", 2))),
        (50, 64, (("prompt_length", 24), ("num_pairs", 4))),
    )
    config.warm_start.optimizer.learning_rate = 5e-3
    config.warm_start.optimizer.warmup_steps = 20
    config.warm_start.optimizer.b2 = 0.98

    config.rl.steps = 300
    config.rl.num_prompts = 8
    config.rl.num_generations = 8
    config.rl.max_prompt = 512
    config.rl.max_response = 3
    config.rl.optimizer.learning_rate = 1e-3
    config.rl.optimizer.b2 = 0.98
    config.rl.optimizer.warmup_steps = 10

    config.eval.every = 50
    config.eval.num_prompts = 128
    config.checkpoint.every = 100
    config.report.compare_dense = True
    return config
