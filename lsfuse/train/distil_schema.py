"""Every field of a distillation's config: default, allowed types, what it means. Config files only set values."""

from collections.abc import Mapping
from typing import Any

from lsfuse.fusion.fuse import NORMS
from lsfuse.model import REMAT_POLICIES
from lsfuse.train.schema import Field, optimizer_fields

LOSSES = ("blockwise", "distil", "lm")

# One entry of `stages`, a dict; what it leaves out has its default.
STAGE: dict[str, Field] = {
    "loss": Field("distil", "what is minimised: every fused block alone, teacher and student, or text", choices=LOSSES),
    "context": Field(512, "tokens of a window", minimum=2),
    "batch": Field(1, "windows a step", minimum=1),
    "steps": Field(100, "updates", minimum=1),
    "learning_rate": Field(1e-4, "peak", minimum=0),
    "trainable": Field(
        None, "regular expression found in the paths (runs/0/q_proj) of what is trained; None: all that can be", (str,)
    ),
    "cosine_weight": Field(1.0, "of the sum of 1 - cos beside the KL (distil)", minimum=0),
}


def stage_optimizer_fields() -> Mapping[str, Field]:
    """The optimizer's fields but those that a stage has itself."""
    return {k: v for k, v in optimizer_fields(0.0).items() if k not in ("learning_rate", "trainable")}


def check_blocks(name: str, value: Any) -> None:
    """Raises ValueError unless `value` holds numbers of blocks."""
    if any(type(i) is not int or i < 0 for i in value):
        raise ValueError(f"{name} must hold blocks, whole numbers from 0, for example (6, 7), got {value}")


def check_spans(name: str, value: Any) -> None:
    """Raises ValueError unless `value` holds pairs (first, last)."""
    for span in value:
        if not isinstance(span, tuple | list) or len(span) != 2 or any(type(i) is not int for i in span):
            raise ValueError(f"{name} must hold spans (first, last), for example ((6, 8),), got {value}")


DISTIL_SCHEMA: dict[str, Any] = {
    "program": Field("distil", "what the launcher runs", choices=("distil",)),
    "seed": Field(0, "of the order of windows", minimum=0),
    "dtype": Field(
        "float32", "of the parameters and all that follows them", choices=("float32", "bfloat16", "float16")
    ),
    "model": {
        "path": Field(None, "the parent: folder (or hub id) in Hugging Face layout", (str,)),
        "child": Field(None, "the child, likewise; None: what `surgery` makes of the parent", (str,)),
    },
    "surgery": {
        "remove_attention": Field((), "blocks that lose their attention", check=check_blocks),
        "fuse_ffn": Field((), "spans (first, last), inclusive, of blocks whose FFNs are fused", check=check_spans),
        "norm": Field("fold", "whose norm gains a fused FFN takes", choices=NORMS),
    },
    "data": {
        "path": Field(None, "a text file", (str,)),
        "held_out": Field(
            None,
            "characters (first, end) that are never trained on and that evaluations read; None: the last twentieth",
            (tuple,),
        ),
    },
    "stages": Field((), "one dict a stage, run in turn: loss, context, batch, steps, learning_rate, trainable, …"),
    "optimizer": stage_optimizer_fields(),
    "remat_policy": Field("everything_saveable", "what is saved for the backward", choices=tuple(REMAT_POLICIES)),
    "eval": {
        "window": Field(512, "tokens of a held-out window", minimum=2),
        "count": Field(2, "held-out windows: before the first stage, after each, and as `every` says", minimum=1),
        "every": Field(0, "steps between evaluations inside a stage; 0: none", minimum=0),
    },
    "probe": {
        "context": Field(
            None,
            "tokens of the long-context probe's windows, after each stage; None: the longest stage's",
            (int,),
            minimum=4,
        ),
        "count": Field(1, "windows of the probe; 0: no probe", minimum=0),
    },
    "checkpoint": {
        "every": Field(100, "steps between checkpoints; 0: only at the end of every stage", minimum=0),
        "keep": Field(2, "how many to keep", minimum=1),
    },
}
