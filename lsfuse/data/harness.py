"""Any task of lm-eval (EleutherAI's evaluation harness) on our models: log-likelihoods through our forward pass,
generation through our sampler.

    from lm_eval import simple_evaluate
    simple_evaluate(data.harness_model(config, params, tokenizer), tasks=["arc_easy"], num_fewshot=0)

lm-eval comes with the extra `[eval]`; it is imported only when a model is made for it.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from lsfuse import rl
from lsfuse.fusion.evaluate import final_hidden
from lsfuse.fusion.forward import over_chunks
from lsfuse.model.config import ModelConfig
from lsfuse.types import Array, Params

_STEP = 64  # lengths are padded to multiples of this, so that few programs are compiled


def score_continuations(
    config: ModelConfig,
    params: Params,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    batch_size: int = 8,
    max_length: int | None = None,
    progress: bool = False,
) -> list[tuple[float, bool]]:
    """(log-probability of the continuation, in nats; whether each of its tokens is the likeliest) of every pair.

    pairs: ids of (context, continuation), neither empty. What does not fit into max_length tokens (the model's context
    by default) is cut from the context's left. Longest first, so that memory runs out at once or not at all.

    Raises: ValueError for an empty context, or a continuation that does not fit.
    """
    room = max_length or config.max_position_embeddings
    rows = []
    for n, (context, continuation) in enumerate(pairs):
        if not context or not continuation or len(continuation) > room:
            raise ValueError(
                f"pair {n} has {len(context)} tokens of context and {len(continuation)} of continuation; it needs one"
                f" of each at least, and at most {room} of continuation"
            )
        rows.append(np.array([*context, *continuation][-(room + 1) :], np.int32))
    order = sorted(range(len(rows)), key=lambda n: -len(rows[n]))
    out: list[tuple[float, bool]] = [(0.0, False)] * len(rows)
    with tqdm.tqdm(total=len(rows), desc="loglikelihood", disable=None if progress else True) as bar:
        for start in range(0, len(order), batch_size):
            members = order[start : start + batch_size]
            width = -(-(len(rows[members[0]]) - 1) // _STEP) * _STEP
            ids = np.zeros((batch_size, width), np.int32)
            labels, lengths = np.zeros_like(ids), np.zeros(batch_size, np.int32)
            for b, n in enumerate(members):
                lengths[b] = len(rows[n]) - 1
                ids[b, : lengths[b]], labels[b, : lengths[b]] = rows[n][:-1], rows[n][1:]
            logps, likeliest = (np.asarray(x) for x in _label_scores(config, params, ids, lengths, labels))
            for b, n in enumerate(members):
                last = slice(lengths[b] - len(pairs[n][1]), lengths[b])
                out[n] = float(logps[b, last].astype(np.float64).sum()), bool(likeliest[b, last].all())
            bar.update(len(members))
    return out


@functools.partial(jax.jit, static_argnums=0)
def _label_scores(config: ModelConfig, params: Params, ids: Array, lengths: Array, labels: Array):
    """(log-probs of the labels, whether they are the likeliest) [B, T]."""

    def measure(logits: Array, label: Array):
        logps: Array = jax.nn.log_softmax(logits)
        return jnp.take_along_axis(logps, label[:, None], 1)[:, 0], logits.argmax(-1) == label

    hidden = final_hidden(params, config, ids, lengths)
    found = over_chunks((params,), (config,), (hidden,), measure, jnp.asarray(labels).reshape(-1))
    return tuple(x.reshape(ids.shape) for x in found)


def cut_at(text: str, stops: Iterable[str]) -> str:
    """The text before the first of any of the stops."""
    return text[: min((at for stop in stops if stop and (at := text.find(stop)) >= 0), default=len(text))]


def generate(
    config: ModelConfig,
    params: Params,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    stop_ids: Sequence[int] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 8,
) -> list[list[int]]:
    """One response of at most max_tokens to every prompt, as ids, the stop token left out. Prompts that leave no room
    for max_tokens in the model's context are cut from the left.

    Raises: ValueError for an empty prompt, or max_tokens that leave no room for any.
    """
    room = config.max_position_embeddings - max_tokens
    if room < 1 or not all(len(p) for p in prompts):
        raise ValueError(
            f"generation of {max_tokens} tokens needs prompts of at least one token and fewer than the model's context"
            f" of {config.max_position_embeddings}"
        )
    sampler = rl.make_sampler(
        config,
        num_generations=1,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        stop_ids=tuple(stop_ids),
    )
    out: list[list[int]] = []
    for start in range(0, len(prompts), batch_size):
        rows = [np.array(p[-room:], np.int32) for p in prompts[start : start + batch_size]]
        width = -(-max(map(len, rows)) // _STEP) * _STEP
        ids, lengths = np.zeros((batch_size, width), np.int32), np.zeros(batch_size, np.int32)
        for b, row in enumerate(rows):
            ids[b, : len(row)], lengths[b] = row, len(row)
        samples = sampler(params, ids, lengths, jax.random.fold_in(jax.random.key(seed), start))
        for b in range(len(rows)):
            made = np.asarray(samples.completion_ids)[b, 0, : int(samples.completion_lengths[b, 0])].tolist()
            out.append(made[:-1] if made and made[-1] in stop_ids else made)
    return out


def harness_model(
    config: ModelConfig,
    params: Params,
    tokenizer: Any,
    *,
    batch_size: int = 8,
    max_length: int | None = None,
    max_gen_toks: int = 256,
    add_bos: bool | None = None,
    seed: int = 0,
) -> Any:
    """An `lm_eval.api.model.LM` of our (config, params), for `lm_eval.simple_evaluate`.

    Args:
        tokenizer: an `lsfuse.io.Tokenizer`.
        max_length: tokens of context; the model's own by default.
        max_gen_toks: longest answer where a task does not say.
        add_bos: whether texts begin with the tokenizer's special tokens; None: Gemma's do.
        seed: of sampling, for tasks that ask for it.

    Answers run to max_gen_toks or an end token, and are then cut at the task's stop strings.

    Raises: ImportError without lm-eval; ValueError for a tokenizer of more ids than the model's vocabulary, or one that
    has neither a first nor an end token to condition an empty context on.
    """
    try:
        from lm_eval.api.model import TemplateLM
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    except ImportError:
        raise ImportError("tasks of lm-eval need the extra: pip install 'lsfuse[eval]'") from None
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} ids, the model's vocabulary {config.vocab_size}")
    ends = [int(i) for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None]
    if not ends:
        raise ValueError("the tokenizer has neither a first nor an end token, which an empty context is made of")
    first = ends[0]
    special = config.family.startswith("gemma") if add_bos is None else add_bos
    room = min(max_length or config.max_position_embeddings, config.max_position_embeddings)
    stop_ids = tuple(tokenizer.stop_ids)

    class Model(TemplateLM):
        @property
        def eot_token_id(self) -> int:
            return stop_ids[0] if stop_ids else first

        @property
        def prefix_token_id(self) -> int:
            return first

        @property
        def max_length(self) -> int:
            return room

        @property
        def tokenizer_name(self) -> str:
            return config.family

        def apply_chat_template(self, chat_history, add_generation_prompt=True) -> str:
            return tokenizer.apply_chat_template(chat_history, add_generation_prompt)

        def tok_encode(self, string, add_special_tokens=None, **kwargs) -> list[int]:
            del kwargs
            return tokenizer.encode(string, special if add_special_tokens is None else add_special_tokens)

        def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
            del kwargs
            pairs = [(context, continuation) for _, context, continuation in requests]
            found = score_continuations(config, params, pairs, batch_size, room, not disable_tqdm)
            for (key, *_), result in zip(requests, found, strict=True):
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, result)
            return found

        def loglikelihood_rolling(self, requests, disable_tqdm=False) -> list[float]:
            pairs: list[tuple[list[int], list[int]]] = []
            owner: list[int] = []
            for n, request in enumerate(requests):
                ids = self.tok_encode(request.args[0], add_special_tokens=False)
                windows = get_rolling_token_windows(ids, prefix_token=first, max_seq_len=room, context_len=1)
                for window in map(make_disjoint_window, windows):
                    pairs.append(window)
                    owner.append(n)
            totals = [0.0] * len(requests)
            found = score_continuations(config, params, pairs, batch_size, room, not disable_tqdm)
            for n, (logp, _) in zip(owner, found, strict=True):
                totals[n] += logp
            for request, total in zip(requests, totals, strict=True):
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            return totals

        def generate_until(self, requests, disable_tqdm=False) -> list[str]:
            groups: dict[tuple, list[int]] = {}
            for n, request in enumerate(requests):
                groups.setdefault(_settings(request.args[1], max_gen_toks), []).append(n)
            out = [""] * len(requests)
            with tqdm.tqdm(total=len(requests), desc="generate", disable=disable_tqdm) as bar:
                for (stops, tokens, temperature, top_p), members in groups.items():
                    options = {"stop_ids": stop_ids, "temperature": temperature, "top_p": top_p, "seed": seed}
                    for start in range(0, len(members), batch_size):
                        some = members[start : start + batch_size]
                        prompts = [self.tok_encode(requests[n].args[0]) or [first] for n in some]
                        options["seed"] = seed + start
                        made = generate(config, params, prompts, tokens, batch_size=batch_size, **options)
                        for n, ids in zip(some, made, strict=True):
                            out[n] = cut_at(tokenizer.decode(ids), stops)
                            self.cache_hook.add_partial("generate_until", requests[n].args, out[n])
                        bar.update(len(some))
            return out

    return Model()


def _settings(gen_kwargs: dict[str, Any], max_gen_toks: int) -> tuple[tuple[str, ...], int, float, float]:
    """(stop strings, tokens, temperature, top_p) of a request, as lm-eval names them; greedy unless it samples."""
    until = gen_kwargs.get("until") or ()
    stops = (until,) if isinstance(until, str) else tuple(until)
    names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    tokens = next((int(gen_kwargs[name]) for name in names if gen_kwargs.get(name) is not None), max_gen_toks)
    temperature = float(gen_kwargs.get("temperature") or 0.0)
    if gen_kwargs.get("do_sample") is False:
        temperature = 0.0
    elif gen_kwargs.get("do_sample") and gen_kwargs.get("temperature") is None:
        temperature = 1.0
    return stops, tokens, temperature, float(gen_kwargs.get("top_p") or 1.0)
