"""PyTorch's own optimizers on the same arrays, where PyTorch is installed and sees the GPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.gpu.timing import MissingError


class TorchSteps:
    """`torch.optim` with gradients that are set once: the step alone, no `zero_grad`.

    Args:
        optimizer: name of the class and its arguments; None if PyTorch has no such optimizer.
        how: "fused" or "foreach", PyTorch's two implementations over many tensors.
        weights: which of the arrays decay.
        tiny: takes the CPU where there is no GPU.
    """

    inner = 1

    def __init__(
        self,
        optimizer: tuple[str, dict[str, Any]] | None,
        how: str,
        params: Sequence[np.ndarray],
        grads: Sequence[np.ndarray],
        weights: Sequence[bool],
        tiny: bool,
    ):
        if optimizer is None:
            raise MissingError("PyTorch has no such optimizer")
        try:
            import torch
        except ImportError:
            raise MissingError("torch is not installed") from None
        if not (torch.cuda.is_available() or tiny):
            raise MissingError("torch sees no GPU")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
        tensors = [torch.tensor(x, device=device, requires_grad=True) for x in params]
        for tensor, grad in zip(tensors, grads, strict=True):
            tensor.grad = torch.tensor(grad, device=device)
        name, options = optimizer
        groups = [{"params": [t for t, w in zip(tensors, weights, strict=True) if w]}]
        others = [t for t, w in zip(tensors, weights, strict=True) if not w]
        if others:
            groups.append({"params": others, "weight_decay": 0.0})
        self.optimizer = getattr(torch.optim, name)(groups, **options, **{how: True})

    def compile(self) -> None:
        """Nothing to do, but the first step makes the state."""

    def run(self, steps: int) -> float:
        for _ in range(steps):
            self.optimizer.step()
        enqueued = time.perf_counter()
        self.synchronize()
        return enqueued


def release() -> None:
    """Gives back the memory that PyTorch keeps for later: JAX cannot use it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
