"""`python -m benchmarks`: its arithmetic with made-up times, and all of its sections on tiny cases."""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import platform
import sys

import jax
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import cases, comparison, growth, peers, plots, programs, sections, storage, timing, train_models
from benchmarks.comparison import Comparison, Setup

TINY = Setup(seconds=0.0, rounds=2, sample_seconds=0.0, compiles=1)


class Clock:
    """Time that passes only where a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> float:
        self.now += seconds
        return seconds


def test_ratio_is_the_median_of_the_rounds_ratios():
    """Rounds of a machine that becomes ten times slower: the ratio of the medians would say 3."""
    ours, theirs = [1.0, 1.0, 10.0], [3.0, 2.5, 20.0]
    assert timing.ratio(ours, theirs) == {"ratio": 2.5, "ratio_p25": 2.25, "ratio_p75": 2.75}
    assert timing.ratio(theirs, ours)["ratio"] == pytest.approx(0.4)
    assert timing.ratio(theirs, theirs) == {"ratio": 1.0, "ratio_p25": 1.0, "ratio_p75": 1.0}
    with pytest.raises(ValueError, match="argument"):
        timing.ratio([1.0], [1.0, 2.0])


def test_summary_has_quartiles_and_their_distance():
    row = timing.summary([1e-6, 2e-6, 3e-6, 4e-6, 5e-6])
    assert row == pytest.approx({"median_us": 3, "p25_us": 2, "p75_us": 4, "spread": 2 / 3, "samples": 5})


def test_candidates_take_turns_in_alternating_order():
    clock, order = Clock(), []

    def sampler(name, seconds):
        order.append(name)
        return clock.work(seconds)

    samplers = {name: functools.partial(sampler, name, s) for name, s in (("a", 1.0), ("b", 2.0), ("c", 3.0))}
    times = timing.interleave(samplers, seconds=0.0, rounds=2, clock=clock)
    assert "".join(order) == "abccba"
    assert times == {"a": [1.0, 1.0], "b": [2.0, 2.0], "c": [3.0, 3.0]}


@pytest.mark.parametrize(("seconds", "rounds", "expected"), [(0.0, 9, 9), (20.0, 9, 20), (1e6, 9, 30)])
def test_rounds_go_on_until_the_time_is_over(seconds, rounds, expected):
    clock = Clock()
    times = timing.interleave({"a": lambda: clock.work(1.0)}, seconds, rounds, most=30, clock=clock)
    assert len(times["a"]) == expected


@pytest.mark.parametrize(("step", "expected"), [(1e-5, 2000), (1e-3, 20), (0.003, 7), (0.015, 1), (5.0, 1)])
def test_a_sample_lasts_about_20_ms(step, expected):
    clock = Clock()
    assert timing.steps_a_sample(lambda n: clock.work(n * step), 0.02, clock) == expected


def test_check_finds_wrong_parameters():
    right = [np.ones((2, 3), np.float32), np.full(4, -50, np.float32)]
    programs.check([x + np.float32(1e-4) for x in right], right)
    for wrong in (1e-3, np.nan):
        bent = [right[0], right[1] + np.array([wrong, 0, 0, 0], np.float32)]
        with pytest.raises(programs.WrongResultError, match="1 of 10"):
            programs.check(bent, right)
        programs.check(bent, right, outliers=0.1)
    with pytest.raises(programs.WrongResultError, match="shapes"):
        programs.check(right[:1], right)


def test_merge_replaces_rows_of_the_same_section_case_and_candidate():
    def row(section, case, candidate, value):
        return {"section": section, "case": case, "candidate": candidate, "ratio": value}

    old = [row("step", "a", "flat", 1), row("step", "a", "apply", 2), row("train", "a", "flat", 3)]
    new = [row("step", "a", "apply", 4), row("step", "b", "flat", 5)]
    assert storage.merge(old, new) == [old[0], new[0], old[2], new[1]]


def test_results_of_another_environment_are_not_mixed_in(tmp_path):
    path = tmp_path / "r.json"
    row = {"section": "step", "case": "a", "candidate": "flat", "ratio": 1.23456789}
    storage.save(path, [row])
    assert [r["ratio"] for r in storage.load(path)] == [1.2346]
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "header": {**document["header"], "optax": "0.0.1"}}))
    assert storage.load(path) == []


def test_command_ends_with_2_for_unknown_names(capsys):
    for arguments in (["--model", "alexnet"], ["--only", "train", "--model", "rl_mlp"], ["--only", "speed"]):
        with pytest.raises(SystemExit) as end:
            command.main(arguments)
        assert end.value.code == 2
    assert "no model 'alexnet': the known ones are tiny_300, " in capsys.readouterr().err


def test_plan_has_every_case():
    planned = {(case.section, case.name) for case in sections.plan()}
    trees = set(cases.TREES) - {"lars_200"}
    assert trees >= {"tiny_300", "convs_120", "adapters_600", "mixed", "large_10", "many_small", "gpt2_small"}
    assert {("step", name) for name in trees} | {("guarded", name) for name in trees} <= planned
    assert {("lars", name) for name in ("resnet50", "convs_120", "lars_200")} <= planned
    assert {("train", name) for name in ("actor_critic", "deep_48", "cnn_12", "mlp_3x1024", "deep_200")} <= planned
    assert {("dispatch", "leaves_2000"), ("growth", "leaves_10"), ("growth", "leaves_5000")} <= planned
    assert {case.name for case in sections.plan(names=["lars_200", "cnn_12"])} == {"lars_200", "cnn_12"}
    assert [case.name for case in sections.plan(["train"], ["cnn_12", "rl_mlp"])] == ["cnn_12"]


@pytest.mark.parametrize(
    ("name", "leaves", "parameters"),
    [("convs_120", 360, 120 * (9 * 32 * 32 + 64)), ("adapters_600", 600, 600 * 3072), ("large_10", 10, 10_000_000),
     ("mixed", 272, 8 * 1024**2 + 264 * 128), ("lars_200", 200, 200 * 4096)],
)  # fmt: skip
def test_sizes_of_the_trees(name, leaves, parameters):
    sizes = [x.size for x in jax.tree.leaves(cases.shapes(name))]
    assert (len(sizes), sum(sizes)) == (leaves, parameters)


def test_tiny_300_has_leaves_of_24_to_576_elements():
    sizes = [x.size for x in jax.tree.leaves(cases.tiny_300())]
    assert (len(sizes), 24 <= min(sizes) < 100 < 400 < max(sizes) <= 576) == (300, True)


@pytest.fixture
def tiny(monkeypatch):
    """Every section has small cases, and compiled programs may come from the suite's cache."""
    shapes = {"dense": {"kernel": cases.leaf(3, 5), "bias": cases.leaf(5)}, "out": {"kernel": cases.leaf(5, 2)}}
    monkeypatch.setitem(cases.TREES, "tiny", lambda: shapes)
    deep = lambda: train_models.Problem(train_models.Deep(2, width=8), (8,), batch=4)  # noqa: E731
    monkeypatch.setitem(train_models.PROBLEMS, "tiny", deep)
    own = dict.fromkeys(sections.SECTIONS, ("tiny",)) | {"dispatch": (4,), "growth": (2, 4)}
    monkeypatch.setattr(sections, "FULL", own)
    monkeypatch.setattr(growth, "TREES_UP_TO", 2)
    monkeypatch.setattr(cases, "LARGE", 20)
    monkeypatch.setattr(peers, "COPIES", {name: functools.partial(make, 64) for name, make in peers.COPIES.items()})
    monkeypatch.setattr(programs, "uncached", contextlib.nullcontext)
    monkeypatch.setattr(comparison, "Setup", lambda **_: TINY)
    monkeypatch.setitem(sys.modules, "torch", None)  # cannot be imported


TIMED = {
    ("step", "tiny"): {"optax", "flat", "apply", "update", "optax.flatten", *peers.COPIES},
    ("guarded", "tiny"): {"optax", "apply_if_finite", "flat", "apply", "update", *peers.COPIES},
    ("lars", "tiny"): {"optax", "flat", "apply"},
    ("train", "tiny"): {"optax", "flat", "apply"},
    ("dispatch", "leaves_4"): {"optax", "flat", "apply"},
    ("growth", "leaves_2"): {"optax", "flat", "apply"},
    ("growth", "leaves_4"): {"flat"},
}


@pytest.mark.slow  # it compiles some forty programs
def test_every_section_yields_its_rows_and_files(tiny, tmp_path, capsys, monkeypatch):
    assert command.main(["--out", str(tmp_path), "--seconds", "0"]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {storage.name(), "step-ratios.png", "growth.png"}
    text = (tmp_path / storage.name()).read_text()
    rows = json.loads(text)["rows"]
    timed = [r for r in rows if "median_us" in r]
    for case, candidates in TIMED.items():
        assert {r["candidate"] for r in timed if (r["section"], r["case"]) == case} == candidates
    common = {"leaves", "parameters", "p25_us", "p75_us", "spread", "samples", "steps_a_sample"}
    assert all(common <= r.keys() and r["samples"] == 2 for r in timed)
    for r in (r for r in timed if "gigabytes_per_second" not in r):
        assert ("ratio" in r) == ("baseline" in r) == (r["case"] != "leaves_4" or r["section"] != "growth")
        assert {"trace_ms", "lower_ms", "compile_ms", "temp_bytes", "builds"} <= r.keys()
        assert ("percent_of_copy" in r) == ((r["section"], r["case"]) in (("step", "tiny"), ("guarded", "tiny")))
        assert ("apply_if_finite" in r.get("against", {})) == (r["section"] == "guarded")
        assert ("dispatch_us" in r) == ("ns_per_parameter" in r) == (r["section"] == "growth")
    skipped = {r["candidate"]: r["skipped"] for r in rows if "skipped" in r}
    torch, large = "torch is not installed", "compiled up to 2 leaves only"
    assert skipped == {"torch fused": torch, "torch foreach": torch, "optax": large, "apply": large}
    for private in (str(pathlib.Path.home()), str(pathlib.Path.cwd()), str(tmp_path), platform.node()):
        assert len(private) < 4 or private not in text
    printed = capsys.readouterr().out
    assert all(f"{section}: {about[:40]}" in printed for section, about in sections.ABOUT.items())

    monkeypatch.setattr(plots, "draw", lambda *_: [])
    before = {storage.key(r): r for r in rows}
    assert command.main(["--out", str(tmp_path), "--only", "lars", "--seconds", "0"]) == 0
    after = {storage.key(r): r for r in json.loads((tmp_path / storage.name()).read_text())["rows"]}
    assert before.keys() == after.keys()
    assert {key[0] for key in before if before[key] != after[key]} == {"lars"}


def test_wrong_candidates_are_not_timed(tiny):
    tree = cases.Tree(cases.shapes("tiny"))
    builds = peers.builders(tree, names=("optax",))
    builds["no step"] = lambda: programs.Program(lambda p, g: (p,), (tree.device_params(),), (tree.device_grads,))
    builds["broken"] = lambda: {}["secret place"]
    run = Comparison({"section": "step", "case": "tiny", "leaves": 3, "parameters": 30}, builds)
    run.prepare(TINY)
    optax, wrong, broken = run.measure(TINY)
    assert (optax["ratio"], broken["error"]) == (1.0, "KeyError")
    assert "further than" in wrong["error"]
    assert "median_us" not in wrong
    assert plots.ratios([optax, wrong, broken], "") is None


def test_torch_takes_the_same_step():
    pytest.importorskip("torch")
    builds = peers.builders(cases.Tree(cases.shapes("rl_mlp")), names=("optax", "torch fused", "torch foreach"))
    run = Comparison({"case": "rl_mlp"}, builds)
    run.prepare(TINY)
    assert set(run.programs) == {"optax", "torch fused", "torch foreach"}, run.rows


def test_uncached_restores_the_setting():
    before = jax.config.jax_enable_compilation_cache
    with programs.uncached():
        assert not jax.config.jax_enable_compilation_cache
    assert jax.config.jax_enable_compilation_cache == before


@pytest.mark.slow
def test_quick_run(tmp_path):
    assert command.main(["--quick", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / storage.name()).read_text())["rows"]
    assert {r["section"] for r in rows} == set(sections.QUICK_SECTIONS)
    assert all(r["samples"] >= timing.ROUNDS for r in rows if "samples" in r)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "leaves"), [("actor_critic", 12), ("deep_48", 242), ("cnn_12", 38), ("mlp_3x1024", 8), ("deep_200", 802)]
)
def test_networks_have_their_size(name, leaves):
    assert train_models.Train(train_models.PROBLEMS[name]()).leaves == leaves


@pytest.mark.slow
@pytest.mark.parametrize("name", ["actor_critic", "mlp_3x1024"])  # the deep ones compile for minutes on jax 0.10
def test_networks_take_the_same_step_in_all_modes(name):
    job = train_models.Train(train_models.PROBLEMS[name]())
    run = Comparison({"case": name}, {mode: functools.partial(job.program, mode) for mode in train_models.MODES})
    run.outliers = programs.OUTLIERS
    run.prepare(TINY)
    assert set(run.programs) == set(train_models.MODES), run.rows
