"""SmolLM2-135M.

    python -m experiments.launch --config=configs/fuse_smollm2.py --workdir=runs/fuse
"""

from ml_collections import ConfigDict

from lsfuse.train import FUSE_SCHEMA, default_config

CI = (
    "--config.model.path=../SmolLM2-135M-Instruct",
    "--config.data.path=../shared/data/wikitext2/valid.txt",
    "--config.plan.remove_attention=(6,7,8,9)",
    "--config.plan.fuse_ffn=((6,8),)",
    "--dry_run",
)


def get_config() -> ConfigDict:
    config = default_config(FUSE_SCHEMA)
    config.model.path = "../SmolLM2-135M-Instruct"
    config.data.path = "../shared/data/wikitext2/valid.txt"
    config.data.held_out = (2_000, 30_000)
    # Two windows of 512 tokens drawn from the rest of the text. By the rule they give the attentions of blocks 6-9, and
    # FFNs 6-8: block 5, which would keep its attention, depends too much on 6.
    config.analysis.window = 512
    config.analysis.count = 2
    config.plan.num_attentions = 4
    config.plan.threshold = 0.2
    config.eval.window = 512
    config.eval.count = 2
    config.eval.every = 80
    # As in distil_smollm2.py.
    config.distil.stages = ({"loss": "blockwise", "context": 256, "batch": 2, "steps": 240, "learning_rate": 2e-3},)
    config.distil.optimizer.schedule = "cosine"
    config.distil.optimizer.warmup_steps = 10
    config.probe.context = 1024
    return config
