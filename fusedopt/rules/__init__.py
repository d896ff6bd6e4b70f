"""Optimizers as formulas: one file each, no backend, no layout."""

from fusedopt.rules.adam import Adam as Adam
from fusedopt.rules.base import Rule as Rule
from fusedopt.rules.lamb import Lamb as Lamb
from fusedopt.rules.lars import Lars as Lars
from fusedopt.rules.lion import Lion as Lion
from fusedopt.rules.sgd import Sgd as Sgd
