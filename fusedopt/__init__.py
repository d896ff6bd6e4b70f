"""fusedopt: optimizers that update a few long buffers, used like optax."""

from fusedopt.grouping import Group as Group
from fusedopt.grouping import weight_mask as weight_mask
from fusedopt.guard import has_nan as has_nan
from fusedopt.layout import FlatLayout as FlatLayout
from fusedopt.layout import Packing as Packing
from fusedopt.optimizer import FusedState as FusedState
from fusedopt.packing import FlatParams as FlatParams
from fusedopt.packing import pack as pack
from fusedopt.schedules import warmup_cosine as warmup_cosine
from fusedopt.transformation import FusedTransformation as FusedTransformation
from fusedopt.transformation import chain as chain
from fusedopt.transforms import adam as adam
from fusedopt.transforms import adamw as adamw
from fusedopt.transforms import lars as lars
from fusedopt.transforms import sgd as sgd

__version__ = "0.1.0"
