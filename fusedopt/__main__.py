"""The command line: `python -m fusedopt report` and `python -m fusedopt doctor`."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import fusedopt

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": fusedopt.sgd,
    "momentum": lambda lr, **options: fusedopt.sgd(lr, momentum=0.9, **options),
    "adam": fusedopt.adam,
    "adamw": fusedopt.adamw,
    "lars": fusedopt.lars,
    "lamb": fusedopt.lamb,
    "lion": fusedopt.lion,
}


def parser() -> argparse.ArgumentParser:
    from fusedopt.models import MODELS

    main = argparse.ArgumentParser(prog="python -m fusedopt", description="Optimizers for JAX over a few long buffers.")
    main.add_argument("--version", action="version", version=f"fusedopt {fusedopt.__version__}")
    commands = main.add_subparsers(dest="command", metavar="COMMAND", required=True)

    about = "what an optimizer holds of a model and what a step costs: layout, memory, backends, bytes, kernels"
    report = commands.add_parser(
        "report", help=about, description=f"Says {about}. The model is shapes alone: it needs no memory."
    )
    report.add_argument("--model", required=True, choices=MODELS, metavar="NAME", help=f"one of {', '.join(MODELS)}")
    report.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS, help="default: adamw")
    report.add_argument(
        "--mode",
        default="apply",
        choices=("optax", "apply", "flat"),
        help="how a step is taken: optax.apply_updates, tx.apply of trees, tx.apply of FlatParams; default: apply",
    )
    report.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of the parameters"
    )
    report.add_argument(
        "--device", metavar="KIND", help='not here, such as "NVIDIA H200"; excludes --compile, --bandwidth'
    )
    report.add_argument("--backend", choices=("xla", "mosaic", "triton"), help="default: the best one of the device")
    report.add_argument(
        "--solo-from",
        type=_solo_from,
        default=fusedopt.Packing().solo_from,
        metavar="N",
        help="Packing(solo_from=N): elements from which on a leaf is not packed, or `none`; default: %(default)s",
    )
    report.add_argument("--master-weights", action="store_true", help="float32 copies of 16-bit parameters")
    report.add_argument("--ema-decay", type=float, metavar="D", help="keep an average of the parameters")
    report.add_argument("--clip-norm", type=float, metavar="X", help="limit the norm of the gradients")
    report.add_argument("--accumulate", type=int, metavar="K", help="gradients that make a step")
    report.add_argument("--no-skip", action="store_true", help="do not look for NaN in the gradients")
    report.add_argument(
        "--compile", action="store_true", help="compile a step here, and count its kernels and their bytes"
    )
    report.add_argument(
        "--bandwidth", action="store_true", help="measure how fast this device copies, for the time of a step"
    )
    report.add_argument(
        "--plot", type=pathlib.Path, metavar="FILE", help="draw the layout and the memory, as .png, .svg or .pdf"
    )
    report.set_defaults(run=run_report)

    doctor = commands.add_parser(
        "doctor",
        help="versions, devices, backends, and a self-test of each backend that runs here",
        description="Says what is installed and which backend each device gets, and tests every backend that runs here: "
        "xla against optax, the others against xla. Exit status 1 if a test fails.",
    )
    doctor.add_argument(
        "--interpret", action="store_true", help="test the kernels of other devices too, interpreted: a minute"
    )
    doctor.set_defaults(run=run_doctor)
    return main


def _solo_from(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


def run_report(args: argparse.Namespace) -> int:
    """The command `report`: 0, or 2 for options that do not go together."""
    import jax

    from fusedopt.models import shapes

    try:
        tx = OPTIMIZERS[args.optimizer](
            1e-3,
            backend=args.backend,
            master_weights=args.master_weights,
            ema_decay=args.ema_decay,
            clip_norm=args.clip_norm,
            accumulate=args.accumulate,
            skip_nonfinite=not args.no_skip,
            packing=fusedopt.Packing(solo_from=args.solo_from),
        )
        tree = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, args.dtype), shapes(args.model))
        report = fusedopt.report(tx, tree, mode=args.mode, device=args.device)
        if args.compile:
            report.compile()
        if args.bandwidth:
            report.measure_bandwidth()
        figure = None if args.plot is None else report.plot()
        if figure is not None:
            figure.savefig(args.plot)
    except (ValueError, ImportError, OSError) as error:
        print(f"python -m fusedopt report: {error}", file=sys.stderr)
        return 2
    show(report)
    if figure is not None:
        print(f"wrote {args.plot}")
    return 0


def run_doctor(args: argparse.Namespace) -> int:
    """The command `doctor`: 0, or 1 if a self-test failed."""
    from fusedopt.doctor import Doctor

    print("testing the backends, which takes some seconds", file=sys.stderr)
    doctor = Doctor(interpret=args.interpret)
    show(doctor)
    return 0 if doctor.healthy else 1


def show(what: Any) -> None:
    """Prints in colours where there is a terminal and rich is installed."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        print(what)
        return
    if sys.stdout.isatty():
        Console().print(what)
    else:
        print(what)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Its exit status."""
    args = parser().parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
