"""Which attentions cost least, how FFNs depend on each other without them, and what the rule makes of it."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from lsfuse import fusion
from lsfuse.fusion.describe import on_shapes
from lsfuse.fusion.distil import Model
from lsfuse.fusion.texts import Texts
from lsfuse.model import ModelConfig


def analyse(
    folder: pathlib.Path,
    parent: Model,
    texts: Texts,
    fields: ConfigDict,
    about: Mapping[str, str],
    progress: bool,
) -> dict[str, Any]:
    """Every row is kept in `folder` as it is found, and two dependency matrices (npz, JSON, heat map): "blocks", whole
    blocks of the parent, and "region", pairs of the attention-free stretches, and of the config's spans, once attention
    is removed there.

    fields: the config's `plan`, which may say what is removed. about: see `fusion.save_dependency`.

    Returns: JSON-able "attention", KL without each block's attention (None without one); "influence", "relative" (see
    `fusion.Dependency`); "cheapest", the blocks in a row that cost least; "removed", those that are taken out.
    """
    config, params = parent
    scores = fusion.removal_scores(config, params, texts, progress=progress, folder=folder / "attention_rows")
    whole = fusion.dependency(config, params, texts, progress=progress, folder=folder / "block_rows")
    _keep(folder / "blocks", whole, config, about, (), "whole blocks of the parent")
    cheapest = fusion.cheapest_run(scores, len(fields.remove_attention) or fields.num_attentions)
    removed = tuple(fields.remove_attention) or cheapest
    free = fusion.remove_attention(removed)(config, params)
    regions = _regions(free[0], fields)
    region = fusion.dependency(*free, texts, regions=regions, progress=progress, folder=folder / "region_rows")
    spans = _spans(free[0], region.mean, fields)
    _keep(folder / "region", region, free[0], about, spans, "without the attention that is removed")
    return {
        "attention": [None if np.isnan(x) else float(x) for x in scores],
        "influence": whole.influence.tolist(),
        "relative": whole.relative.tolist(),
        "cheapest": list(cheapest),
        "removed": list(removed),
    }


def _keep(path: pathlib.Path, found: fusion.Dependency, config: ModelConfig, about, spans, title: str) -> None:
    fusion.save_dependency(path, found, config, about)
    fusion.plot_dependency(path.with_suffix(".png"), found.mean, config, spans, title)


def _regions(config: ModelConfig, fields: ConfigDict) -> list[tuple[int, int]]:
    """Where spans may lie: stretches without attention, joined with the config's spans, whose first member may keep
    its own."""
    given = [(int(first), int(last)) for first, last in fields.fuse_ffn]
    joined: list[tuple[int, int]] = []
    for first, last in sorted([*fusion.attention_free_runs(config), *given]):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], last)
        else:
            joined.append((first, last))
    return joined


def _spans(config: ModelConfig, mean: np.ndarray, fields: ConfigDict) -> list[tuple[int, int]]:
    """Of the model without attention: the config's, or the rule's."""
    given = [(int(first), int(last)) for first, last in fields.fuse_ffn]
    return given or fusion.fusion_spans(config, mean, fields.threshold, fields.max_width)


def plan(
    folder: pathlib.Path, parent: ModelConfig, removed: list[int], fields: ConfigDict, about: Mapping[str, str]
) -> dict[str, Any]:
    """JSON-able "remove_attention", "fuse_ffn" and "norm", and of each span "largest", the largest dependency in it.

    Raises: ValueError if the rule finds nothing to fuse.
    """
    free, _ = on_shapes(fusion.remove_attention(removed), parent)
    mean = fusion.load_dependency(folder / "region", about).mean
    spans = _spans(free, mean, fields)
    if not spans:
        longest = max((b - a + 1 for a, b in fusion.attention_free_runs(free)), default=0)
        raise ValueError(
            f"the rule finds no two FFNs to fuse: without the attention of {removed} the longest run has {longest}"
            f" FFNs, the last of which stays, and pairs may depend on each other by config.plan.threshold"
            f" {fields.threshold} at most ({folder}/region.png shows them); raise it, or remove more attentions, in"
            " another work directory"
        )
    return {
        "remove_attention": list(removed),
        "fuse_ffn": [list(span) for span in spans],
        "norm": fields.norm,
        "largest": [float(mean[a : b + 1, a : b + 1].max()) for a, b in spans],
    }
