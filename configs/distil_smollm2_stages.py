"""The paper's four stages of recovery in miniature, on SmolLM2-135M with the FFNs of 6-8 fused: the same loss at longer
and longer contexts, and after each whether the model uses far context.

    python -m experiments.launch --config=configs/distil_smollm2_stages.py --workdir=runs/stages

FFN Fusion (arXiv 2503.18908) distils over 54B tokens at 8K, then 5B at 16K, 5B at 32K and 0.8B at 128K; here a 64th of
each context and a few steps of it, after a block-wise start. Needs the checkpoint in a folder and WikiText-2's
validation text. KL to the parent on the held-out 1,024 tokens, float32, JAX 0.10.2: 0.318 before, 0.172 after the
block-wise stage, 0.173 after 128 tokens, 0.162 after 256 (perplexity 23.78, 20.32, 20.04, 20.52), in about 6 CPU
minutes on a crowded core. The last two stages were not measured.
"""

from ml_collections import ConfigDict

from configs import distil_smollm2

CI = (
    "--config.model.path=../SmolLM2-135M-Instruct",
    "--config.data.path=../shared/data/wikitext2/valid.txt",
    "--dry_run",
)


def get_config() -> ConfigDict:
    config = distil_smollm2.get_config()
    config.stages = (
        {"loss": "blockwise", "context": 128, "batch": 2, "steps": 60, "learning_rate": 2e-3},
        {"loss": "distil", "context": 128, "batch": 2, "steps": 12, "learning_rate": 1e-4},
        {"loss": "distil", "context": 256, "batch": 1, "steps": 3, "learning_rate": 5e-5},
        {"loss": "distil", "context": 512, "batch": 1, "steps": 2, "learning_rate": 5e-5},
        {"loss": "distil", "context": 2048, "batch": 1, "steps": 1, "learning_rate": 2e-5},
    )
    config.optimizer.warmup_steps = 0
    config.eval.every = 0
    config.probe.context = 2048
    return config
