"""FFN fusion of SmolLM2-135M from analysis to report: what can be fused, what it costs, what training wins back.

    python -m experiments.launch --config=configs/fuse_smollm2.py --workdir=runs/fuse

Needs the checkpoint in a folder and WikiText-2's validation text; --config.model.path= and --config.data.path= name
other places. Ends in report.md and export/. --config.stages="('analyse','plan')" runs stages alone, --resume goes on.

The rule takes the attentions of blocks 6-9, the four in a row that cost least by its own ranking (alone, 7 is second, 6
fifth, 9 sixth, 8 eighth of 30), and fuses the FFNs of 6-8. On the first 1,024 tokens of characters 2,000 to 30,000,
which nothing else reads, as two windows of 512; 16 greedy continuations of 32 tokens:

                                perplexity      KL  same top token  greedy text alike  parameters  KV bytes per token
    parent                           18.33       0          100.0%        32.0 tokens      134.5M              46,080
    attention removed                20.72  0.1907           78.5%                3.2      131.0M              39,936
    fused, norms folded              23.78  0.3179           72.4%                3.9      131.0M              39,936
    fused, last norm                 27.76  0.4595           67.6%                3.6      131.0M              39,936
    reversed instead                 24.69  0.3407           70.7%                5.3      131.0M              39,936
    same FFNs removed               192.32  2.2825           38.1%                0.9      123.0M              39,936
    pruned to as many parameters     20.07  0.1265           82.2%                7.1      131.0M              46,080
    int8                             18.36  0.0027           96.7%               18.3      134.5M              46,080
    fused, int8                      23.73  0.3207           72.5%                4.1      131.0M              39,936
    fused and distilled              19.19  0.1265           82.3%                6.1      131.0M              39,936

All of it took 16 CPU minutes, pinned to one core that was shared with others (JAX 0.10.2, float32), and 2.6 GB of disk.
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
    # FFNs 6-8.
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
