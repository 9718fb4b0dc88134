"""Text for distillation: windows in an order that one integer fixes, and measures on text held out of them."""

import hashlib
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from lsfuse import data
from lsfuse.fusion.distil import Teacher, token_scores
from lsfuse.fusion.texts import Texts, windows
from lsfuse.model import ModelConfig
from lsfuse.types import Array, Params


def read_text(path: str | pathlib.Path) -> str:
    """Raises: FileNotFoundError; ValueError for a file that is not UTF-8."""
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"config.data.path: there is no file {path}")
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"config.data.path: {path} is not UTF-8 text ({error})") from None


def check_positions(field: str, tokens: int, model: ModelConfig) -> None:
    """Raises ValueError, naming the config's field, for more tokens than the model has positions for."""
    if tokens > model.max_position_embeddings:
        raise ValueError(
            f"config.{field}: {tokens} tokens exceed the model's {model.max_position_embeddings} positions"
        )


class TextWindows:
    """Windows of a text without its held-out characters.

    What lies before and behind these is tokenised and cut apart, so that no window contains or spans them.
    held_out: (first, end) characters; None is the last twentieth. sha256: of the text.

    Raises: ValueError for characters out of range.
    """

    def __init__(self, text: str, tokenizer: Any, held_out: tuple[int, int] | None = None):
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        held_out = (len(text) - len(text) // 20, len(text)) if held_out is None else held_out
        if len(held_out) != 2 or not 0 <= held_out[0] < held_out[1] <= len(text):
            raise ValueError(
                f"config.data.held_out must be (first, end) with 0 <= first < end <= {len(text)}, the text's"
                f" characters, got {tuple(held_out)}"
            )
        first, end = held_out
        self.held_out = text[first:end]
        self.tokenizer = tokenizer
        self.parts = [np.array(tokenizer.encode(part), np.int32) for part in (text[:first], text[end:])]

    def size(self, context: int) -> int:
        """Windows of that many tokens. Raises ValueError if there is none."""
        count = sum(len(part) // context for part in self.parts)
        if not count:
            raise ValueError(
                f"a context of {context} tokens is longer than the text: its parts before and behind the held-out"
                f" characters have {len(self.parts[0])} and {len(self.parts[1])} tokens"
            )
        return count

    def batch(self, context: int, count: int, seed: int, position: int) -> tuple[np.ndarray, int]:
        """int32 [count, context], and the position behind it. position: tokens read before, over all contexts; stages
        of one context go on where the last one stopped."""
        first = -(-position // context)
        split = len(self.parts[0]) // context
        rows = []
        for i in data.indices(self.size(context), seed, first, count):
            part, at = (self.parts[0], i) if i < split else (self.parts[1], i - split)
            rows.append(part[at * context : (at + 1) * context])
        return np.stack(rows), (first + count) * context

    def held_out_windows(self, window: int, count: int, field: str) -> Texts:
        """Raises: ValueError, naming the config's field, if the held-out text is too short."""
        try:
            return windows(self.held_out, self.tokenizer, window, count)
        except ValueError as error:
            raise ValueError(f"config.{field}: of the held-out characters, {error}") from None


def scores(params: Params, config: ModelConfig, teacher: Teacher | None, texts: Texts) -> dict[str, np.ndarray]:
    """`token_scores` of texts of full length, one at a time: float64 [N, T] each; "nll" without its last column."""
    found: dict[str, list[np.ndarray]] = {}
    for ids, lengths in texts.batches(1):
        for name, value in token_scores(params, config, teacher, jnp.asarray(ids), jnp.asarray(lengths)).items():
            found.setdefault(name, []).append(np.asarray(value, np.float64)[0])
    out = {name: np.stack(rows) for name, rows in found.items()}
    return {**out, "nll": out["nll"][:, :-1]}


def evaluate(params: Params, config: ModelConfig, teacher: Teacher | None, texts: Texts) -> dict[str, float]:
    """Means over tokens: "perplexity"; with a teacher "kl", nats a token, and "top1"."""
    means = {name: float(value.mean()) for name, value in scores(params, config, teacher, texts).items()}
    return {"perplexity": float(np.exp(means.pop("nll"))), **means}


def probe(params: Params, config: ModelConfig, texts: Texts) -> dict[str, float]:
    """Whether the far context is of use: perplexity by position, and of text that has been there before.

    Returns: "probe/<first>-<last>", perplexity of the tokens at these positions, in bands that double from a sixteenth
    of the context; "probe/repeat", perplexity of the second half of windows that repeat their first half, which a model
    that looks half a context back needs not guess.
    """
    context = texts.ids.shape[1]
    nll = scores(params, config, None, texts)["nll"]  # column t: of the token at position t + 1
    edges = [0] + [context >> k for k in (4, 3, 2, 1, 0) if context >> k > 1]
    found = {}
    for first, end in zip(edges, edges[1:], strict=False):
        band = nll[:, max(first - 1, 0) : end - 1]
        found[f"probe/{first}-{end - 1}"] = float(np.exp(band.mean()))
    half = context // 2
    twice = np.concatenate([texts.ids[:, :half], texts.ids[:, :half]], 1)
    again = scores(params, config, None, Texts(twice, np.full(len(twice), 2 * half, np.int32)))["nll"]
    return {**found, "probe/repeat": float(np.exp(again[:, half:].mean()))}


def full(ids: np.ndarray) -> tuple[Array, Array]:
    """(ids, lengths) of windows without padding, on the device."""
    return jnp.asarray(ids), jnp.full(len(ids), ids.shape[1], jnp.int32)
