"""How long a jitted, donated call of `apply` on FlatParams keeps the caller: `python -m benchmarks.dispatch`.

Compared in one run with two cheap programs over the same arguments: one that adds one to each, and one that returns
them, which is what JAX's own call costs. 2,000 leaves, alternating calls, medians.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

import fusedopt

LEAVES, CALLS = 2000, 400


def add_one(tree):
    return jax.tree.map(lambda x: ~x if x.dtype == jnp.bool_ else x + jnp.ones((), x.dtype), tree)


def main():
    tx = fusedopt.adamw(1e-3)
    params = fusedopt.pack({f"layer_{i:04}": np.ones((4, 8), np.float32) for i in range(LEAVES)})
    grads = jax.tree.map(jnp.ones_like, params)
    programs = {
        "apply": lambda params, state, grads: tx.apply(grads, state, params),
        "add one": lambda params, state, grads: add_one((params, state)),
        "pass on": lambda params, state, grads: (params, state),
    }
    steps = {name: jax.jit(program, donate_argnums=(0, 1)) for name, program in programs.items()}
    held = {name: step(*jax.tree.map(jnp.copy, (params, tx.init(params))), grads) for name, step in steps.items()}
    times = {name: [] for name in steps}
    for _ in range(CALLS):
        for name, step in steps.items():
            jax.block_until_ready(held[name])
            start = time.perf_counter()
            held[name] = step(*held[name], grads)
            times[name].append(time.perf_counter() - start)
    arguments = len(jax.tree.leaves((held["apply"], grads)))
    medians = {name: 1e6 * float(np.median(t)) for name, t in times.items()}
    for name, microseconds in medians.items():
        print(f"{name:8} returns after {microseconds:6.1f} us (median of {CALLS}, {arguments} arguments)")
    for name in ("add one", "pass on"):
        print(f"apply / {name} = {medians['apply'] / medians[name]:.2f} (jax {jax.__version__})")


if __name__ == "__main__":
    main()
