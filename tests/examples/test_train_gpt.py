"""The GPT example: as with optax, resumable, and learning."""

from __future__ import annotations

import numpy as np
import pytest

from examples import train_gpt
from tests.helpers import standard_promotion


@pytest.fixture
def small(monkeypatch, tmp_path):
    for name, value in {"WIDTH": 16, "LAYERS": 1, "BATCH": 4, "CONTEXT": 16}.items():
        monkeypatch.setattr(train_gpt, name, value)

    def run(*options):
        argv = ["--out", str(tmp_path), "--sample", "0", "--total", "40", *options]
        with standard_promotion(), train_gpt.jax.numpy_rank_promotion("allow"):
            return train_gpt.main(argv)

    return run


@pytest.mark.slow
def test_it_resumes_where_it_was_and_draws(small, tmp_path):
    whole = small("--steps", "8")["fusedopt"]
    small("--steps", "5")
    rest = small("--steps", "8", "--resume")["fusedopt"]
    np.testing.assert_array_equal(rest, whole[5:])  # the same program on the same numbers
    assert (tmp_path / "loss.png").stat().st_size > 10_000


@pytest.mark.slow
def test_it_learns_as_optax_does(small, capsys):
    losses = small("--steps", "40", "--compare")
    # Two float32 programs of one network: their roundings grow with the steps.
    np.testing.assert_allclose(losses["fusedopt"], losses["optax"], rtol=1e-4)
    apart = np.max(np.abs(np.subtract(losses["fusedopt"], losses["optax"])))
    assert f"losses at most {apart:.1e} apart" in capsys.readouterr().out
    assert np.mean(losses["fusedopt"][-5:]) < losses["fusedopt"][0] - 0.4


def test_there_must_be_a_run_to_resume(small):
    with pytest.raises(SystemExit, match="there is no"):
        small("--resume")
