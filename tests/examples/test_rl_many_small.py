"""The reinforcement learning example: as with optax, in every mode, and solved."""

from __future__ import annotations

import io

import numpy as np
import optax
import pytest
from rich.console import Console

import fusedopt
from examples import ppo, rl_many_small
from tests.helpers import standard_promotion


@pytest.fixture
def small(monkeypatch):
    """A tenth of an iteration."""
    for name, value in {"CARTS": 4, "STEPS": 16, "EPOCHS": 2, "BATCH": 16, "UPDATES": 8}.items():
        monkeypatch.setattr(ppo, name, value)
    monkeypatch.setattr(rl_many_small, "WIDTH", 16)
    monkeypatch.setattr(rl_many_small, "SECONDS", 0.03)


def main(*argv):
    with standard_promotion():
        return rl_many_small.main([str(arg) for arg in argv])


@pytest.mark.slow
def test_it_trains_as_optax_does_and_says_what_steps_take(small, tmp_path, capsys):
    plot = tmp_path / "new" / "curves.png"
    runs = main("--compare", "--iterations", 2, "--blocks", 1, "--seeds", 3, 4, "--plot", plot)
    assert list(runs) == ["fusedopt", "optax"]
    for run in runs.values():
        assert run.returns.shape == (2, 2)
        assert run.losses.shape == (2, 2, 8)
        assert not np.array_equal(run.losses[0], run.losses[1])  # the seeds differ
    # One iteration: two float32 programs of one network, whose roundings grow with the steps.
    np.testing.assert_allclose(runs["fusedopt"].losses[:, 0], runs["optax"].losses[:, 0], rtol=1e-4)
    assert plot.stat().st_size > 10_000
    out = capsys.readouterr().out
    for row in ("each a call", "one call", "one call, with episodes"):
        assert f"│ {row} " in out
    assert "\r" not in out  # captured output is no terminal and gets no bar


@pytest.mark.slow
def test_the_modes_compute_the_same(small):
    args = rl_many_small.parse_args(["--iterations", "1", "--seeds", "0"])
    net, losses = rl_many_small.ActorCritic(0), {}
    for mode in ("optax", "apply", "flat"):
        tx = fusedopt.adam(optax.linear_schedule(1e-3, 0, 100), eps=1e-5, clip_norm=0.5)
        programs = rl_many_small.Programs(net, tx, mode)
        with standard_promotion():
            losses[mode] = rl_many_small.train(mode, programs, args, Console(file=io.StringIO())).losses
    np.testing.assert_allclose(losses["apply"], losses["optax"], rtol=1e-4)
    np.testing.assert_allclose(losses["flat"], losses["optax"], rtol=1e-4)


@pytest.mark.slow
def test_the_defaults_balance_every_pole(tmp_path):
    """Of the first seed: three in one program take three times as long."""
    runs = main("--seeds", 0, "--plot", tmp_path / "curves.png")
    # Gymnasium calls the task solved at 475.
    assert np.all(runs["fusedopt"].returns[:, -10:].mean(1) >= 475)


def test_arguments(capsys):
    args = rl_many_small.parse_args([])
    assert (args.mode, args.blocks, args.seeds, args.compare) == ("flat", 4, [0, 1, 2], False)
    with pytest.raises(SystemExit):
        rl_many_small.parse_args(["--help"])
    assert "Balance poles by PPO" in capsys.readouterr().out
