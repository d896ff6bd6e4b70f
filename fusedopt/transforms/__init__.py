"""The optimizers. Signatures, names and defaults are optax's, with our options behind them.

A hyperparameter is a Python number, a 0-d array or tracer, or a schedule (count -> value). It is an operand: no value,
and no change of it, compiles anything anew.

These options are keyword-only and the same in every optimizer:

Args:
  groups: sequence of `Group`: leaves with hyperparameters of their own; the default groups ``bias`` and ``weight`` stand
    behind them.
  packing: a `Packing`: which leaves share a buffer.
  backend: "xla", "mosaic", "triton", or None for the best one of the device.
  skip_nonfinite: skip steps whose gradients are not finite (static).
  master_weights: keep float32 copies of bfloat16 and float16 parameters in the state and update those; the parameters
    are the copies rounded (static). ``update`` then gives float32 updates for these leaves, so that ``p + u``, rounded
    to the dtype of p, is exactly the rounded copy.
  ema_decay: a hyperparameter d in [0, 1): keep an average of the parameters in the state, from the parameters on;
    ``tx.ema_params(state, params)`` reads it.

        ema = ema + (1-d)*(w - ema)                 w as the step leaves it, before it is rounded if it has a master

  ema_debias: start the average from nothing instead, with (1-d)/(1-d^t) in place of 1-d (static).
  clip_norm: a hyperparameter >= 0: limit the norm of all gradients that are used, taken together (after `loss_scale`,
    before anything else). The same read of the gradients tells whether they are finite. ``state.grad_norm`` is the norm
    before. A norm beyond float32 counts as not finite.

        g = g * clip_norm/|g|                       where |g| > clip_norm

  accumulate: a positive int k, or None for 1: a step for every k calls, with the mean of their gradients (static). The
    calls between change nothing but the sum, which is float32 and packed like the moments; those that are skipped do not
    count. A leaf without a gradient (None) adds nothing to its sum. Where the gradients are squared, by the rule, for a
    norm or for `clip_norm`, each of them must be finite when squared, clipped or not. (`optax.MultiSteps` works too; there a
    NaN stays in the sum for ever unless it is made with ``should_skip_update_fn=optax.skip_not_finite``.)
"""

from fusedopt.transforms.adam import adam as adam
from fusedopt.transforms.adam import adamw as adamw
from fusedopt.transforms.lamb import lamb as lamb
from fusedopt.transforms.lars import lars as lars
from fusedopt.transforms.lion import lion as lion
from fusedopt.transforms.sgd import sgd as sgd
