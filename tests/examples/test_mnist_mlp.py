"""The first example: its command line, and that every optimizer trains in every mode."""

import io
import re

import jax
import numpy as np
import pytest
from rich.console import Console

from examples import idx, mnist_mlp
from tests.helpers import standard_promotion

MODES = ("optax", "apply", "flat")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def digits(cache):
    return idx.read_mnist(idx.cached_digits(cache))


def train(digits, *argv, library="fusedopt"):
    console = Console(file=io.StringIO())
    with standard_promotion():  # for optax
        return mnist_mlp.train(digits, mnist_mlp.parse_args([str(arg) for arg in argv]), console, library)


def test_the_defaults_reach_97_percent(cache, capsys):
    accuracy = mnist_mlp.main(["--cache", str(cache)])
    assert accuracy >= 0.97
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == f"test accuracy: {100 * accuracy:.2f} %"
    assert re.search(r"epoch .* train loss .* train acc .* test acc", out)
    # Captured output is no terminal: a header, one row for each epoch, and no progress bar.
    assert len(out.splitlines()) < 30
    assert "\r" not in out


@pytest.mark.parametrize(("optimizer", "mode"), [("momentum", "optax"), ("lars", "apply")])
def test_trains_quickly(digits, optimizer, mode):
    history = train(digits, "--optimizer", optimizer, "--mode", mode, "--epochs", 5)
    assert history[-1].test_accuracy > 0.85
    assert history[-1].train_loss < history[0].train_loss


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimizer", mnist_mlp.OPTIMIZERS)
def test_every_optimizer_trains_in_every_mode(digits, optimizer, mode):
    history = train(digits, "--optimizer", optimizer, "--mode", mode)
    assert history[-1].test_accuracy > 0.95


@pytest.mark.parametrize("optimizer", ["adamw", "lars-nesterov"])
def test_the_modes_compute_the_same(digits, optimizer):
    first, *others = (train(digits, "--optimizer", optimizer, "--mode", mode, "--epochs", 1) for mode in MODES)
    for other in others:
        # One epoch: rounding differs between the modes, and training amplifies it.
        np.testing.assert_allclose(other[0].train_loss, first[0].train_loss, rtol=1e-4)


@pytest.mark.parametrize(
    "optimizer",
    ["adamw", *(pytest.param(name, marks=pytest.mark.slow) for name in mnist_mlp.OPTIMIZERS if name != "adamw")],
)
def test_the_losses_fall_as_optaxs(digits, optimizer):
    ours, theirs = (train(digits, "--optimizer", optimizer, "--epochs", 1, library=x) for x in ("fusedopt", "optax"))
    assert len(ours[0].losses) == 22
    # 22 steps amplify rounding; optax's LARS has |g + wd*w| where ours has |g| + wd*|w|.
    tolerance = 5e-3 if "lars" in optimizer else 1e-4
    np.testing.assert_allclose(ours[0].losses, theirs[0].losses, atol=tolerance, rtol=0)
    assert ours[0].losses[-1] < 0.7 * ours[0].losses[0]


def test_compare_trains_with_both_and_draws(cache, tmp_path, capsys):
    plot = tmp_path / "new" / "curves.png"
    with standard_promotion():
        accuracy = mnist_mlp.main(["--cache", str(cache), "--compare", "--epochs", "1", "--plot", str(plot)])
    assert plot.read_bytes().startswith(b"\x89PNG")
    out = " ".join(capsys.readouterr().out.split())
    apart = re.search(r"losses apart: (\S+) at most in the first ten steps, (\S+) in all 22", out)
    assert 0 <= float(apart[1]) <= float(apart[2]) < 1e-4
    theirs = re.search(r"test accuracy: (\S+) % with optax", out)
    assert abs(float(theirs[1]) - 100 * accuracy) <= 100 / 360  # one image


def test_the_seed_decides_everything(digits):
    first, again, another = (train(digits, "--epochs", 1, "--seed", seed) for seed in (1, 1, 2))
    assert first == again
    assert first != another


def test_the_schedule_ends_near_zero(digits):
    learning_rate = mnist_mlp.make_learning_rate(0.5, "warmup-cosine", steps=100)
    rates = [float(learning_rate(step)) for step in (0, 9, 10, 55, 100)]
    np.testing.assert_allclose(rates, [0.05, 0.5, 0.5, 0.2525, 0.005], rtol=1e-6)
    assert mnist_mlp.make_learning_rate(0.5, "constant", steps=100) == 0.5
    history = train(digits, "--schedule", "warmup-cosine", "--epochs", 3)
    assert history[-1].test_accuracy > 0.85


def test_data_from_a_folder(cache, tmp_path, capsys):
    folder = idx.cached_digits(cache)
    accuracy = mnist_mlp.main(["--data", str(folder), "--epochs", "1", "--device", "cpu"])
    assert 0.1 < accuracy <= 1
    assert "1437 training and 360 test images, adamw, mode flat, cpu" in capsys.readouterr().out

    with pytest.raises(SystemExit, match="got none of the files train-images-idx3-ubyte"):
        mnist_mlp.main(["--data", str(tmp_path)])


def test_labels_beyond_nine(tmp_path):
    for part in ("train", "t10k"):
        idx.write_idx(tmp_path / f"{part}-images-idx3-ubyte", np.zeros((2, 2, 2), np.uint8))
        idx.write_idx(tmp_path / f"{part}-labels-idx1-ubyte", np.array([3, 10], np.uint8))
    with pytest.raises(SystemExit, match=r"^labels: got 10, expected 0 to 9$"):
        mnist_mlp.main(["--data", str(tmp_path)])


def test_a_batch_larger_than_the_data(cache):
    with pytest.raises(SystemExit, match="--batch-size: got 1438, expected at most 1437"):
        mnist_mlp.main(["--cache", str(cache), "--batch-size", "1438"])


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the message for a missing GPU needs a machine without one")
def test_a_device_that_is_not_there(cache):
    with pytest.raises(SystemExit, match="--device gpu: got only cpu devices here, expected a gpu"):
        mnist_mlp.main(["--cache", str(cache), "--device", "gpu"])


def test_arguments():
    args = mnist_mlp.parse_args([])
    assert (args.optimizer, args.mode, args.schedule) == ("adamw", "flat", "constant")
    assert (args.data, args.learning_rate, args.device) == (None, None, None)
    args = mnist_mlp.parse_args(["--optimizer", "lars-nesterov", "--learning-rate", "0.25"])
    assert (args.optimizer, args.learning_rate) == ("lars-nesterov", 0.25)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--optimizer", "adagrad"], "invalid choice: 'adagrad'"),
        (["--mode", "tree"], "invalid choice: 'tree'"),
        (["--epochs", "0"], "--epochs: invalid positive int value: '0'"),
        (["--batch-size", "1.5"], "--batch-size: invalid positive int value: '1.5'"),
        (["--learning-rate", "-1"], "--learning-rate: invalid positive float value: '-1'"),
        (["--learning-rate", "nan"], "--learning-rate: invalid positive float value: 'nan'"),
    ],
)
def test_bad_arguments(argv, text, capsys):
    with pytest.raises(SystemExit) as error:
        mnist_mlp.parse_args(argv)
    assert error.value.code == 2
    assert text in capsys.readouterr().err
