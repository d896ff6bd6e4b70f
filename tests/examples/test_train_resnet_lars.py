"""The LARS example on a few images: it learns, compares and draws."""

from __future__ import annotations

import numpy as np
import pytest

from examples import train_resnet_lars
from tests.helpers import standard_promotion


def run(tmp_path, *options):
    paths = ["--cache", str(tmp_path), "--plot", str(tmp_path / "curves.png")]
    with standard_promotion(), train_resnet_lars.jax.numpy_rank_promotion("allow"):
        return train_resnet_lars.main(["--batch-size", "128", "--compare", *paths, *options])


@pytest.mark.slow
def test_it_learns_compares_and_draws(tmp_path):
    results = run(tmp_path, "--epochs", "4")
    assert list(results) == ["optax.lars", "lars", "sgd"]
    for result in results.values():
        assert len(result["losses"]) == 4 * 11
        assert np.mean(result["losses"][-5:]) < 0.5 * result["losses"][0]
        assert result["accuracies"][-1] > 80
    ratios = results["lars"]["ratios"]
    assert len(ratios) == 12  # eleven convolutions and the classifier
    assert all(len(values) == 4 and np.all(np.isfinite(values)) for values in ratios.values())
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
def test_with_optaxs_ratio_the_losses_are_optaxs(tmp_path, capsys):
    results = run(tmp_path, "--epochs", "1", "--trust-ratio", "optax")
    ours, theirs = (np.array(results[name]["losses"]) for name in ("lars", "optax.lars"))
    # Two float32 programs of one network: their roundings grow with the steps.
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    apart = np.abs(ours - theirs)
    out = " ".join(capsys.readouterr().out.split())
    assert f"{apart[:10].max():.1e} apart in the first ten steps, {apart.max():.1e} in all" in out


def test_images_are_moved_by_a_pixel_at_most():
    images = np.zeros((50, 8, 8), np.float32)
    images[:, 4, 4] = 1
    moved = train_resnet_lars.shifted(images, np.random.default_rng(0))
    assert moved.shape == images.shape
    rows, columns = np.nonzero(moved.sum(0))
    assert set(rows) == set(columns) == {3, 4, 5}
