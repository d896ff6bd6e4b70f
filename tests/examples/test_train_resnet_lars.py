"""The LARS example on a few images: it learns, compares and draws."""

from __future__ import annotations

import numpy as np
import pytest

from examples import train_resnet_lars
from tests.helpers import standard_promotion


@pytest.mark.slow
def test_it_learns_compares_and_draws(tmp_path):
    plot = tmp_path / "curves.png"
    argv = ["--epochs", "6", "--batch-size", "128", "--compare", "--cache", str(tmp_path), "--plot", str(plot)]
    with standard_promotion(), train_resnet_lars.jax.numpy_rank_promotion("allow"):
        results = train_resnet_lars.main(argv)
    for result in results.values():
        assert len(result["losses"]) == 6 * 11
        assert np.mean(result["losses"][-5:]) < 0.5 * result["losses"][0]
        assert result["accuracies"][-1] > 80
    ratios = results["lars"]["ratios"]
    assert len(ratios) == 12  # eleven convolutions and the classifier
    assert all(len(values) == 6 and np.all(np.isfinite(values)) for values in ratios.values())
    assert plot.stat().st_size > 10_000


def test_images_are_moved_by_a_pixel_at_most():
    images = np.zeros((50, 8, 8), np.float32)
    images[:, 4, 4] = 1
    moved = train_resnet_lars.shifted(images, np.random.default_rng(0))
    assert moved.shape == images.shape
    rows, columns = np.nonzero(moved.sum(0))
    assert set(rows) == set(columns) == {3, 4, 5}
