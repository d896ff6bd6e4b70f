"""zero1 over two processes: the bits of one process with as many devices, and an end for all when one dies."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest

from tests import multiprocess
from tests.errors.table import matches
from tests.processes import free_port, started

# What jax.distributed waits for the heartbeat of a process before it gives all of them up; its default is 100.
HEARTBEAT = 8
STRICT = {"JAX_NUMPY_DTYPE_PROMOTION": "strict", "JAX_NUMPY_RANK_PROMOTION": "raise", "PYTHONWARNINGS": "error"}

# What no table of errors of one process can hold (tests/errors).
OF_BATCH = (
    "`batch` leaf `0`: got an array of this process alone, expected one over all 2 processes: "
    "jax.make_array_from_process_local_data(jax.NamedSharding(tx.mesh, jax.P('data')), x) makes it from the part of each; "
    "where every process has the whole, jax.device_put to that sharding does"
)
OF_PARAMS = (
    "`params` leaf `bias.float32@…`: got an array of this process alone, expected one over all 2 processes: "
    "jax.device_put(x, jax.NamedSharding(tx.mesh, jax.P())), which also compares what they have"
)


def commands(heartbeat, outs):
    port = str(free_port())
    return [("tests.multiprocess", port, "2", str(i), str(heartbeat), str(out)) for i, out in enumerate(outs)]


def test_two_processes_have_the_bits_of_one(tmp_path):
    outs = [tmp_path / "0.npz", tmp_path / "1.npz"]
    with started(commands(60, outs), tmp_path, devices=4, seconds=100, environment=STRICT) as processes:
        alone = {f"{name}{path}": x for name in multiprocess.OPTIMIZERS for path, x in multiprocess.run(name).items()}
        for process in processes:
            assert process.ends(90) == 0, process.said()
    for out in outs:
        with np.load(out) as found:
            together = dict(found)
        of_batch, of_params = together.pop("refusals")
        assert matches(OF_BATCH, of_batch), of_batch
        assert matches(OF_PARAMS, of_params), of_params
        assert together.keys() == alone.keys()
        for path, x in alone.items():
            assert x.dtype == together[path].dtype, path
            np.testing.assert_array_equal(together[path], x, err_msg=path)
    before = multiprocess.params_of()["b"]["kernel"]
    for name in multiprocess.OPTIMIZERS:
        assert np.max(np.abs(alone[f"{name}['params']['b']['kernel']"] - before)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_when_a_process_is_killed_the_other_ends_too(killed, tmp_path):
    """Process 0 is also the coordinator, whose end the other notices at once; else it takes the heartbeat, 6 to 8 s here."""
    with started(commands(HEARTBEAT, ["", ""]), tmp_path, devices=4, seconds=100, environment=STRICT) as processes:
        for process in processes:
            process.says("step 3 done", 80)
        processes[killed].kill()
        start = time.monotonic()
        assert processes[killed].ends(5) == -signal.SIGKILL
        other = processes[1 - killed]
        assert other.ends(15) != 0
        assert time.monotonic() - start <= 15
    assert "rror" in other.said()


SLEEP = ("timeit", "-n1", "-r1", "import time; time.sleep(60)")


def test_processes_of_a_test_end_whatever_happens(tmp_path):
    with started([SLEEP], tmp_path, seconds=1) as (process,):  # as one whose parent is gone
        assert process.ends(30) == 1
    assert "Timeout" in process.said()
    with pytest.raises(RuntimeError), started([SLEEP, SLEEP], tmp_path, seconds=60) as processes:
        raise RuntimeError
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2
