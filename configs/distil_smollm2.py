"""Recovers SmolLM2-135M without the attention of blocks 6-9 and with the FFNs of 6-8 fused: block-wise, nothing else.

    python -m experiments.launch --config=configs/distil_smollm2.py --workdir=runs/distil

Needs the checkpoint in a folder and WikiText-2's validation text; --config.model.path= and --config.data.path= name
other places. Characters 2,000 to 30,000 are held out. KL to the parent on the first
1,024 tokens of them, as two windows of 512: 0.318 before, 0.126 after (perplexity 23.78 and 19.19; the
parent's is 18.33). The whole run took 7.3 CPU minutes on two shared cores (JAX 0.10.2,
float32); of its wall time the steps took 4.6 minutes.
"""

from ml_collections import ConfigDict

from lsfuse.train import DISTIL_SCHEMA, default_config

CI = (
    "--config.model.path=../SmolLM2-135M-Instruct",
    "--config.data.path=../shared/data/wikitext2/valid.txt",
    "--dry_run",
)


def get_config() -> ConfigDict:
    config = default_config(DISTIL_SCHEMA)
    config.model.path = "../SmolLM2-135M-Instruct"
    config.surgery.remove_attention = tuple(range(6, 10))
    config.surgery.fuse_ffn = ((6, 8),)
    config.data.path = "../shared/data/wikitext2/valid.txt"
    config.data.held_out = (2_000, 30_000)
    # The spans' inputs and targets need the parent's first ten blocks only, and no head: a seventh of a global step.
    config.stages = ({"loss": "blockwise", "context": 256, "batch": 2, "steps": 240, "learning_rate": 2e-3},)
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_steps = 10
    config.eval.window = 512
    config.eval.count = 2
    config.eval.every = 80
    config.probe.context = 1024
    return config
