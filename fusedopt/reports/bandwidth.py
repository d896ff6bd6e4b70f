"""How fast a device moves memory: what no optimizer step on large parameters can beat."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

HOST_SIZE = 2**26
"""Numbers that a copy on a CPU copies, 256 MiB: more than caches hold."""

DEVICE_SIZE = 2**28
"""The same on a GPU, 1 GiB."""

ROUNDS, SAMPLE_SECONDS = 9, 0.02
"""Samples of each way, and how long one lasts at least: far longer than what the wait at its end costs."""


class Copy(Protocol):
    """One way to read and write memory; `bytes` in a step."""

    bytes: int

    def run(self, steps: int) -> None: ...


class HostCopy:
    """From one array to another, with NumPy on all cores: no step moves memory faster than this."""

    def __init__(self, size: int = HOST_SIZE):
        workers = os.cpu_count() or 1
        self.bytes = 8 * size
        source, target = np.ones(size, np.float32), np.zeros(size, np.float32)
        self._parts = [np.array_split(x, workers) for x in (target, source)]
        self._pool = concurrent.futures.ThreadPoolExecutor(workers)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for _ in self._pool.map(np.copyto, *self._parts):
                pass


def add_one(x: jax.Array) -> jax.Array:
    """The simplest program that reads and writes all of an array."""
    return x + jnp.ones((), x.dtype)


class DeviceCopy:
    """A jitted function of one array, in place where it is donated."""

    def __init__(self, size: int = HOST_SIZE, fn: Callable[[jax.Array], jax.Array] = add_one, donate: bool = True):
        self.bytes, self.donate = 8 * size, donate
        self.array = jnp.zeros(size, jnp.float32)
        self.call = jax.jit(fn, donate_argnums=(0,) if donate else ()).lower(self.array).compile()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            out = self.call(self.array)
            if self.donate:
                self.array = out
        jax.block_until_ready(out)


ON_HOST: dict[str, Callable[..., Copy]] = {"copy (NumPy)": HostCopy, "add one in place (XLA)": DeviceCopy}
ON_DEVICE: dict[str, Callable[..., Copy]] = {
    "add one, in place": DeviceCopy,
    "add one": functools.partial(DeviceCopy, donate=False),
    "copy": functools.partial(DeviceCopy, fn=jnp.copy, donate=False),
}


class Bandwidth(NamedTuple):
    """What was measured: bytes read and written in a second, and the way that was the fastest."""

    bytes_per_second: float
    way: str


def measure(
    device: Any = None, *, size: int | None = None, clock: Callable[[], float] = time.perf_counter
) -> Bandwidth:
    """The fastest of some ways to copy on a device, each the median of nine samples in turns. A few seconds.

    Args:
      device: a `jax.Device`; None is the default one. The memory of a CPU is measured with NumPy too.
      size: float32 numbers to copy; each way holds twice as many.
    """
    device = device or jax.config.jax_default_device or jax.devices()[0]
    on_host = getattr(device, "platform", device) == "cpu"
    ways, size = (ON_HOST, size or HOST_SIZE) if on_host else (ON_DEVICE, size or DEVICE_SIZE)

    def seconds(copy: Copy, steps: int) -> float:
        start = clock()
        copy.run(steps)
        return (clock() - start) / steps

    with jax.default_device(device):
        copies = {name: make(size=size) for name, make in ways.items()}
        steps = {}
        for name, copy in copies.items():
            copy.run(1)  # the first may set something up
            steps[name] = max(1, round(SAMPLE_SECONDS / max(seconds(copy, 1), 1e-9)))
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, copy in copies.items():
                times[name].append(seconds(copy, steps[name]))
    rates = {name: copies[name].bytes / float(np.median(times[name])) for name in ways}
    best = max(rates, key=rates.__getitem__)
    return Bandwidth(rates[best], best)
