"""flax nnx models in and out: every bit back, and the gradient of the whole step as nnx computes it itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsfuse import io
from lsfuse.model import ModelConfig, param_shapes
from tests import helpers, oracle

CONFIG = helpers.TINY  # as many channels as query heads have in all: a kernel the wrong way round has the right shape
MLP = CONFIG.blocks[0].ffn_width
KV_HEADS = CONFIG.blocks[0].num_kv_heads


def weight(*shape: int) -> nnx.Param:
    """Abstract in effect: `made` gives it its numbers."""
    return nnx.Param(jnp.zeros(shape))


class Einsum(nnx.Module):
    """Tunix's: a kernel by heads."""

    def __init__(self, equation: str, *shape: int):
        self.equation, self.w = equation, weight(*shape)

    def __call__(self, x):
        return jnp.einsum(self.equation, x, self.w[...])


class Norm(nnx.Module):
    def __init__(self, name: str = "w"):
        setattr(self, name, weight(CONFIG.hidden_size))
        self.leaf = name

    def __call__(self, x):
        return getattr(self, self.leaf)[...] * x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + CONFIG.rms_norm_eps)


def linear(inner: int, outer: int) -> nnx.Linear:
    return nnx.Linear(inner, outer, use_bias=False, rngs=nnx.Rngs(0))


def rotated(x):
    """x [T, heads, H], halves paired."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[0])[:, None] / CONFIG.rope_theta ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    return jnp.concatenate([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)


def attended(q, k, v):
    """Causal attention [T, N, H] of keys and values [T, K, H]."""
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = jnp.einsum("qnh,knh->nqk", q, k) / np.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(jnp.tri(q.shape[0], dtype=bool), scores, -jnp.inf), -1)
    return jnp.einsum("nqk,knh->qnh", weights, v)


class TunixAttention(nnx.Module):
    def __init__(self):
        d, n, h = CONFIG.hidden_size, CONFIG.num_heads, CONFIG.head_dim
        self.q_proj = Einsum("td,dnh->tnh", d, n, h)
        self.k_proj = Einsum("td,dkh->tkh", d, KV_HEADS, h)
        self.v_proj = Einsum("td,kdh->tkh", KV_HEADS, d, h)  # Gemma's order
        self.o_proj = Einsum("tnh,nhd->td", n, h, d)

    def __call__(self, x):
        return self.o_proj(attended(rotated(self.q_proj(x)), rotated(self.k_proj(x)), self.v_proj(x)))


class LinearAttention(nnx.Module):
    def __init__(self):
        d, n, k = CONFIG.hidden_size, CONFIG.num_heads * CONFIG.head_dim, KV_HEADS * CONFIG.head_dim
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = linear(d, n), linear(d, k), linear(d, k), linear(n, d)

    def __call__(self, x):
        q, k, v = (p(x).reshape(x.shape[0], -1, CONFIG.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attended(rotated(q), rotated(k), v).reshape(x.shape[0], -1))


class Mlp(nnx.Module):
    def __init__(self):
        d = CONFIG.hidden_size
        self.gate_proj, self.up_proj, self.down_proj = linear(d, MLP), linear(d, MLP), linear(MLP, d)

    def __call__(self, x):
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    def __init__(self, attention):
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.attn, self.mlp = attention(), Mlp()

    def __call__(self, x):
        x = x + self.attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Tunix(nnx.Module):
    """A list of blocks, kernels by heads, names as in Tunix's Llama 3."""

    def __init__(self):
        self.embedder = nnx.Dict(input_embedding=weight(CONFIG.vocab_size, CONFIG.hidden_size))
        self.layers = nnx.List([Block(TunixAttention) for _ in CONFIG.blocks])
        self.final_norm = Norm()
        self.lm_head = Einsum("td,dv->tv", CONFIG.hidden_size, CONFIG.vocab_size)

    def __call__(self, ids):
        x = self.embedder.input_embedding[...][ids]
        for block in self.layers:
            x = block(x)
        return self.lm_head(self.final_norm(x))


class Scanned(nnx.Module):
    """Stacked blocks, two-dimensional kernels, names as in Hugging Face; a counter that is no parameter."""

    def __init__(self):
        self.embed_tokens = weight(CONFIG.vocab_size, CONFIG.hidden_size)
        self.layers = nnx.vmap(lambda _: Block(LinearAttention))(jnp.arange(CONFIG.num_blocks))
        self.norm = Norm("scale")
        self.lm_head = linear(CONFIG.hidden_size, CONFIG.vocab_size)
        self.seen = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, ids):
        x = self.embed_tokens[...][ids]
        graph, state = nnx.split(self.layers)
        x, _ = jax.lax.scan(lambda x, s: (nnx.merge(graph, s)(x), None), x, state)
        return self.lm_head(self.norm(x))


MODELS = {"list": Tunix, "stacked": Scanned}


def made(name: str, dtype=np.float32) -> nnx.Module:
    """The model with numbers, all unlike, that make every leaf matter."""
    graph, state = nnx.split(nnx.eval_shape(MODELS[name]))
    rng = np.random.default_rng(7)

    def fill(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.zeros(x.shape, x.dtype)
        return jnp.asarray((rng.standard_normal(x.shape) * 0.4 + (len(x.shape) == 1)).astype(dtype))

    return nnx.merge(graph, jax.tree.map(fill, state))


def nnx_loss(model, batch, rows, index, objective):
    """The objective of every row run whole by the nnx model: no prompt is shared, nothing of lsfuse is run.

    rows: ids [rows, T]; index: (rows, group, branch, place of the response's first token, its length) of each.
    """
    logits = jax.vmap(model)(rows)[:, :-1]
    logps = jax.nn.log_softmax(logits)
    entropies = -jnp.sum(jnp.exp(logps) * logps, -1)
    chosen = jnp.take_along_axis(logps, rows[:, 1:, None], 2)[..., 0]
    out = jnp.zeros((2, *batch.completion_ids.shape))
    for row, (b, g, p, r) in enumerate(index):
        out = out.at[:, b, g, :r].set(jnp.stack([chosen[row, p - 1 : p - 1 + r], entropies[row, p - 1 : p - 1 + r]]))
    return objective(*out, batch)[0]


@pytest.mark.parametrize("name", ["list", pytest.param("stacked", marks=pytest.mark.slow)])
def test_gradient_is_nnx_s_own(name, x64):
    """Ragged groups in poisoned padding, an objective that couples them all."""
    model, batch = made(name, np.float64), helpers.make_batch(CONFIG)
    (loss, _), grads = helpers.engine("coupled", CONFIG, chunk_size=4, branch_batch=2)(
        io.from_nnx(model, CONFIG), batch
    )
    found = list(oracle._rows(batch))
    rows = np.stack([np.pad(ids, (0, 17 - len(ids))) for *_, ids in found])
    index = [place for *place, _ in found]
    dense = nnx.value_and_grad(lambda model: nnx_loss(model, batch, rows, index, helpers.coupled))
    want_loss, want = nnx.jit(dense)(model)
    mine = io.to_nnx(grads, model, CONFIG)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-12)
    assert jax.tree.structure(mine) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype == np.float64
    oracle.assert_grads_close(nnx.to_pure_dict(mine), nnx.to_pure_dict(want), 1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_every_bit_comes_back(name):
    model = made(name)
    state = nnx.state(model, nnx.Param)
    for given in (model, nnx.state(model), nnx.to_pure_dict(state)):
        params = io.from_nnx(given, CONFIG)
        back = io.to_nnx(params, given, CONFIG)
        for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
            assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    back = io.to_nnx(params, model, CONFIG)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    nnx.update(model, jax.tree.map(lambda x: 2 * x, back))
    np.testing.assert_array_equal(io.from_nnx(model, CONFIG)["norm"], 2 * params["norm"])


def test_the_other_way_round_too():
    """Parameters whose every number differs, through an abstract model: nothing of its values is read."""
    params = helpers.random_params(CONFIG, dtype=np.float32)
    for cls in MODELS.values():
        abstract = nnx.eval_shape(cls)
        again = io.from_nnx(io.to_nnx(params, abstract, CONFIG), CONFIG)
        jax.tree.map(np.testing.assert_array_equal, again, params)


def test_it_runs_inside_jit():
    state = nnx.state(made("list"), nnx.Param)
    found = jax.jit(lambda s: io.to_nnx(io.from_nnx(s, CONFIG), s, CONFIG))(state)
    jax.tree.map(np.testing.assert_array_equal, found, state)


def flat_model(config: ModelConfig = CONFIG) -> dict:
    """Leaves as nested dicts, each of its own numbers, kernels (out, in) as in Hugging Face."""
    params = helpers.random_params(config, dtype=np.float32)
    blocks = {}
    for i in range(config.num_blocks):
        own = {name: leaf[i] for name, leaf in params["runs"]["0"].items()}
        attention = {n: {"weight": own[n].T} for n in ("q_proj", "k_proj", "v_proj", "o_proj")}
        mlp = {n: {"weight": own[n].T} for n in ("gate_proj", "up_proj", "down_proj")}
        norms = {n: {"weight": own[n]} for n in ("input_layernorm", "post_attention_layernorm")}
        blocks[i] = {"self_attn": attention, "mlp": mlp, **norms}
    model = {"layers": blocks, "embed_tokens": {"weight": params["embed_tokens"]}, "norm": {"weight": params["norm"]}}
    return {"model": model, "lm_head": {"weight": params["lm_head"].T}}


def test_hugging_face_s_layout():
    found = io.from_nnx(flat_model(), CONFIG)
    jax.tree.map(np.testing.assert_array_equal, found, helpers.random_params(CONFIG, dtype=np.float32))


def test_names_of_one_s_own():
    """A rename table with layouts, for a model of other names, blocks on the second axis, and a leaf to leave out."""
    params = helpers.random_params(CONFIG, dtype=np.float32)
    tower = {name.replace("_proj", ""): leaf.swapaxes(0, 1) for name, leaf in params["runs"]["0"].items()}
    tower["q"] = tower["q"].reshape(16, 2, 4, 4).transpose(2, 3, 1, 0)
    model = {"tower": tower, "table": params["embed_tokens"], "last": params["norm"], "head": params["lm_head"]}
    rename = {r"tower/q": ("blocks/q_proj", "N H L D"), r"tower/([kv])": (r"blocks/\1_proj", "D L KH")}
    rename |= {r"tower/o": ("blocks/o_proj", "NH L D"), r"tower/(gate|up)": (r"blocks/\1_proj", "D L F")}
    rename |= {r"tower/down": ("blocks/down_proj", "F L D"), r"tower/(.*norm)": (r"blocks/\1", "D L")}
    rename |= {"table": "embed_tokens", "last": "norm", "head": "lm_head", r"lora/.*": None}
    given = {**model, "lora": {"a": np.ones(3)}}
    found = io.from_nnx(given, CONFIG, rename)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    back = nnx.to_pure_dict(io.to_nnx(found, given, CONFIG, rename))
    jax.tree.map(np.testing.assert_array_equal, back, model)


def test_every_parameter_of_a_config_has_axes():
    """Biases, norms and plain FFNs of every family round trip under the tree's own names."""
    import families

    for config in (helpers.MIXED, families.FAMILIES["gemma3"], families.FAMILIES["plain"]):
        params = helpers.random_params(config, dtype=np.float32)
        flat = {name: leaf for name, leaf in params.items() if name != "runs"}
        runs = [(str(r), i) for r, (_, n) in enumerate(config.runs) for i in range(n)]
        blocks = [{k: v[i] for k, v in params["runs"][r].items()} for r, i in runs]
        model = {**flat, "blocks": dict(enumerate(blocks))}
        found = io.from_nnx(model, config, {r"blocks/(\d+)/(.*)": r"blocks/\1/\2"})
        jax.tree.map(np.testing.assert_array_equal, found, params)
        assert jax.tree.map(np.shape, found) == param_shapes(config)


def broken(path: str, value) -> dict:
    model = flat_model()
    *parents, last = path.split("/")
    node = model
    for key in parents:
        node = node[int(key) if key.isdigit() else key]
    if value is None:
        del node[last]
    else:
        node[int(last) if last.isdigit() else last] = value
    return model


Q0 = "model/layers/0/self_attn/q_proj/weight"


@pytest.mark.parametrize(
    "model, rename, message",
    [
        (broken(Q0, np.zeros((16, 11))), {}, r"q_proj/weight has shape \(16, 11\).*q_proj is \[NH D\] = \(16, 16\)"),
        (broken(Q0, None), {}, "no leaf gives blocks/0/q_proj. Say what leaves are with rename="),
        (broken("model/layers/0/extra", np.zeros(3)), {}, "no rule knows model/layers/0/extra"),
        (broken("model/layers/2", flat_model()["model"]["layers"][0]), {}, "layers/2/.*blocks 0 to 1, so no blocks/2"),
        (broken("embed", np.zeros((23, 16))), {}, "embed and model/embed_tokens/weight both give embed_tokens"),
        (
            broken("model/layers/0/self_attn/q_proj/bias", np.zeros(16)),
            {},
            "would be .*bias, which the config does not",
        ),
        (broken(Q0, np.zeros((16, 16), np.float16)), {}, "q_proj are of dtypes float16, float32; .* cast them to one"),
        (broken(Q0, "kernel"), {}, "q_proj/weight holds no array but str"),
        (broken(Q0, np.zeros((16, 16), np.float64)), {}, "q_proj/weight is float64, which needs .*jax_enable_x64"),
        (flat_model(), {"(": "norm"}, "rename: '\\(' is not a regular expression"),
        (flat_model(), {".*q_proj/weight": "q_proj"}, "'q_proj' is no place of a parameter; valid: embed_tokens"),
        (flat_model(), {r".*(\d)/.*q_proj/weight": (r"blocks/\1/q_proj", "D F")}, "layout 'D F' must have .* D H N of"),
        (nnx.state(nnx.eval_shape(Tunix)), {}, "is abstract .ShapeDtypeStruct.; initialise the model first"),
        ([1, 2], {}, "expected an nnx.Module, an nnx.State or nested dicts of arrays, got list"),
    ],
)
def test_what_does_not_fit_is_named(model, rename, message):
    with pytest.raises(ValueError, match=message):
        io.from_nnx(model, CONFIG, rename)


def test_shapes_that_fit_two_layouts_must_be_told_apart():
    """As many query heads as channels: [D, N, H] and [N, D, H] look alike."""
    config = dataclasses.replace(CONFIG, hidden_size=4)
    model = flat_model(config)
    for block in model["model"]["layers"].values():
        block["self_attn"]["q_proj"] = {"w": block["self_attn"]["q_proj"]["weight"].T.reshape(4, 4, 4)}
    with pytest.raises(ValueError, match=r"q_proj/w has shape \(4, 4, 4\), which fits D N H and N D H; say which"):
        io.from_nnx(model, config)
    one, other = (
        io.from_nnx(model, config, {r".*/(\d)/.*/q_proj/w": (r"blocks/\1/q_proj", layout)})["runs"]["0"]["q_proj"]
        for layout in ("D N H", "N D H")
    )
    np.testing.assert_array_equal(one, helpers.random_params(config, dtype=np.float32)["runs"]["0"]["q_proj"])
    np.testing.assert_array_equal(one.reshape(2, 4, 4, 4).swapaxes(1, 2).reshape(2, 4, 16), other)
