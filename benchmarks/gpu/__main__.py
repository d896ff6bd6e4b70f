"""`python -m benchmarks.gpu [--part PART] [--model MODEL] [--out FILE] [--budget SECONDS] [--tiny] [--seed N]`

Runs the parts in a process of its own: one that a kernel has killed, or that hangs, costs the rest of its part, and the
next part begins in a new one. At the end a table of what was measured. The status is 1 if anything was computed wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.gpu import record

SHARES = {"correctness": 0.27, "ceilings": 0.1, "optimizers": 0.55, "tuning": 0.5, "train_step": 1.0}
"""The parts, most important first, and how much of the time that is left each may use at most."""

BEGIN = "begin"
UNUSABLE, BROKEN = 2, 3  # statuses of a child: no GPU; a device that answers no more

CHECKOUT = pathlib.Path(__file__).parents[2]
RESULTS = CHECKOUT / "benchmarks" / "results"
GRACE = 45.0
"""Seconds behind the budget after which a process that still runs is stopped: one compilation may be under way."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Measures fusedopt on an NVIDIA GPU.")
    parser.add_argument("--part", action="append", choices=SHARES, help="only this part; may be repeated")
    parser.add_argument("--model", action="append", default=[], help="for `optimizers`, only this one; may be repeated")
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines, appended (benchmarks/results/gpu-<device>.jsonl)")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds, 480 by default")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU with interpreted kernels")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31, help="of all numbers; from the clock")
    parser.add_argument("--in-process", action="store_true", help="no process of its own; for tests and debuggers")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.out is None:
        args.out = RESULTS / f"gpu-{record.slug(device_name())}.jsonl"
    args.out = args.out.absolute()
    if args.child:
        return work(args)
    offset = args.out.stat().st_size if args.out.exists() else 0
    status = work(args) if args.in_process else supervise(args)
    rows = record.read(args.out, offset)
    if rows:
        print(record.table(rows))
        print(f"all rows: {args.out}")
    return 1 if any(map(record.failed, rows)) else status


def device_name() -> str:
    """The name of the first GPU, asked of its driver: this process leaves the device alone."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        out = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        return out.splitlines()[0] if out.strip() else "cpu"
    return "cpu"


def chosen(args: argparse.Namespace) -> list[str]:
    """The parts to run, in their order; the ceilings too where percents of them are wanted."""
    parts = set(args.part or SHARES)
    if parts & {"optimizers", "tuning"}:
        parts.add("ceilings")
    return [part for part in SHARES if part in parts]


def supervise(args: argparse.Namespace) -> int:
    """Runs the parts in child processes: the next one takes over behind the part in which one has died."""
    end = time.monotonic() + args.budget
    # JAX would take most of the memory at its start, and PyTorch needs some.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    parts = chosen(args)
    while True:
        left = end - time.monotonic()
        offset = args.out.stat().st_size if args.out.exists() else 0
        command = [sys.executable, "-m", "benchmarks.gpu", "--child", f"--out={args.out}", f"--budget={left}"]
        command += [f"--seed={args.seed}", *(f"--part={part}" for part in parts), *(["--tiny"] if args.tiny else [])]
        command += [f"--model={model}" for model in args.model]
        try:
            status = subprocess.run(command, env=environment, cwd=CHECKOUT, timeout=max(left, 0) + GRACE).returncode
            why = f"the process ended with status {status}"
        except subprocess.TimeoutExpired:
            status, why = None, "the process was stopped, long after its time was over"
        if status in (0, UNUSABLE):
            return 0 if status == 0 else 2
        rows = record.read(args.out, offset)
        begun = [row["part"] for row in rows if row["what"] == BEGIN]
        if not begun:
            print(f"no part has begun: {why}")
            return 2
        record.Run(args.out, 0).write({"part": begun[-1], "what": "the rest of the part", "error": why})
        parts = parts[parts.index(begun[-1]) + 1 :]
        if not parts or status is None:
            return 0


def work(args: argparse.Namespace) -> int:
    """Runs the parts here, one after the other. What one of them raises ends that part alone."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    import pallas_kernels
    from benchmarks.gpu import correctness, optimizers, timing, train_step, tuning

    functions = {
        "correctness": correctness.part,
        "ceilings": timing.ceilings,
        "optimizers": optimizers.part,
        "tuning": tuning.part,
        "train_step": train_step.part,
    }
    device = jax.devices()[0]
    if device.platform != "gpu" and not args.tiny:
        print(f"needs an NVIDIA GPU, the device is {device.device_kind!r}; --tiny runs anywhere")
        return UNUSABLE
    run = record.Run(args.out, args.budget, tiny=args.tiny, seed=args.seed, models=args.model)
    known = [row["bytes_per_second"] for row in record.read(args.out) if row["what"] == "ceiling"]
    run.ceiling = known[-1] if known else None  # until it is measured, or if the process that did has died
    run.write(record.header(device.device_kind, args.seed))
    with contextlib.ExitStack() as stack:
        # optax mixes types and ranks that a stricter setting of the caller would refuse.
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        if device.platform == "cpu":
            stack.enter_context(pallas_kernels.interpret())
        parts = args.part if args.child else chosen(args)
        for part in parts:
            run.give(1.0 if part == parts[-1] else SHARES[part])
            if run.left() <= 0:
                run.skip({"part": part, "what": "all"}, "no time is left")
                continue
            print(f"{part}: begins after {args.budget - (run.deadline - time.monotonic()):.0f} s", flush=True)
            run.write({"part": part, "what": BEGIN})
            try:
                functions[part](run)
            except Exception as error:
                run.fail({"part": part, "what": "the rest of the part"}, error)
            if not healthy(device):
                return BROKEN
    return 0


def healthy(device) -> bool:
    """Whether the device still computes: after a bad access to its memory it refuses everything."""
    import jax

    try:
        return float(jax.device_put(1.0, device) + 1) == 2
    except Exception:
        return False


if __name__ == "__main__":
    sys.exit(main())
