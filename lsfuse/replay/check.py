"""Checks of a batch on the host, before any work: what is wrong, in which group and branch, and what to do."""

from typing import Any

import numpy as np

from lsfuse.checks import REAL, check_arrays
from lsfuse.model.config import ModelConfig
from lsfuse.replay.batch import Batch

_PER_TOKEN = ("completion_mask", "old_per_token_logps", "ref_per_token_logps", "loss_weights")


def check_batch(batch: Batch, model: ModelConfig) -> None:
    """Raises ValueError if `batch` is not one that `model` can be run on. Values in padding are not looked at.

    Shapes must agree; lengths must lie within the padded sizes and the model's context; token ids within its
    vocabulary; advantages, rewards, and the log-probs of tokens that carry loss must be finite.
    """
    b = Batch(**{f: _host(getattr(batch, f)) for f in batch.__dataclass_fields__ if f != "extras"})
    check_shapes(b)
    groups, branches, response = b.completion_ids.shape
    prompt = b.prompt_ids.shape[1]
    _range("group_sizes", b.group_sizes, 0, branches, "the padded number of branches")
    exists = np.arange(branches) < b.group_sizes[:, None]
    _range("prompt_lengths", b.prompt_lengths, 0, prompt, "the padded prompt")
    empty = np.flatnonzero((b.prompt_lengths == 0) & (b.group_sizes > 0))
    if empty.size:
        g = int(empty[0])
        raise ValueError(
            f"group {g} has {b.group_sizes[g]} branches and an empty prompt; a prompt has at least 1 token"
        )
    lengths = np.where(exists, b.completion_lengths, 0)
    _range("completion_lengths", lengths, 0, response, "the padded response")
    total = b.prompt_lengths[:, None] + lengths
    if total.size and total.max() > model.max_position_embeddings:
        g, i = (int(n) for n in np.argwhere(total == total.max())[0])
        raise ValueError(
            f"group {g}, branch {i}: {b.prompt_lengths[g]} prompt and {lengths[g, i]} response tokens exceed the"
            f" model's context of {model.max_position_embeddings} (max_position_embeddings); shorten the prompt"
        )
    tokens = np.arange(response) < lengths[..., None]
    _ids("prompt_ids", b.prompt_ids, np.arange(prompt) < b.prompt_lengths[:, None], model.vocab_size)
    _ids("completion_ids", b.completion_ids, tokens, model.vocab_size)
    mask = np.nan_to_num(b.completion_mask) != 0
    if (bad := np.argwhere(mask & ~tokens & exists[..., None])).size:
        g, i, t = bad[0]
        raise ValueError(
            f"group {g}, branch {i}: completion_mask is set at token {t}, beyond the response's length {lengths[g, i]}"
        )
    _finite("advantages", b.advantages, exists if b.advantages is None or b.advantages.ndim == 2 else tokens & mask)
    _finite("rewards", b.rewards, exists)
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        _finite(name, getattr(b, name), tokens & mask)


def _host(x):
    return None if x is None else np.asarray(x)


def check_shapes(batch: Batch, where: str = "batch") -> None:
    """Raises ValueError if a field has another shape, or holds another kind of numbers, than `Batch` says. Of tracers,
    too: `replay.value_and_grad` asks when it is traced."""
    if not isinstance(batch, Batch):
        raise ValueError(f"{where} must be a replay.Batch, got {type(batch).__name__}; mind the arguments' order")
    b, advantages = batch, "B G R" if getattr(batch.advantages, "ndim", 2) == 3 else "B G"
    given: dict[str, tuple[Any, str, Any]] = {
        "completion_ids": (b.completion_ids, "B G R", int),
        "prompt_ids": (b.prompt_ids, "B P", int),
    }
    given |= {"prompt_lengths": (b.prompt_lengths, "B", int), "group_sizes": (b.group_sizes, "B", int)}
    given |= {"completion_lengths": (b.completion_lengths, "B G", int), "rewards": (b.rewards, "B G", REAL)}
    given |= {name: (getattr(b, name), "B G R", REAL) for name in _PER_TOKEN}
    given |= {"advantages": (b.advantages, advantages, REAL)}
    given |= {f"extras[{name!r}]": (x, "B G ...", REAL) for name, x in (b.extras or {}).items() if hasattr(x, "shape")}
    for name in (
        "completion_ids",
        "prompt_ids",
        "prompt_lengths",
        "group_sizes",
        "completion_lengths",
        "completion_mask",
    ):
        if getattr(b, name) is None:
            raise ValueError(f"{where}: {name} is None; every batch has it")
    check_arrays(where, given)
    sizes = dict(zip("BGRP", (*b.completion_ids.shape, b.prompt_ids.shape[1]), strict=True))
    if empty := [letter for letter, size in sizes.items() if not size]:
        raise ValueError(f"{where} has no room: {empty[0]} is 0; groups B, branches G, responses R, prompts P")


def _range(name: str, values, low: int, high: int, what: str) -> None:
    bad = np.argwhere((values < low) | (values > high))
    if bad.size:
        at = tuple(int(i) for i in bad[0])
        raise ValueError(f"{name}{list(at)} is {values[at]}; it must be from {low} to {high}, {what}")


def _ids(name: str, ids, valid, vocab: int) -> None:
    bad = np.argwhere(valid & ((ids < 0) | (ids >= vocab)))
    if bad.size:
        at = tuple(int(i) for i in bad[0])
        raise ValueError(
            f"{name}{list(at)} is token id {ids[at]}; the model's vocabulary has ids 0 to {vocab - 1}. Is the"
            " tokenizer the model's own?"
        )


def _finite(name: str, values, where) -> None:
    if values is None:
        return
    bad = np.argwhere(where & ~np.isfinite(values))
    if bad.size:
        at = tuple(int(i) for i in bad[0])
        raise ValueError(f"{name}{list(at)} is {values[at]}; it must be finite")
