"""Dependency matrices in files: npz and JSON to go on with, and a heat map to look at."""

import dataclasses
import io
import json
import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from lsfuse.files import write_atomic, write_figure
from lsfuse.fusion.analysis import Dependency
from lsfuse.fusion.describe import block_rows
from lsfuse.model.config import ModelConfig

LOG2_RANGE = (-9.0, -1.0)  # what the paper colours


def save_dependency(
    path: str | os.PathLike, dependency: Dependency, config: ModelConfig, about: Mapping[str, str] | None = None
) -> None:
    """Writes PATH.npz and PATH.json: the same figures, the second with the model's blocks and `about` (see
    `fingerprint`). Each appears whole or not at all."""
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    arrays = {f.name: getattr(dependency, f.name) for f in dataclasses.fields(dependency)}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    content = {
        "about": dict(about or {}),
        "blocks": block_rows(config),
        "transforms": list(config.transforms),
        # JSON has no NaN: what was not computed is null.
        **{name: np.where(np.isnan(array), np.asarray(None), array).tolist() for name, array in arrays.items()},
    }
    write_atomic(target.with_name(f"{target.name}.json"), json.dumps(content, indent=1) + "\n")
    write_atomic(target.with_name(f"{target.name}.npz"), buffer.getvalue())


def load_dependency(path: str | os.PathLike, about: Mapping[str, str] | None = None) -> Dependency:
    """What `save_dependency` wrote; about: refuse any other (see `fingerprint`).

    Raises: FileNotFoundError; ValueError for another model's or text's file, or one that is not whole.
    """
    target = pathlib.Path(path)
    file, described = (target.with_name(f"{target.name}.{suffix}") for suffix in ("npz", "json"))
    if about is not None:
        theirs = json.loads(described.read_text())["about"]
        for name, value in about.items():
            if theirs.get(name) != value:
                raise ValueError(f"{described} is of another {name}: {theirs.get(name)} there, {value} here")
    names = [f.name for f in dataclasses.fields(Dependency)]
    try:
        with np.load(file) as arrays:
            return Dependency(**{name: arrays[name] for name in names})
    except (KeyError, ValueError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{file} is no dependency matrix: {error}") from None


def plot_dependency(
    path: str | os.PathLike,
    matrix: np.ndarray,
    config: ModelConfig,
    spans: Sequence[tuple[int, int]] = (),
    title: str = "",
) -> None:
    """A heat map of M [L, L] as in FFN Fusion (arXiv 2503.18908): log2, from blue, independent, at 2^-9 to red at 2^-1.

    Row i, column j: how far block j's contribution moves without block i. spans (first, last), inclusive, are boxed;
    blocks without attention are marked with a dot at the row's left. NaN stays blank.

    Raises: ValueError for a matrix of another number of blocks.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    count = config.num_blocks
    if matrix.shape != (count, count):
        raise ValueError(f"the matrix is {matrix.shape}, the model has {count} blocks")
    size = min(max(4.0, 0.16 * count + 2), 20.0)
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    upper = np.triu(np.ones((count, count), bool), 1)
    shown = np.where(upper, np.log2(np.maximum(matrix, 2.0**-40)), np.nan)
    image = axes.imshow(shown, cmap="coolwarm", vmin=LOG2_RANGE[0], vmax=LOG2_RANGE[1])
    figure.colorbar(image, ax=axes, label="log2 of the mean cosine distance", extend="both", shrink=0.8)
    for first, last in spans:
        side = last - first + 1
        axes.add_patch(Rectangle((first - 0.5, first - 0.5), side, side, fill=False, edgecolor="black", linewidth=1.5))
    free = [i for i, block in enumerate(config.blocks) if not block.has_attention]
    axes.plot([-1.2] * len(free), free, "k.", markersize=4, clip_on=False)
    step = max(1, count // 20)
    # Said at the axis: a legend would lie on the dots or on the spans' boxes.
    marked = " (dot: no attention)" if free else ""
    axes.set(xticks=range(0, count, step), yticks=range(0, count, step), xlim=(-1.8, count - 0.5))
    axes.set(xlabel="block j", ylabel=f"block i, left out{marked}", title=title or None)
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_figure(target, figure, dpi=130)
