"""`python -m benchmarks.gpu` with tiny sizes on the CPU: what only a lent machine runs must not break unnoticed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import models
from benchmarks.gpu import __main__ as program
from benchmarks.gpu import correctness, optimizers, record, timing, train_step, tuning
from pallas_kernels import compat

PARTS = ("correctness", "ceilings", "optimizers", "tuning", "train_step")
KERNELS = [b for b in ("triton", "mosaic") if b != "mosaic" or compat.HAS_MOSAIC]


@pytest.fixture
def main(tmp_path):
    """Runs `main` in this process; (status, rows)."""

    def run(*args, parts=()):
        out = tmp_path / "rows.jsonl"
        argv = ["--tiny", "--in-process", f"--out={out}", "--seed=5", *args]
        status = program.main([*argv, *(f"--part={part}" for part in parts)])
        return status, [json.loads(line) for line in out.read_text().splitlines()]

    return run


def measured(rows, part):
    return [r for r in rows if r["part"] == part and (r["median_us"] is not None or "ok" in r)]


def test_a_run_is_a_header_and_rows_with_all_keys_and_ends_in_a_table(main, capsys):
    status, rows = main(parts=["ceilings"])
    assert status == 0
    header, begin, *times, ceiling = rows
    assert header["part"] == "run"
    assert header["jax"] == jax.__version__
    assert {"device", "date", "seed", "optax", "flax", "torch"} <= set(header)
    assert begin["what"] == "begin"
    assert len(times) == 3
    for row in rows:
        assert {*record.LABELS, *record.VALUES} <= set(row)
    for row in times:
        assert row["p25_us"] <= row["median_us"] <= row["p75_us"]
        assert row["bytes"] == 8 * 2**16
        assert row["error"] is None
    assert ceiling["bytes_per_second"] == max(row["bytes_per_second"] for row in times)
    printed = capsys.readouterr().out
    for text in ("add one, in place", "correctness: 0 of 0 rows are right", "0 rows were skipped"):
        assert text in printed


def test_rows_are_appended(main):
    first = main("--budget=0", parts=["tuning"])[1]
    assert main("--budget=0", parts=["tuning"])[1][: len(first)] == first


def test_without_time_every_part_is_skipped_and_says_so(main, capsys):
    status, rows = main("--budget=0")
    assert status == 0
    assert [(r["part"], "skipped" in r) for r in rows[1:]] == [(part, True) for part in PARTS]
    assert "5 rows were skipped" in capsys.readouterr().out


def test_rows_for_which_the_time_is_too_short_are_skipped_and_those_before_are_not(tmp_path):
    run = record.Run(tmp_path / "rows.jsonl", 100, tiny=True)

    def candidate(what, seconds):
        build = lambda: timing.JaxSteps(lambda x: (x + 1,), [jnp.ones(3)])  # noqa: E731
        return timing.Candidate({"part": "tuning", "what": what}, build, seconds=seconds)

    timing.compare(run, [candidate("short", 1), candidate("long", 1000), candidate("last", 1)])
    rows = {r["what"]: r for r in record.read(tmp_path / "rows.jsonl")}
    assert rows["short"]["median_us"] > 0
    assert rows["last"]["median_us"] > 0
    assert "takes about 1001 s" in rows["long"]["skipped"]


def test_percents_need_the_ceilings():
    assert program.chosen(program.arguments(["--part=tuning"])) == ["ceilings", "tuning"]
    assert program.chosen(program.arguments(["--part=train_step", "--part=correctness"])) == [
        "correctness",
        "train_step",
    ]
    assert program.chosen(program.arguments([])) == list(PARTS)


def test_a_row_that_fails_is_recorded_and_the_others_run(main, monkeypatch, capsys):
    def broken():
        raise RuntimeError("a kernel that does not compile " + 400 * "x")

    def breaks_later():
        return lambda *operands: broken()

    variants = [("xla", "xla", lambda: tuning.xla), ("triton", "broken", broken), ("triton", "traced", breaks_later)]
    monkeypatch.setattr(tuning, "variants", lambda *_: [*variants, ("xla", "again", lambda: tuning.xla)])
    status, rows = main(parts=["tuning"])
    assert status == 0
    by_name = {r["what"]: r for r in rows}
    for name in ("broken", "traced"):
        assert by_name[name]["error"].startswith("RuntimeError: a kernel that does not compile xxx")
        assert len(by_name[name]["error"]) < 320
    for name in ("xla", "again"):
        assert by_name[name]["ratio"] > 0
        assert by_name[name]["percent_of_ceiling"] > 0
    assert "failed: tuning broken" in capsys.readouterr().out


def test_a_part_that_fails_is_recorded_and_the_next_one_runs(main, monkeypatch):
    def broken(run):
        raise RuntimeError("no")

    monkeypatch.setattr(correctness, "part", broken)
    status, rows = main(parts=["correctness", "ceilings"])
    assert status == 1
    assert [r["error"] for r in rows if r["error"]] == ["RuntimeError: no"]
    assert len(measured(rows, "ceilings")) == 3


@pytest.fixture
def one_rule(monkeypatch):
    monkeypatch.setattr(correctness, "RULES", ("sgd",))
    monkeypatch.setattr(correctness, "MODES", ("apply",))
    monkeypatch.setattr(correctness, "backends", lambda run: ("triton",))


def test_correctness_of_one_rule(main, one_rule):
    status, rows = main(parts=["correctness"])
    checks = measured(rows, "correctness")
    assert [(r["what"], r["ok"]) for r in checks] == [
        (what, True) for what in ("50 steps", "has_nan", "not donated", "bfloat16")
    ]
    assert status == 0


def test_a_wrong_result_is_a_status_of_one(main, monkeypatch, capsys):
    def part(run):
        rows = [("50 steps", correctness.follow, "apply", "triton", True)]
        correctness._check(run, correctness.Problem(run.seed, 3, tiny=True), "sgd", rows)

    monkeypatch.setattr(correctness, "part", part)
    monkeypatch.setattr(correctness, "TOLERANCE", 1e-12)
    status, rows = main(parts=["correctness"])
    first = measured(rows, "correctness")[0]
    assert status == 1
    assert first["ok"] is False
    assert first["measured"] > 1e-12
    assert first["bad_steps_change_nothing"] is True
    assert "wrong: correctness 50 steps sgd apply triton" in capsys.readouterr().out


def test_optimizers_beside_optax_and_what_is_missing(main, monkeypatch):
    def part(run):
        model = optimizers.Model("many_small", run.tiny, run.seed)
        optimizers.time_all(run, model, "adamw", [map(optimizers.Variant, ("optax", "flat", "torch fused"))])

    monkeypatch.setattr(optimizers, "part", part)
    monkeypatch.setitem(sys.modules, "torch", None)
    rows = {r["mode"]: r for r in main(parts=["optimizers"])[1]}
    assert rows["optax"]["ratio"] == 1
    assert rows["flat"]["ratio"] == pytest.approx(rows["flat"]["median_us"] / rows["optax"]["median_us"])
    assert rows["flat"]["bytes"] == 28 * 2 * 40 * 40
    assert rows["torch fused"]["skipped"] == "torch is not installed"
    assert rows["torch fused"]["error"] is None


class FakeTorch:
    """As much of PyTorch as the comparison uses, as it is not installed here. Writes down what it is asked for."""

    class Tensor:
        def __init__(self, values, device, requires_grad=False):
            self.values, self.device, self.requires_grad, self.grad = values, device, requires_grad, None

    def __init__(self):
        self.made, self.steps = [], 0
        self.tensor = self.Tensor
        self.cuda = types.SimpleNamespace(is_available=lambda: False)
        self.optim = types.SimpleNamespace(AdamW=self.make)

    def make(self, groups, **options):
        self.made.append((groups, options))

        def step():
            self.steps += 1

        return types.SimpleNamespace(step=step)


def test_pytorch_gets_the_same_arrays_and_the_same_decay(monkeypatch):
    torch = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    model = optimizers.Model("resnet50", tiny=True, seed=1)
    steps = optimizers.torch_steps(model, "adamw", "foreach", tiny=True)
    steps.compile()
    assert steps.run(3) <= time.perf_counter()
    [(groups, options)] = torch.made
    assert options == {"lr": 1e-3, "weight_decay": 1e-4, "foreach": True}
    decaying, others = (group["params"] for group in groups)
    assert groups[1]["weight_decay"] == 0
    assert [len(t.values.shape) > 1 for t in (*decaying, *others)] == [True] * len(decaying) + [False] * len(others)
    assert len(decaying) + len(others) == model.leaves
    assert all(t.grad.values.shape == t.values.shape and t.requires_grad for t in (*decaying, *others))
    assert torch.steps == 3
    with pytest.raises(timing.MissingError, match="torch sees no GPU"):
        optimizers.torch_steps(model, "adamw", "fused", tiny=False)
    with pytest.raises(timing.MissingError, match="PyTorch has no such optimizer"):
        optimizers.torch_steps(model, "lars", "fused", tiny=True)


def test_the_variants_begin_with_what_matters_most():
    names = ("triton", "mosaic", "xla")
    groups = list(optimizers.variants(names, full=True))
    assert [v.mode for v in groups[0][:5]] == ["optax", "flat", "apply", "torch fused", "torch foreach"]
    assert all(group[0].mode == "optax" for group in (*groups, *optimizers.loops(names)))
    variants = [v for group in groups for v in group if v.mode != "optax"]
    assert len(set(variants)) == len(variants)
    assert {(v.mode, v.backend) for v in variants} >= {(m, b) for m in ("flat", "apply") for b in (None, *names)}
    assert optimizers.MODELS[0] == "resnet50"


def some_variants():
    """A kernel of each backend by default."""
    for backend, what, make in tuning.variants(tuple(KERNELS), interpret=True):
        default = what in ("block 1024, 8 warps, flag", "block 1024, 4 warps")
        marks = () if default and what.count("flag") == (backend == "triton") else pytest.mark.slow
        yield pytest.param(make, "flag" in what, id=f"{backend}, {what}", marks=marks)


@pytest.mark.parametrize(("make", "flag"), list(some_variants()))
def test_the_kernels_of_tuning_compute_adamw(make, flag):
    held, g = tuning.buffers(4096, 3)
    scalars = jnp.asarray(tuning.SCALARS)
    step = jax.jit(make())
    got = step(*held, g, scalars)
    wide = [np.asarray(x, np.float64) for x in (*held, g)]
    w, m, v, g64 = wide
    lr, wd, b1, b2, eps = tuning.SCALARS[1:6].astype(np.float64)
    m, v = b1 * m + (1 - b1) * g64, b2 * v + (1 - b2) * g64**2
    want = (w - lr * (m / (np.sqrt(v) + eps) + wd * w), m, v)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    if flag:
        for a, b in zip(step(*held, g, scalars.at[0].set(1)), held, strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_network_of_the_train_step_takes_the_tree_of_resnet50():
    images, labels = jax.ShapeDtypeStruct((2, 224, 224, 3), np.float32), jax.ShapeDtypeStruct((2,), np.int32)
    with jax.numpy_rank_promotion("allow"):
        out = jax.eval_shape(train_step.loss_fn, models.shapes("resnet50"), images, labels)
    assert (out.shape, out.dtype) == ((), np.float32)


def test_a_process_that_dies_costs_the_rest_of_its_part(tmp_path, monkeypatch):
    out, commands = tmp_path / "rows.jsonl", []

    def child(command, **_):
        commands.append(command)
        run = record.Run(out, 1)
        if len(commands) == 1:
            run.write({"part": "correctness", "what": program.BEGIN})
            run.write({"part": "correctness", "what": "50 steps", "ok": True})
        return subprocess.CompletedProcess(command, -6 if len(commands) == 1 else 0)

    monkeypatch.setattr(subprocess, "run", child)
    assert program.main(["--tiny", f"--out={out}"]) == 1
    first, second = ([a for a in c if a.startswith("--part")] for c in commands)
    assert first == [f"--part={part}" for part in PARTS]
    assert second == first[1:]
    assert record.read(out)[-1]["error"] == "the process ended with status -6"


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    record.Run(path, 1).write({"part": "tuning", "what": "a", "measured": float("nan")})
    with path.open("a") as file:
        file.write('{"part": "tun')
    assert [(r["what"], r["measured"]) for r in record.read(path)] == [("a", "nan")]


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_each_part(main, part):
    status, rows = main("--budget=10000", parts=[part])
    assert status == 0
    assert [r for r in rows if r["error"]] == []
    assert all("torch" in r["skipped"] or "PyTorch" in r["skipped"] for r in rows if "skipped" in r)
    found = measured(rows, part)
    assert all(r["ok"] for r in found if "ok" in r)
    backends = {"best", "xla", *KERNELS} if part in ("correctness", "optimizers") else set()
    assert {r["backend"] for r in found} >= backends
    if part == "correctness":
        assert {r["mode"] for r in found} >= set(correctness.MODES)
    if part in ("optimizers", "train_step"):
        assert {r["mode"] for r in found} >= {"optax", "flat", "apply"}
        assert all(r["ratio"] > 0 for r in found)


@pytest.mark.slow
def test_as_a_program(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--part=ceilings", f"--out={tmp_path / 'rows.jsonl'}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "all rows:" in done.stdout
