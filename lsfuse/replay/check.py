"""Checks of a batch on the host, before any work: what is wrong, in which group and branch, and what to do."""

import numpy as np

from lsfuse.model.config import ModelConfig
from lsfuse.replay.batch import Batch

_PER_TOKEN = ("completion_mask", "old_per_token_logps", "ref_per_token_logps", "loss_weights")


def check_batch(batch: Batch, model: ModelConfig) -> None:
    """Raises ValueError if `batch` is not one that `model` can be run on. Values in padding are not looked at.

    Shapes must agree; lengths must lie within the padded sizes and the model's context; token ids within its
    vocabulary; advantages, rewards, and the log-probs of tokens that carry loss must be finite.
    """
    b = Batch(**{f: _host(getattr(batch, f)) for f in batch.__dataclass_fields__ if f != "extras"})
    _shapes(b)
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


def _shapes(b: Batch) -> None:
    if b.completion_ids.ndim != 3 or b.prompt_ids.ndim != 2:
        raise ValueError(
            f"prompt_ids must be [B, P] and completion_ids [B, G, R]; got {b.prompt_ids.shape} and"
            f" {b.completion_ids.shape}"
        )
    groups, branches, response = b.completion_ids.shape
    expected = {"prompt_ids": (groups, b.prompt_ids.shape[1]), "prompt_lengths": (groups,), "group_sizes": (groups,)}
    expected |= {"completion_lengths": (groups, branches), "rewards": (groups, branches)}
    expected |= dict.fromkeys(_PER_TOKEN, (groups, branches, response))
    if b.advantages is not None:
        expected["advantages"] = (groups, branches, response)[: 3 if b.advantages.ndim == 3 else 2]
    for name, shape in expected.items():
        value = getattr(b, name)
        if value is not None and value.shape != shape:
            raise ValueError(
                f"{name} has shape {value.shape}; completion_ids {b.completion_ids.shape} asks for {shape}"
            )


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
