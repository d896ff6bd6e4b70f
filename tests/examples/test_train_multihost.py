"""The example over two processes: started as its docstring says, resumed by one process."""

from __future__ import annotations

import re
import shlex

import numpy as np
import pytest

from examples import train_multihost
from tests.helpers import standard_promotion
from tests.processes import free_port, started

COMMANDS = re.findall(r"^ +python -m (examples\.train_multihost .*)$", train_multihost.__doc__, re.MULTILINE)


def alone(*argv):
    """In this process, which has eight devices."""
    with standard_promotion(), train_multihost.jax.numpy_rank_promotion("allow"):
        return train_multihost.main([*map(str, argv)])


@pytest.mark.slow
def test_two_processes_train_as_one_and_one_goes_on(tmp_path):
    assert len(COMMANDS) == 2
    shared = ["--steps", "30", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]
    port = f"--coordinator=127.0.0.1:{free_port()}"
    commands = [(*shlex.split(command), *shared, port) for command in COMMANDS]
    with started(commands, tmp_path, seconds=300) as processes:
        # Meanwhile the same run here; the two have only read the data.
        whole = alone(*shared[:2], "--out", tmp_path / "alone", "--cache", tmp_path / "own cache")["fusedopt"]
        for process in processes:
            assert process.ends(280) == 0, process.said()
    said = processes[0].said()
    assert "2 processes, 8 devices" in said
    assert "stored" not in processes[1].said()
    results = {name: (float(loss), int(held.replace(",", ""))) for name, loss, held in
               re.findall(r"^(\w+): loss ([\d.]+), .*, ([\d,]+) bytes of state", said, re.MULTILINE)}  # fmt: skip
    # Gradients are summed in other orders, which training amplifies.
    for name in ("fusedopt", "optax"):
        np.testing.assert_allclose(results[name][0], whole["losses"][30], rtol=0.02, err_msg=name)
    assert whole["losses"][30] < 0.2 * whole["losses"][1]
    assert results["fusedopt"][1] < results["optax"][1] / 6  # an eighth, and padding
    assert (tmp_path / "curves.png").stat().st_size > 10_000

    rest = alone("--resume", "--steps", "35", *shared[2:])["fusedopt"]
    assert list(rest["losses"]) == [31, 32, 33, 34, 35]
    assert np.mean(list(rest["losses"].values())) < whole["losses"][20]
    with pytest.raises(SystemExit, match="--steps: got 35, expected more than the 35"):
        alone("--resume", "--steps", "35", *shared[2:])


def test_its_arguments(tmp_path, capsys):
    for i, command in enumerate(COMMANDS):
        args = train_multihost.parse_args(shlex.split(command)[1:])
        assert (args.processes, args.process, args.cpu_devices) == (2, i, 4)
    with pytest.raises(SystemExit):
        train_multihost.parse_args(["--processes", "2", "--process", "2"])
    assert "--process: got 2, expected one of 0 to 1" in capsys.readouterr().err
    own = ["--out", tmp_path, "--cache", tmp_path]
    with pytest.raises(SystemExit, match="--batch-size: got 60, expected a multiple of 8"):
        alone("--batch-size", 60, *own)
    with pytest.raises(SystemExit, match="--resume: there is no"):
        alone("--resume", *own)
