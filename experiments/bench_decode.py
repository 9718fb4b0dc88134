"""Decoding against one shared prefix, beside G decodes with copied caches: time of a step and its roofline.

    python -m experiments.bench_decode --P=4096 --R=32 --G=8

The defaults are a Llama-shaped model of 8 blocks (d 512, 8 query and 4 kv heads of 64, FFN 1,536, vocabulary 8,192) in
float32, one group. Three decoders differ in attention only and share everything else, sampling included:

    shared   what `rl.sample` runs: all branches read the one prefix state
    tiled    every branch has its own copy of it, [K, P + R, H], read by the same tiled kernel, branch after branch
    batched  the same copies, read whole by products batched over branches, softmax in between

The baseline is the faster of the last two. A step's time excludes prefill, and what a call costs without steps. The
roofline time of a step is max(bytes / bandwidth, FLOPs / matmul rate), both rates measured between the decoders' turns
by a sum over a large array and a large product; bytes are parameters once, keys and values of the prefix once (shared)
or once per branch, and the branches' own. Everything is timed in turn and the fastest of the repeats counts. On a CPU
all of it is given twice: in CPU seconds, which others on the machine disturb little, and in wall seconds.

Writes table.txt, rows.csv, rows.json and bench.png into --out.
"""

import dataclasses
import pathlib
import platform
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from absl import app, flags
from jax import lax

from experiments.tables import check_out, write_table
from lsfuse import model as models
from lsfuse.kernels import tail_attention
from lsfuse.replay import state_bytes_per_token
from lsfuse.rl import decode as decoding
from lsfuse.rl.sampler import branch_keys
from lsfuse.train import roofline
from lsfuse.types import Array, Params

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

_P = flags.DEFINE_integer("P", 4096, "Prompt tokens.", lower_bound=1)
_R = flags.DEFINE_integer("R", 32, "Tokens decoded in every branch.", lower_bound=1)
_G = flags.DEFINE_integer("G", 8, "Branches.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Timed runs of every decoder.", lower_bound=1)
_BLOCKS = flags.DEFINE_integer("blocks", 8, "Blocks of the model.", lower_bound=1)
_D = flags.DEFINE_integer("d", 512, "Width of the model; heads of 64, half as many kv heads.", lower_bound=128)
_FFN = flags.DEFINE_integer("ffn", 1536, "Hidden channels of the FFNs.", lower_bound=1)
_VOCAB = flags.DEFINE_integer("vocab", 8192, "Vocabulary.", lower_bound=2)
_OUT = flags.DEFINE_string("out", "runs/bench_decode", "Folder for the results.")


@dataclasses.dataclass(frozen=True)
class Row:
    """One decoder's step by one clock ("cpu" or "wall"). seconds, roofline_seconds: of one step for all branches;
    bytes, flops: what it must move and compute; reached: roofline_seconds / seconds."""

    clock: str
    decoder: str
    seconds: float
    roofline_seconds: float
    reached: float
    bytes: float
    flops: float


# --- the baseline: a copy of the prefix for every branch --------------------------------------------------------------


def copied_caches(prefilled: decoding.Prefilled, branches: int, max_tokens: int) -> dict[str, decoding.Cache]:
    """[L · G, K, P + R, H] by run: the prefix once per branch, and room for what the branch decodes."""

    def copy(x):
        return jnp.pad(jnp.repeat(x, branches, 0), ((0, 0), (0, 0), (0, max_tokens), (0, 0)))

    return {run: (copy(prefilled.state.k[run]), copy(prefilled.state.v[run])) for run in prefilled.state.k}


def write_copies(cache: decoding.Cache, layer: Array, k: Array, v: Array, position: Array) -> decoding.Cache:
    """Puts keys and values [K, 1, G, H] of one block at `position` of every branch."""

    def put(buffer, new):
        new = jnp.moveaxis(new, 2, 0)  # [G, K, 1, H]
        return lax.dynamic_update_slice(buffer, new, (layer * new.shape[0], 0, position, 0))

    return put(cache[0], k), put(cache[1], v)


def tiled_attention(prefilled: decoding.Prefilled) -> decoding.Attend:
    """Branch after branch: a tile of a branch's keys is read while it is in the cache, as in the shared decoder."""

    def attend(run, layer, q, k, v, cache, row):
        length = prefilled.lengths[0] + row.step
        cache = write_copies(cache, layer, k, v, length)
        branches = q.shape[2]

        def branch(b):
            prefix = tail_attention.Prefix(cache[0], cache[1], layer * branches + b, length)
            q_b, k_b, v_b = (lax.dynamic_slice_in_dim(x, b, 1, 2) for x in (q, k, v))
            return tail_attention.forward(q_b, k_b, v_b, jnp.ones(1, jnp.int32), prefix)[0]

        o = lax.map(branch, jnp.arange(branches))
        return jnp.moveaxis(o[:, :, 0], 0, 2).reshape(q.shape), cache

    return attend


def batched_attention(prefilled: decoding.Prefilled) -> decoding.Attend:
    """All branches together: a kv head's products over the whole length of the caches, batched over branches."""

    def attend(run, layer, q, k, v, cache, row):
        length = prefilled.lengths[0] + row.step
        cache = write_copies(cache, layer, k, v, length)
        branches, (_, _, size, head_dim) = q.shape[2], cache[0].shape

        def head(h):
            corner, shape = (layer * branches, h, 0, 0), (branches, 1, size, head_dim)
            keys, values = (lax.dynamic_slice(x, corner, shape)[:, 0] for x in cache)
            scores = jnp.einsum("brh,bsh->brs", q[h, 0] * head_dim**-0.5, keys)
            scores = jnp.where(jnp.arange(size) <= length, scores, -jnp.inf)
            return jnp.einsum("brs,bsh->brh", jax.nn.softmax(scores), values)

        return lax.map(head, jnp.arange(q.shape[0]))[:, None], cache

    return attend


# --- decoders and rooflines -------------------------------------------------------------------------------------------


def make_decoders(model: models.ModelConfig, params: Params, prompt: int, branches: int, max_tokens: int):
    """name -> function of a number of steps that decodes so many, prefill done before."""
    ids = np.random.default_rng(0).integers(0, model.vocab_size, (1, prompt), dtype=np.int32)
    lengths = np.full(1, prompt, np.int32)
    prefilled = jax.jit(decoding.prefill, static_argnums=(1, 4))(params, model, ids, lengths, 512)
    copies = jax.jit(lambda p: copied_caches(p, branches, max_tokens))(prefilled)
    own = decoding.shared_caches(model, 1, branches, max_tokens, params["embed_tokens"].dtype)
    kinds: dict[str, tuple[Callable[[decoding.Prefilled], decoding.Attend], dict]] = {
        "shared": (decoding.shared_attention, own),
        "tiled": (tiled_attention, copies),
        "batched": (batched_attention, copies),
    }

    def make(attention, caches):
        @jax.jit
        def run(params: Params, prefilled: decoding.Prefilled, caches, steps: Array):
            return decoding.decode(
                params,
                model,
                prefilled,
                attention(prefilled),
                caches,
                branch_keys(jax.random.key(1), 1, branches),
                max_tokens=max_tokens,
                temperature=1.0,
                top_p=1.0,
                stop_ids=(),
                steps=steps,
            )

        return lambda steps: jax.block_until_ready(run(params, prefilled, caches, jnp.int32(steps)))

    return {name: make(*kind) for name, kind in kinds.items()}


def step_bytes(
    model: models.ModelConfig, params: Params, prompt: int, branches: int, steps: int, copied: bool
) -> float:
    """Bytes that a step must read, on average over `steps`: all parameters but the embedding (of which G rows) unless
    it is the head too; the prefix, once or once per branch; each branch's own keys and values so far."""
    positions = (prompt - 1) * (branches if copied else 1) + branches * (steps + 1) / 2
    return roofline.weight_bytes(params) + positions * state_bytes_per_token(model, params["embed_tokens"].dtype)


def step_flops(model: models.ModelConfig, prompt: int, branches: int, steps: int) -> float:
    """FLOPs of a step, on average over `steps`; the same with shared and with copied caches."""
    visible = prompt - 1 + (steps + 1) / 2
    linear, attention = roofline.linear_flops(model), visible * roofline.pair_flops(model)
    return branches * (linear + roofline.head_flops(model) + attention)


def warm_up(decoders: dict[str, Callable], steps: int) -> None:
    """Compiles them, and checks that they decode the same tokens (but for draws that rounding decides)."""
    (ids, _, logps), *others = (decode(steps) for decode in decoders.values())
    for other_ids, _, other_logps in others:
        same = np.asarray(ids[..., :steps] == other_ids[..., :steps]).all(-1)
        if same.mean() < 0.9 or not np.allclose(logps[same], other_logps[same], atol=1e-3):
            raise AssertionError("the decoders do not agree; their times would mean nothing")


def measure(
    decoders: dict[str, Callable], steps: int, repeats: int
) -> dict[str, tuple[dict[str, float], dict[str, float]]]:
    """clock -> (seconds of a step by decoder, rates by probe), everything in turn, the fastest of the repeats."""
    clocks = {"cpu": time.process_time} if jax.default_backend() == "cpu" else {}
    clocks["wall"] = time.perf_counter
    probes = roofline.make_probes()
    warm_up(decoders, min(2, steps))
    for f, _ in probes.values():
        f()
    best: dict[tuple[str, str], float] = {}

    def timed(name: str, f: Callable, *args) -> None:
        start = {clock: now() for clock, now in clocks.items()}
        f(*args)
        for clock, now in clocks.items():
            best[clock, name] = min(now() - start[clock], best.get((clock, name), np.inf))

    for _ in range(repeats):
        for name, decode in decoders.items():
            # What a call costs besides its steps: copying caches into the loop, mostly.
            timed(f"{name} idle", decode, 0)
            timed(name, decode, steps)
            for _ in range(3):
                for probe, (f, _) in probes.items():
                    timed(probe, f)
    return {
        clock: (
            {name: (best[clock, name] - best[clock, f"{name} idle"]) / steps for name in decoders},
            {probe: amount / best[clock, probe] for probe, (_, amount) in probes.items()},
        )
        for clock in clocks
    }


def make_rows(
    clock: str, seconds: dict[str, float], rates: dict[str, float], moved: dict[str, float], flops: float
) -> list[Row]:
    rows = []
    for name, time_ in seconds.items():
        size = moved["shared" if name == "shared" else "copied"]
        ideal = roofline.roofline_seconds(size, flops, rates)
        rows.append(Row(clock, name, time_, ideal, ideal / time_, size, flops))
    return rows


def table(rows: list[Row], rates: dict[str, float]) -> tuple[str, dict[str, float]]:
    """The text for one clock, and its last line as numbers: speed-up measured and by roofline, and their ratio."""
    unit = f"{rows[0].clock} ms"
    lines = [f"{'decoder':>8} {'MB':>9} {'GFLOP':>7} {unit + '/step':>12} {'roofline':>9} {'reached':>8}"]
    for r in rows:
        lines.append(
            f"{r.decoder:>8} {r.bytes / 1e6:>9.1f} {r.flops / 1e9:>7.2f} {r.seconds * 1e3:>12.2f}"
            f" {r.roofline_seconds * 1e3:>9.2f} {r.reached:>8.2f}"
        )
    shared, baseline = rows[0], min(rows[1:], key=lambda r: r.seconds)
    measured = baseline.seconds / shared.seconds
    possible = baseline.roofline_seconds / shared.roofline_seconds
    result = {"speed_up": measured, "roofline_speed_up": possible, "reached": measured / possible}
    bandwidth = max(rates["read"], rates["copy"])
    lines.append(
        f"{bandwidth / 1e9:.1f} GB/s, {rates['matmul'] / 1e9:.1f} GFLOP/s; shared over {baseline.decoder}:"
        f" {measured:.2f} times faster, roofline {possible:.2f}, reached {measured / possible:.2f} (0.70 required)"
    )
    return "\n".join(lines), result


def save(out: pathlib.Path, rows: list[Row], text: str, setting: dict) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    first = [r for r in rows if r.clock == rows[0].clock]
    for axis, values, title in (
        (axes[0], [r.seconds * 1e3 for r in first], f"{first[0].clock} ms a step (measured)"),
        (axes[1], [r.roofline_seconds * 1e3 for r in first], f"{first[0].clock} ms a step (roofline)"),
    ):
        axis.bar([r.decoder for r in first], values, color=["C0", "0.6", "0.75"])
        axis.bar_label(axis.containers[0], fmt="%.3g")
        axis.set_title(title)
    figure.suptitle(f"P {setting['P']}, R {setting['R']}, G {setting['G']}")
    write_table(out, text, [dataclasses.asdict(r) for r in rows], setting, {"bench.png": figure})


def main(argv: list[str]) -> None:
    del argv
    try:
        out = check_out(_OUT.value)
    except ValueError as error:
        sys.exit(f"error: {error}")
    prompt, steps, branches = _P.value, _R.value, _G.value
    heads = _D.value // 64
    model = models.ModelConfig(
        vocab_size=_VOCAB.value,
        hidden_size=_D.value,
        num_heads=heads,
        head_dim=64,
        blocks=models.uniform_blocks(_BLOCKS.value, max(heads // 2, 1), _FFN.value),
        max_position_embeddings=prompt + steps,
    )
    params = models.init_params(model, jax.random.key(0))
    moved = {
        kind: step_bytes(model, params, prompt, branches, steps, kind == "copied") for kind in ("shared", "copied")
    }
    flops = step_flops(model, prompt, branches, steps)
    setting = {name: flags.FLAGS[name].value for name in ("P", "R", "G", "repeats", "blocks", "d", "ffn", "vocab")}
    setting |= {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "python": platform.python_version()}
    rows: list[Row] = []
    texts: list[str] = []
    decoders = make_decoders(model, params, prompt, branches, steps)
    for clock, (seconds, rates) in measure(decoders, steps, _REPEATS.value).items():
        own = make_rows(clock, seconds, rates, moved, flops)
        text, result = table(own, rates)
        rows, texts, setting = rows + own, [*texts, text], setting | {clock: rates | result}
    print("\n\n".join(texts))
    save(out, rows, "\n\n".join(texts), setting)
    print(f"written to {out}")


if __name__ == "__main__":
    app.run(main)
