"""The notebooks run with this Python, and what their text says of the figures is so."""

from __future__ import annotations

import sys
import textwrap

import nbformat
import pytest

from notebooks import execute

# Python that runs in the notebook's kernel after its last cell. The text of a notebook names no numbers that another run
# could contradict; these are the statements it does make.
CLAIMS = {
    "01_quickstart": """
        assert all(np.max(distance(losses[mode], losses["optax"])) < 1e-3 for mode in modes)  # the same in float32
        assert np.max(distance(fused64, optax64)) < 1e-12  # the rest is rounding
        # ... and most of it is that of `1 - b2**t`: gone where b2 is a number that loses no digits there
        exact, start = {"b2": 1 - 2.0**-10}, init_params()
        tx = optax.adamw(1e-3, **exact, mask=fusedopt.weight_mask)
        theirs, _, _ = train(optax_step(tx), start, tx.init(start))
        tx = fusedopt.adamw(1e-3, **exact)
        ours, _, _ = train(optax_step(tx), start, tx.init(start))
        assert np.max(distance(ours, theirs)) < 0.2 * np.max(distance(losses["update"], losses["optax"]))
        assert losses["flat"][-10:].mean() < 0.2 * losses["flat"][0]  # it learns
        assert counts["flat"] < counts["apply"] < counts["optax"]
        assert int(state.total_skipped) == 1 and len(traces) == 1
    """,
    "02_lars_large_batch": """
        best = {name: scores[..., 0].mean(axis=2).argmax(axis=1) for name, scores in table.items()}
        test = {name: table[name][np.arange(len(SIZES)), best[name], :, 1].mean(axis=1) for name in table}
        assert abs(test["SGD"][0] - test["LARS"][0]) < 3  # small batches: no difference
        assert test["LARS"][2] > test["SGD"][2] + 2 and test["LARS"][3] > test["SGD"][3]  # large ones: LARS loses less
        assert test["SGD"][3] < test["SGD"][0] - 10 and test["LARS"][3] < test["LARS"][0] - 10  # both lose
        short = {}
        for name, scores in table.items():
            means = scores[..., 0].mean(axis=2)
            short[name] = (means.max(axis=1, keepdims=True) - means).max(axis=0).min()
        assert short["LARS"] < 5 < short["SGD"]  # one learning rate for all batch sizes
        for values in (relative, ratios):  # more between steps than between layers
            over_layers, over_steps = (np.median(np.max(values, axis=i) / np.min(values, axis=i)) for i in (1, 0))
            assert 1.5 < over_layers < over_steps
        assert all(0 < best[name].min() and best[name].max() < 5 for name in table)  # no best rate at the end of a sweep
    """,
    "03_mixed_precision": """
        assert set(paths["bfloat16"]) == {1.0}  # never moves
        assert np.max(np.abs(np.subtract(paths["float32"], paths["bfloat16 with master_weights"]))) < 1 / 512 + 1e-3
        last = {name: float(np.mean(r["loss"][-50:])) for name, r in results.items()}
        assert last["bfloat16"] > 2 * last["float32"]
        state = results["bfloat16 with master_weights"]["state"]
        assert sum(x.nbytes for x in state.master) >= 4 * number
        assert abs(last["bfloat16 with master_weights"] / last["float32"] - 1) < 0.2
        assert np.mean(sizes < -25) < 0.03 and np.mean(sizes - 12 < -25) > 0.1  # hardly any, and many
        state = scaled["state"]
        assert 4 < int(state.total_skipped) < 40 and int(state.count) + int(state.total_skipped) == 400
        assert np.all(halved) and scaled["scale"][0] == 2.0**24 > np.max(scaled["scale"][100:])
        assert np.any(np.diff(scaled["scale"]) > 0)  # it also grows
        last = {name: float(np.mean(r["loss"][-50:])) for name, r in small.items()}
        assert last["float16, no loss scale"] > 1.2 * last["float32"]
        assert abs(last["float16, DynamicLossScale"] / last["float32"] - 1) < 0.1
        last = {name: float(np.mean(r["loss"][-50:])) for name, r in own.items()}
        assert abs(last["float16, no loss scale"] / last["float32"] - 1) < 0.1
    """,
    # Times depend on what else the machine does; these hold by factors on any.
    "04_speed_on_your_machine": """
        assert steps["64 dense layers of 32 x 32"]["flat"][1] > 2
        assert cuts[counts[-1]]["flat"][1] > 1.5 and cuts[1]["flat"][1] < 3
        ratio = {name: found["flat"][1] for name, found in whole.items()}
        deep, step = list(ratio.values())[:2]
        assert step < deep  # a training step has other things to do
        assert not kernels
    """,
    "05_flat_layout": """
        assert max(jax.tree.leaves(difference)) < 1e-6
        assert grads.layout == grouped.layout and len(state.mu) == len(grouped.buckets) - 1
        for path, value in jax.tree.leaves_with_path(change):
            expected = {"stem": 0, "head": 1e-4}.get(path[0].key, 1e-3)
            assert abs(value - expected) < 0.01 * expected + 1e-12, path
        bias, *_ = layout.buckets
        assert bias.name == "bias.float32" and padding_of(bias).mean() > 0.5  # most of it is padding
        assert [b.solo for b in layout.buckets] == [False, False, True]
        (_, _, size), = whole.layout.region_range("first_conv", "deep_conv")
        assert size % 128 == 0
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", execute.names())
def test_runs_and_says_what_is_so(name):
    notebook = execute.read(name)
    for cell in notebook.cells:
        cell.source = cell.source.replace("rounds=31", "rounds=7")  # of timing: what is claimed holds by factors
    notebook.cells.append(nbformat.v4.new_code_cell(textwrap.dedent(CLAIMS[name])))
    execute.run(notebook)
    streams = [o for cell in notebook.cells for o in cell.get("outputs", ()) if o.output_type == "stream"]
    assert not [o.text for o in streams if o.name == "stderr"]


@pytest.mark.slow
def test_the_kernel_is_this_python_and_the_checkout():
    """Whatever `python3` the machine has registered, and whatever fusedopt that has."""
    code = "import sys, fusedopt, jax\nprint(sys.executable, fusedopt.__file__, jax.default_backend(), sep='\\n')"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    execute.run(notebook)
    executable, source, platform = notebook.cells[0].outputs[0].text.split()
    assert executable == sys.executable
    assert source == str(execute.FOLDER.parent / "fusedopt" / "__init__.py")
    assert platform == "cpu"


@pytest.mark.slow
def test_an_error_is_raised_and_nothing_is_stored(tmp_path, monkeypatch):
    path = tmp_path / "broken.ipynb"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    nbformat.write(notebook, path)
    before = path.read_bytes()
    monkeypatch.setattr(execute, "FOLDER", tmp_path)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        execute.main(["broken"])
    assert path.read_bytes() == before


def test_an_unknown_name(capsys):
    with pytest.raises(SystemExit):
        execute.main(["06_nothing"])
    assert "expected one of 01_quickstart" in capsys.readouterr().err
