"""Every field of a fusion's config, from analysis to report. Config files only set values."""

import difflib
from typing import Any

from lsfuse.fusion.fuse import NORMS
from lsfuse.train.distil_schema import DISTIL_SCHEMA, check_blocks, check_spans, stage_optimizer_fields
from lsfuse.train.schema import SCHEMA, Field

# In the order in which they run; each reads files that those before it have left.
STAGES = ("warm_start", "analyse", "plan", "fuse", "evaluate", "time", "distil", "export", "report")


def _check_stages(name: str, value: Any) -> None:
    for stage in value:
        if stage not in STAGES:
            near = difflib.get_close_matches(str(stage), STAGES, 1, 0.4)
            hint = f'; did you mean "{near[0]}"?' if near else ""
            raise ValueError(f"{name} has {stage!r}, which is none of {', '.join(STAGES)}{hint}")


FUSE_SCHEMA: dict[str, Any] = {
    "program": Field("fuse", "what the launcher runs", choices=("fuse",)),
    "stages": Field(
        (), f"those of {', '.join(STAGES)} that this session runs; (): all there is work for", check=_check_stages
    ),
    "seed": Field(0, "of random parameters, generated text and the order of windows", minimum=0, maximum=2**32 - 1),
    "dtype": DISTIL_SCHEMA["dtype"],
    "model": SCHEMA["model"],
    "data": {
        "path": Field(None, "a text file", (str,)),
        "sentences": Field(None, "generate a text of so many sentences instead of reading one", (int,), minimum=1),
        "held_out": Field(
            None,
            "characters (first, end) that tables are measured on and nothing else reads; None: the last twentieth",
            (tuple,),
        ),
    },
    "warm_start": {
        "stages": Field((), "the parent's own training, as distil.stages; (): the parent is taken as it is"),
        "optimizer": stage_optimizer_fields(),
    },
    "analysis": {
        "window": Field(512, "tokens of a window of the text that scores and dependencies are measured on", minimum=2),
        "count": Field(2, "such windows", minimum=1),
    },
    "plan": {
        "remove_attention": Field(
            (), "blocks that lose their attention; (): `num_attentions` chosen by the rule", check=check_blocks
        ),
        "num_attentions": Field(4, "blocks in a row, those whose attentions cost least in sum", minimum=1),
        "fuse_ffn": Field((), "spans (first, last), inclusive, to fuse; (): by the rule", check=check_spans),
        "threshold": Field(0.1, "largest dependency inside a span, by the rule", minimum=0),
        "max_width": Field(None, "most channels of a fused FFN, by the rule; None: any number", (int,), minimum=1),
        "norm": Field("fold", "whose norm gains a fused FFN takes", choices=NORMS),
    },
    "eval": DISTIL_SCHEMA["eval"],
    "generate": {
        "count": Field(16, "held-out prompts whose greedy continuations are compared", minimum=1),
        "prompt": Field(32, "tokens of a prompt", minimum=1),
        "tokens": Field(32, "tokens of a continuation", minimum=1),
    },
    "time": {
        "batch": Field(1, "sequences that are decoded at a time", minimum=1),
        "context": Field(64, "tokens before the first timed one", minimum=2),
        "steps": Field(8, "tokens decoded a timed call", minimum=1),
        "repeats": Field(5, "rounds in which parent, sequential and fused model are timed in turn; 0: none", minimum=0),
    },
    "distil": {
        "stages": Field((), "one dict a stage: loss, context, batch, steps, learning_rate, …; (): no distillation"),
        "optimizer": stage_optimizer_fields(),
    },
    "probe": DISTIL_SCHEMA["probe"],
    "remat_policy": DISTIL_SCHEMA["remat_policy"],
    "checkpoint": DISTIL_SCHEMA["checkpoint"],
}
