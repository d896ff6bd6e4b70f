"""A state's buffers as leaves by path, and leaves by path as a state: what does not depend on a layout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fusedopt import paths as _paths
from fusedopt.layout import Bucket, FlatLayout
from fusedopt.optimizer import Optimizer
from fusedopt.packing import FlatParams, gathered, pack_whole, pieces_of
from fusedopt.paths import Path, show
from fusedopt.state import FusedState, buffers_of, check_state, fields_of, trusted

Leaves = dict[Path, Any]

# What a state holds beside buffers, hyperparameters and trust ratios.
SCALARS = ("count", "skipped", "total_skipped", "grad_norm", "micro_step")


def exported(opt: Optimizer, state: FusedState, layout: FlatLayout) -> dict[str, Any]:
    """What a state holds, by field: `Leaves` for buffers and trust ratios, values by name for hyperparameters.

    Decays are the stored ``1 - b``. Arrays are new: donating them leaves the state alone.

    Raises:
      ValueError: the state is of other parameters, naming the leaf.
    """
    state = unwrapped(state)
    check_state(opt, state, layout)
    out: dict[str, Any] = {name: jnp.array(getattr(state, name), copy=True) for name in SCALARS if _has(state, name)}
    buffers = buffers_of(opt, state, layout)
    for name in opt.buffer_names:
        out[name] = {}
        for b, own in buffers.items():
            if name in own:
                out[name] |= _leaves_of(b, own[name], layout)
    out["hyperparams"] = dict(zip(opt.hyperparams.names(), state.hyperparams, strict=True))
    if opt.rule.trust:
        out["trust_ratios"] = {s.path: state.trust_ratios[i] for i, s in enumerate(trusted(layout))}
    return out


def installed(
    opt: Optimizer, params: Any, given: Mapping[str, Any], fresh: Sequence[Path] = (), source: str = "state"
) -> FusedState:
    """A state for `params` from what `exported` gives; fields and hyperparameters that are not given begin as at init.

    Args:
      params: a tree of arrays or FlatParams.
      given: as from `exported`; leaves may be of any real dtype and become the slots'.
      fresh: paths; the leaves at and below them begin as at init, and what is given for them is not read.
      source: what errors call `given`.

    Raises:
      ValueError: a leaf that is missing, unknown or of another shape, named by its path.
    """
    layout = opt.layout_of_params(params)
    state = opt.init(params)
    is_fresh = below(fresh)
    known = set(all_paths(params))
    unread = [p for p in fresh if not any(q[: len(p)] == p for q in known)]
    found = {p for name in opt.buffer_names for p in given.get(name, ())}
    unread = [p for p in unread if not any(q[: len(p)] == p for q in found)]
    if unread:
        like = next(iter(all_paths(params)), ("layer", "kernel"))
        raise ValueError(
            f"`fresh`: {unread[0]} is the path of no leaf, neither of `params` nor of `{source}`; expected paths such as "
            f"{like}, or beginnings of them"
        )
    buffers = buffers_of(opt, state, layout)
    for name in opt.buffer_names:
        if name not in given:
            continue
        leaves: Leaves = {p: x for p, x in given[name].items() if not is_fresh(p)}
        for path in leaves:
            if path not in known:
                raise ValueError(
                    f"`{source}` has `{name}` for leaf `{show(path)}`, which is not in `params`"
                    + _advice(source, path, "leaves it out")
                )
        for b, own in buffers.items():
            if name in own:
                own[name] = _buffer(name, b, own[name], layout, leaves, is_fresh, source)
    fields: dict[str, Any] = fields_of(opt, buffers)
    for name in SCALARS:
        if name in given and _has(state, name):
            fields[name] = jnp.array(given[name], getattr(state, name).dtype).reshape(())
    fields["hyperparams"] = vector_of(opt, state.hyperparams, given.get("hyperparams", {}))
    ratios = given.get("trust_ratios")
    if opt.rule.trust and ratios is not None:
        dtype = state.trust_ratios.dtype
        rows = [jnp.asarray(ratios.get(s.path, 1.0), dtype).reshape(()) for s in trusted(layout)]
        fields["trust_ratios"] = jnp.stack(rows) if rows else state.trust_ratios
    return state._replace(**fields)


def vector_of(opt: Optimizer, vector: jax.Array, values: Mapping[str, Any]) -> jax.Array:
    """A state's vector of hyperparameters with some of them replaced by stored values."""
    if not vector.size:
        return vector
    return jnp.stack(
        [
            jnp.asarray(values.get(name, own), vector.dtype).reshape(())
            for name, own in zip(opt.hyperparams.names(), vector, strict=True)
        ]
    )


def _leaves_of(bucket: Bucket, buffer: Any, layout: FlatLayout) -> Leaves:
    members = layout.segments_of(bucket)
    parts = [buffer] if bucket.solo else _split(gathered(buffer), bucket, layout)
    if len(parts) == 1:  # might be the buffer itself
        parts = [jnp.array(parts[0], copy=True)]
    return {s.path: x for s, x in zip(members, parts, strict=True)}


@functools.partial(jax.jit, static_argnums=(1, 2))
def _split(buffer: Any, bucket: Bucket, layout: FlatLayout) -> list[Any]:
    """One program for all leaves: eagerly each slice of thousands would be compiled for itself."""
    return pieces_of(bucket, layout.segments_of(bucket), layout.align).split(buffer)


def _buffer(
    name: str,
    bucket: Bucket,
    initial: Any,
    layout: FlatLayout,
    leaves: Leaves,
    is_fresh: Callable[[Path], bool],
    source: str,
) -> jax.Array:
    """One buffer from leaves by path, those that are fresh from the `initial` buffer."""
    own: Leaves = {}
    out: list[Any] = [None] * layout.num_leaves
    for s in layout.segments_of(bucket):
        if is_fresh(s.path):
            own = own or _leaves_of(bucket, initial, layout)
            out[s.leaf] = own[s.path]
            continue
        if s.path not in leaves:
            held = ", ".join(f"`{show(p)}`" for p in list(leaves)[:3]) or "none"
            raise ValueError(
                f"`{source}` has no `{name}` for leaf `{show(s.path)}` of `params`, only for {len(leaves)} others "
                f"({held}{', ...' if len(leaves) > 3 else ''})" + _advice(source, s.path, "lets it begin anew")
            )
        x = jnp.asarray(leaves[s.path])
        if x.shape != s.shape:
            raise ValueError(
                f"`{source}`: `{name}` of leaf `{show(s.path)}`: got shape {x.shape}, expected {s.shape}"
                + _advice(source, s.path, "lets it begin anew")
            )
        out[s.leaf] = x.astype(initial.dtype)
    return pack_whole(out, bucket, layout)


def _advice(source: str, path: Path, effect: str) -> str:
    """What to do about a leaf that does not fit; `fresh` is an argument of `from_optax_state` alone."""
    if source == "optax_state":
        return f"; fresh=[{path[:1]}] {effect}"
    return "; restore it for the parameters that it was stored with"


def below(prefixes: Sequence[Path]) -> Callable[[Path], bool]:
    """Whether a path is one of `prefixes` or goes on from one.

    Raises:
      TypeError: something that is not a sequence of tuples of strings.
    """
    for p in () if isinstance(prefixes, str) else prefixes:
        if not isinstance(p, tuple) or not all(isinstance(key, str) for key in p):
            raise TypeError(f"`fresh`: expected paths, tuples of strings such as ('head', 'kernel'), got {p!r}")
    if isinstance(prefixes, str) or (isinstance(prefixes, tuple) and prefixes and isinstance(prefixes[0], str)):
        raise TypeError(f"`fresh`: expected a sequence of paths such as [('head',)], got {prefixes!r}")
    return lambda path: any(path[: len(p)] == p for p in prefixes)


def unwrapped(state: FusedState) -> FusedState:
    """The state without the variables in which Flax NNX keeps its arrays."""
    bare = {name: jax.tree.leaves(getattr(state, name)) for name in state._fields if _has(state, name)}
    return state._replace(
        **{name: tuple(x) if isinstance(getattr(state, name), tuple) else x[0] for name, x in bare.items()}
    )


def _has(state: FusedState, name: str) -> bool:
    return not isinstance(getattr(state, name), tuple) or len(getattr(state, name)) > 0


def tree_of(params: Any) -> Any:
    """Shapes and dtypes of FlatParams as the tree they were packed from; trees as they are."""
    return jax.eval_shape(lambda flat: flat.tree, params) if isinstance(params, FlatParams) else params


def all_paths(params: Any) -> tuple[Path, ...]:
    """The paths of all leaves, those counted that are carried along."""
    return _paths.flatten(tree_of(params)).paths()


def leaves_by_path(tree: Any) -> Leaves:
    """The leaves of any tree by path; None and masked ones are left out."""
    entries, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_paths.path_of(keys): x for keys, x in entries}


def nested(leaves: Leaves) -> Any:
    """Leaves by path as dicts in dicts of strings, as every checkpoint library takes them.

    Raises:
      ValueError: one leaf's path goes on from another's.
    """
    if set(leaves) == {()}:
        return leaves[()]
    out: dict[str, Any] = {}
    for path, x in leaves.items():
        node = out
        for key in path[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise ValueError(
                    f"`params` leaf `{show(path)}` lies below another leaf, and what is stored by path cannot hold both: "
                    "rename one of them"
                )
        if not path or path[-1] in node:
            raise ValueError(
                f"`params` leaf `{show(path)}` lies above another leaf, and what is stored by path cannot hold both: "
                "rename one of them"
            )
        node[path[-1]] = x
    return out
