"""The paper's four stages of recovery in miniature, on SmolLM2-135M with the FFNs of 6-8 fused: the same loss at longer
and longer contexts, and after each whether the model uses far context.

    python -m experiments.launch --config=configs/distil_smollm2_stages.py --workdir=runs/stages

FFN Fusion (arXiv 2503.18908) distils over 54B tokens at 8K, then 5B at 16K, 5B at 32K and 0.8B at 128K; here a 64th of
each context and 20,480, 2,048, 2,048 and 2,048 tokens: the first three in the paper's proportions to within a tenth,
the last one window, the least there is, where its share would be 303. A block-wise start comes before them. Needs the
checkpoint in a folder and WikiText-2's validation text.

Measured on the held-out 1,024 tokens, and, for the probe, on 2,048 held-out tokens (float32, JAX 0.10.2):

    after              tokens  loss: first, last      KL  perplexity  at 0-127  at 1,024-2,047  repeated half
    nothing                                        0.318       23.78     28.93           17.98          2.234
    block-wise, 128    15,360     0.076    0.039   0.172       20.32     25.45           14.82          1.733
    distil, 128        20,480     0.572    0.508   0.143       19.62     24.60           14.08          2.168
    distil, 256         2,048     0.518    0.496   0.142       19.68     24.69           14.12          2.235
    distil, 512         2,048     0.561    0.523   0.143       19.46     24.31           13.93          2.084
    distil, 2,048       2,048     0.496    0.496   0.141       19.52     24.31           13.93          2.044

So few tokens show that the stages run, not what long contexts are worth: most is won at 128 tokens, which costs some
copying from afar, and the later stages, at 512 and 2,048, win a part of that back. 13.8 CPU minutes (14.6 minutes of
wall time, two cores shared with others) and 8.2 GiB at its peak, the 2,048 tokens' stage included.
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
        {"loss": "distil", "context": 128, "batch": 2, "steps": 80, "learning_rate": 5e-5},
        {"loss": "distil", "context": 256, "batch": 1, "steps": 8, "learning_rate": 2e-5},
        {"loss": "distil", "context": 512, "batch": 1, "steps": 4, "learning_rate": 2e-5},
        {"loss": "distil", "context": 2048, "batch": 1, "steps": 1, "learning_rate": 1e-5},
    )
    config.optimizer.warmup_steps = 0
    config.eval.every = 0
    config.probe.context = 2048
    return config
