"""Quickstart of FFN fusion: nothing is downloaded; three CPU minutes, ending in report.md with tables and pictures.

    python -m experiments.launch --config=configs/quickstart_fusion.py --workdir=runs/quickstart_fusion

A Llama-shaped model of 0.3 M parameters and eight blocks learns generated sentences of a small world (perplexity 189 to
2.75 on held-out ones). The rule takes the attentions of blocks 5-7, which cost least, and fuses the FFNs of 5-6 into
one: KL to the parent 0.067, where taking the same FFNs out costs 0.085; after 100 block-wise steps 0.034. So small a
model has channels to spare: pruned to as many parameters it loses less, 0.007, but no sequential block. The run took
150 CPU seconds, compilation included, pinned to one shared core (JAX 0.10.2).
"""

from ml_collections import ConfigDict

from lsfuse.train import FUSE_SCHEMA, default_config

CI = (
    "--config.data.sentences=5000",
    "--config.warm_start.stages=({'loss':'lm','context':64,'batch':2,'steps':2},)",
    "--config.distil.stages=({'loss':'blockwise','context':64,'batch':2,'steps':2},)",
    "--config.warm_start.optimizer.warmup_steps=1",
    "--config.distil.optimizer.warmup_steps=1",
    "--config.plan.threshold=2",
    # Every row of the table is another model to compile.
    "--config.stages=('warm_start','analyse','plan','fuse','distil','export')",
)


def get_config() -> ConfigDict:
    config = default_config(FUSE_SCHEMA)

    config.model.hidden_size = 64
    config.model.num_blocks = 8
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.head_dim = 16
    config.model.ffn_width = 128
    config.model.max_position_embeddings = 128

    config.data.sentences = 20_000
    config.warm_start.stages = ({"loss": "lm", "context": 64, "batch": 16, "steps": 400, "learning_rate": 3e-3},)
    config.warm_start.optimizer.schedule = "cosine"
    config.warm_start.optimizer.warmup_steps = 20

    config.analysis.window = 64
    config.analysis.count = 8
    config.plan.num_attentions = 3
    config.plan.threshold = 0.3
    config.eval.window = 64
    config.eval.count = 16
    config.probe.count = 0
    config.generate.prompt = 16
    config.generate.tokens = 16
    config.distil.stages = ({"loss": "blockwise", "context": 64, "batch": 16, "steps": 100, "learning_rate": 2e-3},)
    config.distil.optimizer.schedule = "cosine"
    config.distil.optimizer.warmup_steps = 10
    return config
