"""The example that takes a run over from optax: its losses and its picture."""

import numpy as np
import pytest

from examples import idx, resume_from_optax
from tests.helpers import standard_promotion


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def run(cache, tmp_path, *argv):
    args = ["--cache", str(cache), "--plot", str(tmp_path / "new" / "curves.png"), *argv]
    with standard_promotion():
        return resume_from_optax.main(args)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", resume_from_optax.OPTIMIZERS)
def test_both_runs_have_the_same_losses(optimizer, cache, tmp_path, capsys):
    difference = run(cache, tmp_path, "--optimizer", optimizer)
    assert difference < 1e-3  # training amplifies rounding errors
    assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "largest difference of 450 losses" in capsys.readouterr().out


def test_a_short_run_is_the_same_to_rounding(cache, tmp_path):
    args = resume_from_optax.parse_args(["--steps", "3", "--optimizer", "momentum"])
    data = idx.read_mnist(idx.cached_digits(cache))
    stay, visit = resume_from_optax.both_runs(args, data, tmp_path, lambda losses: None)
    assert len(stay) == len(visit) == 9
    np.testing.assert_allclose(visit, stay, rtol=1e-5)


def test_arguments(capsys):
    args = resume_from_optax.parse_args([])
    assert (args.optimizer, args.steps, args.plot.name) == ("adamw", 150, "resume_from_optax.png")
    with pytest.raises(SystemExit):
        resume_from_optax.parse_args(["--help"])
    assert "run over from optax" in capsys.readouterr().out
