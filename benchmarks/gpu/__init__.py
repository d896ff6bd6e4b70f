"""Everything there is to measure on a machine with an NVIDIA GPU: `python -m benchmarks.gpu`.

Needs JAX with CUDA and optax, and nothing installed: a checkout is enough. Rows for PyTorch are skipped where it is
missing. The parts, by importance: `correctness` of every rule, mode and backend against float64; `ceilings`, what a
copy reaches; `optimizers`, steps on the trees of known models beside optax and PyTorch; `tuning` of block sizes;
`train_step`, a whole bfloat16 step of ResNet-50.
"""
