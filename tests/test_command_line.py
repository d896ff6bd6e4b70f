"""`python -m fusedopt`: what it prints and how it ends."""

import ast
import dataclasses
import functools
import importlib
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

import fusedopt
import fusedopt.__main__ as command
from fusedopt import doctor
from fusedopt.reports import bandwidth
from pallas_kernels import compat

ROOT = pathlib.Path(fusedopt.__file__).parents[1]


def words(text):
    return " ".join(text.split())


# -------------------------------------------------------------------------------------- report


def test_the_report_of_a_model(capsys):
    assert command.main(["report", "--model", "resnet50"]) == 0
    text = words(capsys.readouterr().out)
    assert "adamw, apply, on cpu: 161 leaves, 25,557,032 parameters" in text
    assert "bytes moved, at least 818 MB 32.00" in text  # w, g, m, v read, w, m, v written, g looked at
    assert "kernels, and what they move: not counted" in text


def test_options_reach_the_optimizer(capsys):
    options = (
        "--optimizer lamb --mode flat --dtype bfloat16 --master-weights --ema-decay 0.9 --clip-norm 1 --accumulate 2"
    )
    assert command.main(["report", "--model", "mlp_mnist", "--solo-from", "none", "--no-skip", *options.split()]) == 0
    text = words(capsys.readouterr().out)
    assert "lamb, flat, on cpu: 4 leaves, 407,050 parameters" in text
    assert "2 buckets in 2 groups: 2 packed, 0 of one large leaf each (solo)" in text
    for name in ("ema float32", "master float32", "accumulated float32", "optax.lamb in optax.MultiSteps"):
        assert name in text
    assert "look for NaN" not in text


@pytest.mark.parametrize("optimizer", list(command.OPTIMIZERS))
def test_every_optimizer_has_a_report(optimizer, capsys):
    assert command.main(["report", "--model", "rl_mlp", "--optimizer", optimizer]) == 0
    assert capsys.readouterr().out.startswith(f"{optimizer}, apply, on cpu: 13 leaves, 11,085 parameters")


def test_another_device(capsys):
    assert command.main(["report", "--model", "resnet50", "--device", "NVIDIA A100-SXM4-80GB"]) == 0
    text = words(capsys.readouterr().out)
    assert "2 packed triton" in text
    assert ("deprecates Pallas' Triton backend" in text) == compat.TRITON_IS_DEPRECATED


def test_compiling_measuring_and_drawing(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(bandwidth, "measure", lambda device: bandwidth.Bandwidth(1e9, "copy"))
    file = tmp_path / "layout.png"
    arguments = ["report", "--model", "rl_mlp", "--optimizer", "sgd", "--mode", "flat", "--compile", "--bandwidth"]
    assert command.main([*arguments, "--plot", str(file)]) == 0
    text = words(capsys.readouterr().out)
    assert re.search(r"kernels, as compiled \d+", text)
    assert re.search(r"time at the speed of a copy \S+ µs", text)
    assert text.endswith(f"wrote {file}")
    assert file.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--backend", "triton", "--compile"], "`backend`='triton' cannot run here"),
        (["--device", "NVIDIA H200", "--compile"], "`device`: compiling needs a device of this machine"),
        (["--accumulate", "0"], "`accumulate`: expected a positive int, got 0"),
        (["--solo-from", "0"], "`solo_from`: expected None or a positive int, got 0"),
        (["--plot", "layout.nothing"], "Format 'nothing' is not supported"),
        (["--plot", "missing/folder/layout.png"], "No such file or directory"),
    ],
)
def test_what_cannot_be_done_ends_with_2_and_says_why(arguments, text, capsys):
    assert command.main(["report", "--model", "rl_mlp", *arguments]) == 2
    printed = capsys.readouterr()
    assert text in printed.err
    assert printed.err.startswith("python -m fusedopt report: ")
    assert printed.out == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["report"], "the following arguments are required: --model"),
        (["report", "--model", "resnet51"], "argument --model: invalid choice: 'resnet51'"),
        (["report", "--model", "rl_mlp", "--optimizer", "adagrad"], "argument --optimizer: invalid choice: 'adagrad'"),
        (["report", "--model", "rl_mlp", "--solo-from", "many"], "argument --solo-from: invalid"),
        (["operate"], "invalid choice: 'operate'"),
    ],
)
def test_wrong_arguments_end_with_2(arguments, text, capsys):
    with pytest.raises(SystemExit) as end:
        command.main(arguments)
    assert end.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["report", "--help"], ["doctor", "--help"]])
def test_help(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        command.main(arguments)
    assert end.value.code == 0
    text = words(capsys.readouterr().out)
    assert text.startswith("usage: python -m fusedopt")
    if arguments[0] == "--help":
        assert "report what an optimizer holds of a model" in text
        assert "doctor versions, devices, backends" in text
    if arguments[0] == "report":
        assert "one of mlp_mnist, rl_mlp, deep_narrow, resnet50" in text
        assert "default: 16384" in text


def test_as_a_process_without_optional_packages(tmp_path):
    """From another folder, with neither rich nor matplotlib, flax nor the folders of a checkout that are not installed."""
    for name in ("rich", "matplotlib", "flax", "benchmarks", "tests"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name} here', name='{name}')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "JAX_PLATFORMS": "cpu"}
    run = functools.partial(subprocess.run, capture_output=True, text=True, cwd=tmp_path, env=environment)
    done = run([sys.executable, "-W", "error", "-m", "fusedopt", "--version"])
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, f"fusedopt {fusedopt.__version__}", "")
    done = run([sys.executable, "-W", "error", "-m", "fusedopt", "report", "--model", "resnet50"])
    assert (done.returncode, done.stderr) == (0, "")
    assert "161 leaves, 25,557,032 parameters" in done.stdout
    done = run([sys.executable, "-W", "error", "-m", "fusedopt", "report", "--model", "rl_mlp", "--plot", "x.png"])
    assert done.returncode == 2
    assert "pip install 'fusedopt[report]'" in done.stderr


def test_the_package_imports_nothing_that_is_not_installed_with_it():
    for path in sorted((ROOT / "fusedopt").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] not in ("benchmarks", "examples", "tests"), path


# -------------------------------------------------------------------------------------- doctor


@pytest.fixture(scope="module")
def examined():
    return doctor.Doctor()


def test_the_doctor_finds_this_machine_healthy(examined, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "Doctor", lambda interpret: examined)
    assert command.main(["doctor"]) == 0
    printed = capsys.readouterr()
    text = words(printed.out)
    assert "seconds" in printed.err
    assert text.startswith(f"fusedopt {fusedopt.__version__}")
    assert f"jax {jax.__version__}" in text
    assert "8 × cpu" in text
    assert "xla yes, the first choice runs everywhere" in text
    assert "triton no needs an NVIDIA GPU, the device is 'cpu'" in text
    assert "all 4 checks passed" in text
    assert "not tested, they cannot run here:" in text
    assert "NOTICE" not in text


def test_checks_compare_with_optax_and_are_close(examined):
    assert [(c.backend, c.rule, c.mode, c.against) for c in examined.checks] == [
        ("xla", rule, mode, "optax") for rule in ("adamw", "lars") for mode in ("apply", "flat")
    ]
    assert all(0 < c.error <= doctor.TOLERANCE and not c.failure for c in examined.checks)


@pytest.mark.slow  # interpreted kernels take a while
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_interpreted_kernels_compute_what_xla_does():
    found = doctor.Doctor(interpret=True)
    kernels = {"triton", "mosaic"} if compat.HAS_MOSAIC else {"triton"}
    assert set(found.interpreted) == kernels
    assert len(found.checks) == 4 * (1 + len(kernels))
    assert found.healthy, str(found)
    assert "triton, interpreted" in str(found)


def broken(monkeypatch, launcher):
    """XLA's launcher replaced for one rule, so that a test is quick."""
    module = importlib.import_module("pallas_kernels.elementwise")
    monkeypatch.setattr(module, "_launcher", lambda name: launcher)
    monkeypatch.setattr(doctor, "RULES", {"adamw": doctor.RULES["adamw"]})
    return module.elementwise_xla


def test_a_backend_that_computes_something_else_fails(monkeypatch, capsys):
    def wrong(call, *args):
        def fn(s, *blocks):
            first, *others = call.fn(s, *blocks)
            return (first * jax.numpy.float32(1 + 1e-4), *others)

        return right(dataclasses.replace(call, fn=fn), *args)

    right = broken(monkeypatch, wrong)
    assert command.main(["doctor"]) == 1
    text = words(capsys.readouterr().out)
    assert text.count("FAILED: a step with a NaN was not skipped") == 2  # the parameters move in any case
    monkeypatch.setattr(doctor, "_run", functools.partial(lambda run, *args: (run(*args)[0], ""), doctor._run))
    assert command.main(["doctor"]) == 1
    text = words(capsys.readouterr().out)
    assert text.count("FAILED: the parameters differ") == 2
    assert "2 of 2 checks FAILED" in text
    assert "checks passed" not in text


def test_a_backend_that_does_not_run_fails_and_does_not_end_the_test(monkeypatch, capsys):
    def missing(*args):
        raise RuntimeError("no such kernel\nand more lines")

    broken(monkeypatch, missing)
    assert command.main(["doctor"]) == 1
    text = words(capsys.readouterr().out)
    assert "2 of 2 checks FAILED" in text
    assert "FAILED: RuntimeError: no such kernel" in text
    assert "and more lines" not in text


def test_a_step_that_should_have_been_skipped_fails(monkeypatch):
    make, twin = doctor.RULES["adamw"]
    unguarded = lambda **options: make(skip_nonfinite=False, **options)  # noqa: E731
    monkeypatch.setattr(doctor, "RULES", {"adamw": (unguarded, twin)})
    found = doctor.Doctor()
    assert not found.healthy
    assert {c.failure for c in found.checks} == {"a step with a NaN was not skipped"}


def test_no_number_is_not_close():
    nan = {"w": jax.numpy.array([1.0, float("nan")])}
    one = {"w": jax.numpy.ones(2)}
    assert not doctor._difference(nan, one) <= doctor.TOLERANCE
    assert doctor._difference({"w": 1.5 * one["w"], "b": one["w"]}, {"w": one["w"], "b": one["w"]}) == 0.5


class Gpu:
    platform = "gpu"

    def __init__(self, kind, capability):
        self.device_kind, self.compute_capability = kind, capability


@pytest.mark.parametrize("deprecated", [True, False])
def test_gpus_get_their_backends_and_a_notice(deprecated, monkeypatch):
    monkeypatch.setattr(doctor, "_checks", lambda *args: [])
    monkeypatch.setattr(compat, "TRITON_IS_DEPRECATED", deprecated)
    gpus = [Gpu("NVIDIA H200", "9.0")] * 2 + [Gpu("NVIDIA A100-SXM4-80GB", "8.0"), Gpu("Tesla T4", "7.5")]
    found = doctor.Doctor(devices=gpus)
    text = words(str(found))
    assert "2 × NVIDIA H200" in text
    first = "mosaic" if compat.MOSAIC_IN_COMMAND_BUFFERS else "triton"
    assert f"{first} yes, the first choice 'NVIDIA H200' has 9.0" in text
    assert "triton no needs compute capability >= 8.0, 'Tesla T4' has 7.5" in text
    notices = re.findall(r"NOTICE, ([^:]+):", text)
    assert notices == (["NVIDIA H200", "NVIDIA A100-SXM4-80GB"] if deprecated else [])
    if deprecated:
        assert f"jax {jax.__version__} deprecates Pallas' Triton backend" in text
