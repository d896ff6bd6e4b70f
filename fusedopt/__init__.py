"""Optimizers that update a model's parameters as a few long buffers, used like optax.

Optimizers: `sgd`, `adam`, `adamw`, `lamb`, `lars`, `lion`, each a `FusedTransformation` with ``init``, ``update``
(the optax protocol) and ``apply`` (the same step, in place); `chain` puts optax transformations
in front of one. Parameters: `pack` and `FlatParams` hold them in buffers, `Packing` says which
leaves share one, `FlatLayout` where each leaf lies, `Group` which leaves have hyperparameters of
their own. Checkpoints: `to_optax_state` and `from_optax_state`
keep states by path, `repack` moves them to another layout,
`check_restored` looks whether raw buffers are of this one. `TrainState` is Flax's (extra ``flax``).
Many devices: `zero1` shards an optimizer's state over a mesh. `report` says what an optimizer holds of a model and
what a step costs.
Also `DynamicLossScale`, `weight_mask`, `has_nan`, `warmup_cosine`, and `FusedState`, what a state holds.

Options that all optimizers take are explained in `fusedopt.transforms`.
"""

import sys as _sys
import typing as _typing

from fusedopt.grouping import Group as Group
from fusedopt.grouping import weight_mask as weight_mask
from fusedopt.guard import has_nan as has_nan
from fusedopt.layout import FlatLayout as FlatLayout
from fusedopt.layout import Packing as Packing
from fusedopt.loss_scale import DynamicLossScale as DynamicLossScale
from fusedopt.optax_form import from_optax_state as from_optax_state
from fusedopt.optax_form import to_optax_state as to_optax_state
from fusedopt.packing import FlatParams as FlatParams
from fusedopt.packing import pack as pack
from fusedopt.repacking import check_restored as check_restored
from fusedopt.repacking import repack as repack
from fusedopt.reports import report as report
from fusedopt.schedules import warmup_cosine as warmup_cosine
from fusedopt.state import FusedState as FusedState
from fusedopt.transformation import FusedTransformation as FusedTransformation
from fusedopt.transformation import chain as chain
from fusedopt.transforms import adam as adam
from fusedopt.transforms import adamw as adamw
from fusedopt.transforms import lamb as lamb
from fusedopt.transforms import lars as lars
from fusedopt.transforms import lion as lion
from fusedopt.transforms import sgd as sgd
from fusedopt.zero1 import zero1 as zero1

if _typing.TYPE_CHECKING:
    from fusedopt.train_state import TrainState as TrainState

__all__ = [
    "DynamicLossScale",
    "FlatLayout",
    "FlatParams",
    "FusedState",
    "FusedTransformation",
    "Group",
    "Packing",
    "TrainState",
    "adam",
    "adamw",
    "chain",
    "check_restored",
    "from_optax_state",
    "has_nan",
    "lamb",
    "lars",
    "lion",
    "pack",
    "repack",
    "report",
    "sgd",
    "to_optax_state",
    "warmup_cosine",
    "weight_mask",
    "zero1",
]

__version__ = "0.1.0"


def __getattr__(name: str):
    # Flax is optional, and `import fusedopt` does not wait for it.
    if name != "TrainState":
        # With name and obj Python asks "Did you mean ...?".
        raise AttributeError(f"module 'fusedopt' has no attribute {name!r}", name=name, obj=_sys.modules[__name__])
    try:
        import flax  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError(
            "fusedopt.TrainState needs Flax, which is not installed: install the extra, pip install 'fusedopt[flax]'"
        ) from error
    from fusedopt.train_state import TrainState

    return TrainState


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
