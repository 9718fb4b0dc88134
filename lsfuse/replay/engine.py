"""The passes over a batch of groups.

    capture    prefix chunks → state S
    trunk      what all responses begin with, if prefix="longest_common" → S grows by it
    branches   tail forward against S, loss, backward → gradients, cotangents dS
    reverse    prefix chunks, last first: dS → gradients, dS of the chunks before

All loops have dynamic bounds: padded shapes are fixed by the batch, lengths are data, one compilation serves a run.
The dense baseline is the same passes with rows that carry their own prompt in place of tails, and no capture.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from lsfuse.checks import check_arrays
from lsfuse.model.config import ModelConfig
from lsfuse.model.params import check_params, check_trainable
from lsfuse.model.state import PrefixState, init_state
from lsfuse.model.transformer import Context
from lsfuse.replay.batch import Batch
from lsfuse.replay.check import check_shapes
from lsfuse.replay.geometry import (
    Geometry,
    Options,
    branch_slice,
    first_tokens,
    group_slice,
    make_geometry,
    make_stripes,
    pad_batch,
    prefix_bounds,
)
from lsfuse.replay.memory import resolve_prefix_activations
from lsfuse.replay.mesh import on_mesh, one_device
from lsfuse.replay.objective import Mean, Objective
from lsfuse.replay.prefix import capture, prefix_backward
from lsfuse.replay.tails import tails_backward, tails_forward
from lsfuse.replay.trunk import Trunk, divide_group, trunk_backward, trunk_capture
from lsfuse.types import AnyMesh, Array, Params

GradFn = Callable[[Params, Batch], tuple[tuple[Array, dict[str, Any]], Params]]


class Branches(NamedTuple):
    """How some branches of a group run: `tails_forward` and `tails_backward`, or the dense rows of the same form.

    shared: whether they run against a captured prefix.
    """

    forward: Callable
    backward: Callable
    shared: bool


TAILS = Branches(tails_forward, tails_backward, shared=True)
_NO_OBJECTIVE = Objective(lambda logps, entropies, batch: (jnp.zeros(()), {}), name="none")


def grad_function(
    objective: Objective,
    model: ModelConfig,
    options: Options,
    branches: Branches = TAILS,
    mesh: AnyMesh | None = None,
) -> GradFn:
    """f(params, batch) -> ((loss, metrics), grads); see `replay.value_and_grad`."""

    def step(local: ModelConfig, params: Params, batch: Batch):
        if objective.prepare is not None:
            batch = objective.prepare(batch)
        batch = batch.replace(completion_mask=batch.loss_mask)
        engine = Engine(params, local, options, batch, objective, branches)
        coupling = objective.coupling
        if coupling == "batch" and batch.prompt_ids.shape[0] == 1:
            coupling = "group"
        size = batch.completion_ids.shape[1]
        loss, metrics, grads = engine.batch_coupled(batch) if coupling == "batch" else engine.summed(coupling, size)
        metrics = jax.tree.map(lambda m: m.compute() if isinstance(m, Mean) else m, metrics, is_leaf=_is_mean)
        return (loss, metrics), jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)

    everywhere = PartitionSpec()
    run: Callable[[Params, Batch], Any] = functools.partial(step, one_device(model, options))
    if mesh is not None:
        run = on_mesh(step, model, mesh, options, lambda specs: ((everywhere, everywhere), specs))

    def f(params: Params, batch: Batch):
        check_params(model, params)
        check_trainable(params)
        check_shapes(batch)
        return run(params, batch)

    return f


class Engine:
    """The passes over one padded batch, sharing its static sizes. Every method is a pure function of its arrays."""

    def __init__(
        self,
        params: Params,
        model: ModelConfig,
        options: Options,
        batch: Batch,
        objective: Objective = _NO_OBJECTIVE,
        branches: Branches = TAILS,
    ):
        self.params, self.model, self.options, self.branches = params, model, options, branches
        _, size, response = batch.completion_ids.shape
        geometry = make_geometry(options, batch.prompt_ids.shape[1], size, response, model.shards.num_tokens)
        self.geometry: Geometry = geometry
        self.batch, self.objective = pad_batch(batch, geometry), objective
        self.dtype = jnp.dtype(model.compute_dtype or params["embed_tokens"].dtype)
        self.wide = jnp.promote_types(self.dtype, jnp.float32)
        kept = geometry.grad_tokens and resolve_prefix_activations(model, options, geometry, self.dtype) == "keep"
        self.keep = options.remat_policy if kept else None

    # --- pieces of a group ---

    def _context(self, group: Batch, state: PrefixState, trunk: Trunk | None = None) -> Context:
        start, end = prefix_bounds(self.geometry, group.prompt_lengths[0])
        length = end if trunk is None else end + trunk.count
        stripes = make_stripes(self.geometry, group.prompt_lengths[0])
        return Context(state, length, None if self.geometry.exact else start, stripes)

    def _capture(self, group: Batch, state: PrefixState, keep: str | None):
        if not self.branches.shared:
            return state, None
        ids, length = group.prompt_ids[0], group.prompt_lengths[0]
        return capture(self.params, self.model, ids, length, self.geometry, state, keep)

    def _branch_batches(self, group: Batch) -> Array:
        size = self.geometry.branch_batch
        return (group.group_sizes[0] + size - 1) // size

    def _at_size(self, branches: Batch, body: Callable[[int, Any], Any], carry: Any) -> Any:
        """body(rows, carry) with the smallest padded length that holds the branches; each is compiled, one is run."""
        sizes = self.geometry.buckets
        if len(sizes) == 1 or not self.branches.shared:
            return body(sizes[-1], carry)
        longest = jnp.max(jnp.where(branches.branch_mask, branches.completion_lengths, 0))
        for shorter, rows in zip((-1, *sizes), sizes, strict=False):
            chosen = (longest > shorter) & (longest <= rows)
            carry = lax.fori_loop(0, chosen.astype(jnp.int32), lambda _, c, rows=rows: body(rows, c), carry)
        return carry

    def _open(self, group: Batch, state: PrefixState) -> tuple[PrefixState, Trunk | None]:
        """The state with the trunk behind the prompt, if there is to be one."""
        if not (self.geometry.trunk and self.branches.shared):
            return state, None
        trunk = divide_group(group)
        end = prefix_bounds(self.geometry, group.prompt_lengths[0])[1]

        def run(rows, carry):
            args = (first_tokens(trunk.node, rows), carry[0], end, self.options.temperature)
            state, *found = trunk_capture(self.params, self.model, *args)
            return state, *(self._padded(x) for x in found)

        def once(_, carry):
            return self._at_size(trunk.node, run, carry)

        zeros = jnp.zeros(trunk.logps.shape, self.wide)
        state, logps, entropies = lax.fori_loop(0, jnp.minimum(trunk.count, 1), once, (state, zeros, zeros))
        return state, trunk.replace(logps=logps, entropies=entropies)

    def _tails(self, part: Batch, context: Context, policy: str | None):
        return self.branches.forward(self.params, self.model, part, context, self.options.temperature, policy)

    def _padded(self, x: Array) -> Array:
        """[1, g, R] of [1, g, rows]."""
        return jnp.pad(x, ((0, 0), (0, 0), (0, self.geometry.response - x.shape[2])))

    def _score_group(self, group: Batch, state: PrefixState, trunk: Trunk | None) -> tuple[Array, Array]:
        """Pass A: (per_token_logps, entropies) [1, G, R], no gradient."""
        size, shape = self.geometry.branch_batch, (1, self.geometry.branches, self.geometry.response)
        context, tails = self._context(group, state, trunk), group if trunk is None else trunk.tails

        @jax.named_scope("score")
        def some(i, out):
            part, own = (branch_slice(x, i * size, size) for x in (group, tails))

            def run(rows, out):
                scores = tuple(map(self._padded, self._tails(first_tokens(own, rows), context, None)[:2]))
                scores = scores if trunk is None else trunk.join(part, *scores)
                return tuple(
                    lax.dynamic_update_slice_in_dim(o, x, i * size, 1) for o, x in zip(out, scores, strict=True)
                )

            return self._at_size(own, run, out)

        zeros = jnp.zeros(shape, self.wide)
        return lax.fori_loop(0, self._branch_batches(group), some, (zeros, zeros))

    def _group_backward(self, group: Batch, state, trunk, grads, kept, cotangents, loss, metrics):
        """Tails forward and backward, then the trunk and the prefix. cotangents: [1, G, R] each, or None to take them,
        and the loss and metrics, from the objective branch batch by branch batch."""
        size, context = self.geometry.branch_batch, self._context(group, state, trunk)
        tails = group if trunk is None else trunk.tails
        dstate = None
        if self.branches.shared and self.geometry.cotangent_room and self.model.last_attention_block >= 0:
            dtype = self.options.cotangent_dtype or self.wide
            dstate = init_state(self.model, self._room(self.geometry.cotangent_room), dtype)
        dtrunk = None if trunk is None else (jnp.zeros(trunk.logps.shape, self.wide),) * 2

        @jax.named_scope("tails")
        def some(i, carry):
            part, own = (branch_slice(x, i * size, size) for x in (group, tails))

            def run(rows, carry):
                grads, dstate, dtrunk, loss, metrics = carry
                mine = first_tokens(own, rows)
                logps, entropies, saved = self._tails(mine, context, self.options.remat_policy)
                if cotangents is None:
                    whole = self._padded(logps), self._padded(entropies)
                    logps, entropies = whole if trunk is None else trunk.join(part, *whole)
                    value, more, pulled = self._objective_vjp(logps, entropies, part)
                    loss, metrics = loss + value, _add_metrics(metrics, more)
                else:
                    pulled = tuple(lax.dynamic_slice_in_dim(c, i * size, size, 1) for c in cotangents)
                if trunk is not None:
                    shares, pulled = zip(*(trunk.divide(part, c) for c in pulled), strict=True)
                    dtrunk = tuple(a + b.astype(a.dtype) for a, b in zip(dtrunk, shares, strict=True))
                pulled = tuple(c[..., :rows] for c in pulled)
                args = (mine, context, self.options.temperature, saved, *pulled, grads, dstate)
                grads, dstate = self.branches.backward(self.params, self.model, *args)
                return grads, dstate, dtrunk, loss, metrics

            return self._at_size(own, run, carry)

        carry = (grads, dstate, dtrunk, loss, metrics)
        grads, dstate, dtrunk, loss, metrics = lax.fori_loop(0, self._branch_batches(group), some, carry)
        if trunk is not None:
            grads, dstate = self._trunk_backward(group, state, trunk, dtrunk, grads, dstate)
        if dstate is not None and self.geometry.grad_tokens:
            ids, length = group.prompt_ids[0], group.prompt_lengths[0]
            args = (self.params, self.model, ids, length, self.geometry, state, dstate, grads, kept)
            grads = prefix_backward(*args, self.options.remat_policy)
        return grads, loss, metrics

    def _trunk_backward(self, group: Batch, state, trunk: Trunk, dtrunk, grads, dstate):
        context = self._context(group, state)
        start, end = prefix_bounds(self.geometry, group.prompt_lengths[0])
        down_at = end - start
        options = self.options

        def run(rows, carry):
            node, (dlogps, dentropies) = first_tokens(trunk.node, rows), (d[..., :rows] for d in dtrunk)
            how = (options.temperature, options.remat_policy)
            args = (self.params, self.model, node, context, *how, dlogps, dentropies, *carry, down_at)
            return trunk_backward(*args)

        def once(_, carry):
            return self._at_size(trunk.node, run, carry)

        return lax.fori_loop(0, jnp.minimum(trunk.count, 1), once, (grads, dstate))

    def _objective_vjp(self, logps: Array, entropies: Array, batch: Batch):
        (loss, metrics), pull = _vjp_with_aux(self.objective, logps, entropies, batch)
        return loss, metrics, pull

    # --- passes over the batch ---

    def _zero_grads(self) -> Params:
        return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), self.params)

    def _state(self) -> PrefixState:
        size = self._room(self.geometry.state) if self.branches.shared else 0
        return init_state(self.model, size, self.model.state_dtype or self.dtype)

    def _room(self, size: int) -> int:
        """This device's part of `size` positions of a buffer."""
        return self.model.shards.own(size)

    def _over_groups(self, body, carry):
        """body(b, carry) for every group, or those that fall to this device."""
        shards, groups = self.model.shards, self.batch.prompt_ids.shape[0]
        if not shards.data:
            return _loop(0, groups, body, carry)
        own = groups // shards.num_data
        first = lax.axis_index(shards.data) * own
        return _loop(first, own, body, carry)

    def summed(self, coupling: str, branches: int):
        """An objective that is a sum over branches or groups: one visit to every group.

        branches: G before padding, which is what an objective of whole groups sees.
        """
        per_branch = coupling == "branch"
        extra = self.geometry.branches - branches
        probe = branch_slice(group_slice(self.batch, 0), 0, self.geometry.branch_batch if per_branch else branches)
        zeros = jnp.zeros(probe.completion_ids.shape, self.wide)
        loss, metrics = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype),
            jax.eval_shape(lambda: _vjp_with_aux(self.objective, zeros, zeros, probe)[0]),
        )

        def one(b, carry):
            state, grads, loss, metrics = carry
            group = group_slice(self.batch, b)
            state, kept = self._capture(group, state, self.keep)
            state, trunk = self._open(group, state)
            cotangents = None
            if not per_branch:
                logps, entropies = (x[:, :branches] for x in self._score_group(group, state, trunk))
                value, more, cotangents = self._objective_vjp(logps, entropies, branch_slice(group, 0, branches))
                cotangents = tuple(jnp.pad(c, ((0, 0), (0, extra), (0, 0))) for c in cotangents)
                loss, metrics = loss + value, _add_metrics(metrics, more)
            args = (group, state, trunk, grads, kept, cotangents, loss, metrics)
            return state, *self._group_backward(*args)

        carry = (self._state(), self._zero_grads(), loss, metrics)
        _, grads, loss, metrics = self._over_groups(one, carry)
        loss, metrics = self.model.shards.sum_data((loss, metrics))
        return loss, metrics, self.model.shards.whole_grads(grads)

    def score(self) -> tuple[Array, Array]:
        """(per_token_logps, entropies) of every group, [B, padded G, R]."""
        return self._score()[1]

    def _score(self) -> tuple[PrefixState, tuple[Array, Array]]:
        """The scores, and the state's buffers for the next pass: two sets would be held at once."""

        def one(b, carry):
            state, out = carry
            group = group_slice(self.batch, b)
            state, _ = self._capture(group, state, None)
            state, trunk = self._open(group, state)
            scores = self._score_group(group, state, trunk)
            return state, tuple(lax.dynamic_update_slice_in_dim(o, s, b, 0) for o, s in zip(out, scores, strict=True))

        zeros = jnp.zeros((self.batch.prompt_ids.shape[0], self.geometry.branches, self.geometry.response), self.wide)
        state, scores = self._over_groups(one, (self._state(), (zeros, zeros)))
        return state, self.model.shards.sum_data(scores)

    def batch_coupled(self, original: Batch):
        """An objective that couples groups: score all of them, then visit each again (its prefix captured again)."""
        branches = original.completion_ids.shape[1]
        state, scores = self._score()
        logps, entropies = (s[:, :branches] for s in scores)
        loss, metrics, cotangents = self._objective_vjp(logps, entropies, original)
        extra = self.geometry.branches - branches
        cotangents = tuple(jnp.pad(c, ((0, 0), (0, extra), (0, 0))) for c in cotangents)

        def one(b, carry):
            state, grads = carry
            group = group_slice(self.batch, b)
            state, kept = self._capture(group, state, self.keep)
            state, trunk = self._open(group, state)
            part = tuple(lax.dynamic_slice_in_dim(c, b, 1, 0) for c in cotangents)
            return state, self._group_backward(group, state, trunk, grads, kept, part, 0.0, {})[0]

        _, grads = self._over_groups(one, (state, self._zero_grads()))
        return loss, metrics, self.model.shards.whole_grads(grads)


def _loop(first: Array | int, count: int, body, carry):
    return body(first, carry) if count == 1 else lax.fori_loop(first, first + count, body, carry)


def _vjp_with_aux(objective: Objective, logps: Array, entropies: Array, batch: Batch):
    """((loss, metrics), (dlogps, dentropies))."""
    loss, pull, metrics = jax.vjp(lambda a, b: _checked(objective, a, b, batch), logps, entropies, has_aux=True)
    return (loss, metrics), pull(jnp.ones_like(loss))


def _checked(objective: Objective, logps: Array, entropies: Array, batch: Batch) -> tuple[Array, dict[str, Any]]:
    """What the objective returns. Raises ValueError if that is not a scalar loss and a dict of metrics."""
    out, name = objective(logps, entropies, batch), objective.name or "the objective"
    if not (isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], dict)):
        raise ValueError(f"{name} must return (loss, metrics), metrics a dict, got {type(out).__name__}")
    check_arrays(name, {"loss": (out[0], "", float)})
    return out


def _add_metrics(total: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(lambda a, b: a + b, total, more, is_leaf=_is_mean)


def _is_mean(metric: Any) -> bool:
    return isinstance(metric, Mean)
