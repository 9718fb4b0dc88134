"""The oracle: what every gradient of this project is measured against.

Slow and obvious on purpose. Each row (one prompt and one response) is run alone, unpadded, in float64, with plain
softmax attention under an explicit mask, one block after the other, and differentiated by `jax.grad`. Everything is
written from the published definitions and shares no attention, mask, layer or backward code with the package:

    RMSNorm         Zhang & Sennrich, arXiv 1910.07467:  g · x / sqrt(mean(x²) + eps); Gemma stores g - 1
    rotary          Su et al., arXiv 2104.09864, in the half-split pairing of the published Llama checkpoints; "linear"
                    rescaling divides the frequencies by a factor, "llama3" is the piecewise rule of Llama 3.1, "yarn"
                    that of Peng et al., arXiv 2309.00071, which also stretches queries and keys
    SwiGLU          Shazeer, arXiv 2002.05202:  down(act(gate(x)) · up(x)); plain: out(act(in(x)))
    grouped heads   Ainslie et al., arXiv 2305.13245: query head n reads kv head n // (N / K)
    window          Mistral 7B, arXiv 2310.06825: a token sees itself and the W - 1 tokens before it
    soft-caps       Gemma 2, arXiv 2408.00118: c · tanh(s / c) of attention scores and of logits; so are norms after
                    attention and after the FFN, before the residual sum

Partial prefix gradients: for "stop" and for an int n, keys and values of the prompt tokens before position P − n are
constants in every block ("stop" is n = 1). Those tokens reach the loss through their keys and values only, so nothing
of their computation carries gradient.
"""

import functools
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lsfuse.model.config import BlockConfig, ModelConfig, RopeScaling
from lsfuse.replay.batch import Batch

Grads = dict[str, Any]


def constant_tokens(prefix_grad: str | int, prompt_length: int) -> int:
    """Number of leading prompt tokens whose keys and values are constants."""
    if prefix_grad == "exact":
        return 0
    n = 1 if prefix_grad == "stop" else int(prefix_grad)
    return max(prompt_length - n, 0)


def split_blocks(config: ModelConfig, params: Grads) -> list[dict[str, Any]]:
    """One parameter dict per block from the stacked runs (a run: consecutive blocks with parameters of one shape)."""
    out: list[dict[str, Any]] = []
    run, inside = -1, 0
    previous = None
    for block in config.blocks:
        attends = block.attention in ("full", "sliding")
        kind = (attends or block.attention, block.num_kv_heads, block.ffn, block.ffn_width, block.parallel)
        if kind != previous:
            run, inside, previous = run + 1, 0, kind
        out.append({name: leaf[inside] for name, leaf in params["runs"][str(run)].items()})
        inside += 1
    return out


def rms_norm(x, gain, eps: float, offset: float = 0.0):
    return (offset + gain) * x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def normed(x, gain, config: ModelConfig):
    return rms_norm(x, gain, config.rms_norm_eps, config.norm_offset)


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Angle per position of every rotary pair, float64 [head_dim / 2]."""
    freqs = []
    for pair in range(head_dim // 2):
        freq = theta ** (-2.0 * pair / head_dim)
        if scaling is not None and scaling.kind == "linear":
            freq = freq / scaling.factor
        elif scaling is not None and scaling.kind == "yarn":
            # The pair that turns r times within the original length is number h · ln(length / 2πr) / (2 ln theta).
            border = [
                head_dim * math.log(scaling.original_max_position / (2.0 * math.pi * turns)) / (2.0 * math.log(theta))
                for turns in (scaling.beta_fast, scaling.beta_slow)
            ]
            if scaling.truncate:
                border = [math.floor(border[0]), math.ceil(border[1])]
            first, last = max(border[0], 0), min(border[1], head_dim - 1)
            slow = (pair - first) / (last - first if last > first else 0.001)
            slow = min(max(slow, 0.0), 1.0)
            freq = slow * freq / scaling.factor + (1.0 - slow) * freq
        elif scaling is not None:
            wavelength = 2.0 * math.pi / freq
            longest = scaling.original_max_position / scaling.low_freq_factor
            shortest = scaling.original_max_position / scaling.high_freq_factor
            if wavelength > longest:
                freq = freq / scaling.factor
            elif wavelength >= shortest:
                turns = scaling.original_max_position / wavelength
                blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
                freq = (1.0 - blend) * freq / scaling.factor + blend * freq
        freqs.append(freq)
    return np.asarray(freqs, np.float64)


def rotary_length(scaling: RopeScaling | None) -> float:
    """What rotation multiplies the length of queries and of keys by."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0


def rotate(x, freqs):
    """Rotate pairs (i, i + H/2) of x [T, heads, H] by position · frequency."""
    angle = np.arange(x.shape[0])[:, None] * freqs[None, :]
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def project(x, p, name: str):
    y = x @ p[name]
    return y + p[name + "_bias"] if name + "_bias" in p else y


def attention(x, p, block: BlockConfig, config: ModelConfig, constant):
    """Causal self-attention of x [T, D]; keys and values where `constant` [T] is true carry no gradient."""
    tokens = x.shape[0]
    if block.attention == "linear_map":
        y = project(normed(x, p["input_layernorm"], config), p, "linear_attn")
        return normed(y, p["post_attention_layernorm"], config) if config.post_norms else y
    n_heads, k_heads, h = config.num_heads, block.num_kv_heads, config.head_dim
    theta, scaling = config.rope_theta, config.rope_scaling
    if block.local_rope:
        theta, scaling = config.local_rope_theta, config.local_rope_scaling
    freqs, length = rotary_frequencies(h, theta, scaling), rotary_length(scaling)
    x = normed(x, p["input_layernorm"], config)
    q = project(x, p, "q_proj").reshape(tokens, n_heads, h)
    k = project(x, p, "k_proj").reshape(tokens, k_heads, h)
    v = project(x, p, "v_proj").reshape(tokens, k_heads, h)
    if config.qk_norm:
        q, k = normed(q, p["q_norm"], config), normed(k, p["k_norm"], config)
    q, k = length * rotate(q, freqs), length * rotate(k, freqs)
    k = jnp.where(constant[:, None, None], jax.lax.stop_gradient(k), k)
    v = jnp.where(constant[:, None, None], jax.lax.stop_gradient(v), v)
    k, v = (jnp.repeat(x, n_heads // k_heads, axis=1) for x in (k, v))
    scores = jnp.einsum("qnh,knh->nqk", q, k) / math.sqrt(config.query_pre_attn_scalar or h)
    scores = softcap(scores, config.attn_logit_softcapping)
    distance = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    visible = distance >= 0
    if block.attention == "sliding":
        visible &= distance < block.window
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    y = project(jnp.einsum("nqk,knh->qnh", weights, v).reshape(tokens, n_heads * h), p, "o_proj")
    return normed(y, p["post_attention_layernorm"], config) if config.post_norms else y


def softcap(x, cap: float | None):
    return x if cap is None else cap * jnp.tanh(x / cap)


def activation(x, name: str):
    if name == "silu":
        return x / (1.0 + jnp.exp(-x))
    if name == "gelu":
        return 0.5 * x * (1.0 + jax.lax.erf(x / math.sqrt(2.0)))
    if name == "gelu_tanh":
        return 0.5 * x * (1.0 + jnp.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    if name == "relu":
        return jnp.maximum(x, 0.0)
    raise ValueError(name)


def ffn(x, p, block: BlockConfig, config: ModelConfig):
    x = normed(x, p["pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"], config)
    if block.ffn == "plain":
        y = project(activation(project(x, p, "fc_in"), config.hidden_act), p, "fc_out")
    else:
        hidden = activation(project(x, p, "gate_proj"), config.hidden_act) * project(x, p, "up_proj")
        y = project(hidden, p, "down_proj")
    return normed(y, p["post_feedforward_layernorm"], config) if config.post_norms else y


def _hidden(config: ModelConfig, params: Grads, ids, constant):
    x = read = config.embed_scale * params["embed_tokens"][ids]
    for block, p in zip(config.blocks, split_blocks(config, params), strict=True):
        if not block.beside:
            read = x
        contribution = 0.0
        if block.attention != "none":
            contribution = attention(read, p, block, config, constant)
        if block.ffn_width:
            source = read if block.parallel else read + contribution
            contribution = contribution + ffn(source, p, block, config)
        x = x + contribution
    return normed(x, params["norm"], config)


def _logits(config: ModelConfig, params: Grads, hidden):
    head = params["embed_tokens"].T if config.tie_word_embeddings else params["lm_head"]
    return softcap(hidden @ head, config.final_logit_softcapping)


@functools.partial(jax.jit, static_argnums=0)
def _row(config: ModelConfig, params: Grads, ids, constant, temperature, cotangents):
    """One row ids [T] at a temperature: log-probs and entropies [T − 1] of tokens 1 … T − 1, and the gradient of
    their scalar product with `cotangents` (a pair [T − 1])."""

    def scores(params):
        hidden = _hidden(config, params, ids, constant)[:-1]
        logp = jax.nn.log_softmax(_logits(config, params, hidden) / temperature, axis=-1)
        chosen = logp[jnp.arange(len(ids) - 1), ids[1:]]
        return chosen, -jnp.sum(jnp.exp(logp) * logp, axis=-1)

    def weighted(params):
        chosen, entropies = scores(params)
        return chosen @ cotangents[0] + entropies @ cotangents[1], (chosen, entropies)

    grads, out = jax.grad(weighted, has_aux=True)(params)
    return out, grads


def as_float64(tree):
    """Every floating leaf in float64; call it inside `jax.enable_x64(True)`."""

    def widen(x):
        x = np.asarray(x)
        return jnp.asarray(x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x)

    return jax.tree.map(widen, tree)


def hidden(config: ModelConfig, params: Grads, ids) -> np.ndarray:
    """Hidden states after the final norm of one row ids [T]: float64 [T, D]."""
    with jax.enable_x64(True):
        return np.asarray(_hidden(config, as_float64(params), np.asarray(ids), np.zeros(len(ids), bool)))


def logits(config: ModelConfig, params: Grads, ids) -> np.ndarray:
    """Next-token logits of one row ids [T]: float64 [T, V]."""
    with jax.enable_x64(True):
        params = as_float64(params)
        states = _hidden(config, params, np.asarray(ids), np.zeros(len(ids), bool))
        return np.asarray(_logits(config, params, states))


def _rows(batch: Batch):
    """(group, branch, prompt length, response length, ids of prompt and response) of every response with a token."""
    prompts, responses = np.asarray(batch.prompt_ids), np.asarray(batch.completion_ids)
    for b, g in np.ndindex(responses.shape[:2]):
        p, r = int(batch.prompt_lengths[b]), int(batch.completion_lengths[b, g])
        if g < batch.group_sizes[b] and r > 0:
            yield b, g, p, r, np.concatenate([prompts[b, :p], responses[b, g, :r]]).astype(np.int32)


def _visit(config: ModelConfig, params: Grads, batch: Batch, prefix_grad, temperature, cotangents):
    """Every row alone: (log-probs, entropies) padded with zeros to [B, G, R], and the summed gradient."""
    out = np.zeros((2, *batch.completion_ids.shape))
    total = jax.tree.map(np.zeros_like, params)
    for b, g, p, r, ids in _rows(batch):
        constant = np.arange(p + r) < constant_tokens(prefix_grad, p)
        padded = np.zeros((2, p + r - 1))
        padded[:, p - 1 :] = cotangents[:, b, g, :r]
        scores, grads = _row(config, params, ids, constant, temperature, tuple(padded))
        out[:, b, g, :r] = [x[p - 1 :] for x in scores]
        total = jax.tree.map(np.add, total, jax.tree.map(np.asarray, grads))
    return out, total


def per_token_logps(config: ModelConfig, params: Grads, batch: Batch, temperature: float = 1.0):
    """(log-probs, entropies) of every response token, numpy float64 [B, G, R], zero where no token exists."""
    with jax.enable_x64(True):
        zeros = np.zeros((2, *batch.completion_ids.shape))
        out, _ = _visit(config, as_float64(params), batch, "exact", temperature, zeros)
        return tuple(out)


@functools.cache
def _compiled(objective):
    return jax.jit(jax.value_and_grad(lambda scores, batch: objective(*scores, batch), has_aux=True))


def value_and_grad(
    objective,
    config: ModelConfig,
    params: Grads,
    batch: Batch,
    prefix_grad: str | int = "exact",
    temperature: float = 1.0,
):
    """((loss, metrics), grads) in float64, evaluated at the given values of `params` whatever their dtype.

    objective: called once on the whole batch, after its `prepare` if it has one. metrics: floats. The chain rule
    through the log-probs and entropies is the sum over rows; everything in a row, and the objective, is `jax.grad`.
    """
    with jax.enable_x64(True):
        params, batch = as_float64(params), as_float64(batch)
        prepare = getattr(objective, "prepare", None)
        if prepare is not None:
            batch = prepare(batch)
        run = functools.partial(_visit, config, params, batch, prefix_grad, temperature)
        scores, _ = run(np.zeros((2, *batch.completion_ids.shape)))
        (loss, metrics), cotangents = _compiled(objective)(tuple(scores), batch)
        _, grads = run(np.stack(cotangents))
        metrics = {k: float(v.compute() if hasattr(v, "compute") else v) for k, v in metrics.items()}
        return (float(loss), metrics), grads


def _slices(tree: Grads):
    """(path, array) of every leaf, stacked runs cut into their blocks."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = "/".join(str(getattr(key, "key", key)) for key in path)
        leaf = np.asarray(leaf, np.float64)
        if name.startswith("runs/"):
            for i, part in enumerate(leaf):
                yield f"{name}[{i}]", part
        else:
            yield name, leaf


def grad_errors(grads: Grads, oracle_grads: Grads, cancelled: float = 1e-14) -> dict[str, float]:
    """Relative error of every leaf; 0 or infinity where the oracle's leaf is zero up to cancellation.

    A leaf whose oracle norm is at most `cancelled` × the whole gradient's is zero by cancellation: the same bound holds
    for ours. If the oracle's whole gradient is zero, nothing reaches the loss and ours must be zero exactly, as must
    embedding rows that the oracle leaves untouched.
    """
    ours, theirs = dict(_slices(grads)), dict(_slices(oracle_grads))
    if ours.keys() != theirs.keys():
        raise AssertionError(f"leaves differ: {sorted(ours.keys() ^ theirs.keys())}")
    whole = math.sqrt(sum(float(np.sum(b * b)) for b in theirs.values()))
    errors = {}
    for name, b in theirs.items():
        a = ours[name]
        if a.shape != b.shape:
            raise AssertionError(f"{name}: shape {a.shape}, the oracle's {b.shape}")
        if not np.all(np.isfinite(a)):
            errors[name] = math.inf
            continue
        norm = np.linalg.norm(b)
        if whole == 0.0:
            errors[name] = 0.0 if not a.any() else math.inf
        elif norm <= cancelled * whole:
            errors[name] = 0.0 if np.linalg.norm(a) <= cancelled * whole else math.inf
        else:
            errors[name] = float(np.linalg.norm(a - b) / norm)
        if name == "embed_tokens" and a[~b.any(axis=1)].any():
            errors[name] = math.inf
    return errors


# Largest error of any leaf that was close enough, and the test it was in, by dtype; the suite prints it at its end.
WORST: dict[str, tuple[float, str]] = {}


def assert_grads_close(grads: Grads, oracle_grads: Grads, tol: float, cancelled: float | None = None) -> None:
    """Every leaf: ‖a − b‖₂ / ‖b‖₂ ≤ tol (design section 7), every block of a stacked run on its own.

    cancelled: bound on leaves zero by cancellation, relative to the whole gradient; 1e-14 in float64 (45 rounding
        errors), the same number of rounding errors in the leaves' own dtype otherwise.
    """
    dtypes = {np.asarray(leaf).dtype for leaf in jax.tree.leaves(grads)}
    if cancelled is None:
        cancelled = 1e-14 * max(float(jnp.finfo(d).eps / jnp.finfo(jnp.float64).eps) for d in dtypes)
    errors = grad_errors(grads, oracle_grads, cancelled)
    bad = {name: error for name, error in errors.items() if not error <= tol}
    if bad:
        lines = "\n".join(f"  {name}: {error:.3e}" for name, error in sorted(bad.items(), key=lambda e: -e[1]))
        raise AssertionError(f"{len(bad)} of {len(errors)} leaves exceed {tol:g}:\n{lines}")
    dtype = "/".join(sorted(d.name for d in dtypes))
    test = os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)")
    WORST[dtype] = max(WORST.get(dtype, (0.0, "")), (max(errors.values(), default=0.0), test))
