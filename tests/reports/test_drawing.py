"""The pictures: a cell for each leaf, nothing over anything else, and what is not drawn is named."""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.text import Text

import fusedopt
from fusedopt import models
from fusedopt.reports import drawing
from fusedopt.reports.drawing import PADDING, REGION_COLOURS
from tests.reports.test_report import FULL, small

BF16_RESNET = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), models.shapes("resnet50"))
FROZEN = [fusedopt.Group("stem", lambda path, leaf: path[0] == "stem", frozen=True)]

LAYERS = [fusedopt.Group(f"g{i}", lambda path, leaf, i=i: path[0] == f"layer_{i:03}") for i in range(200)]

REPORTS = {
    "mlp": lambda: fusedopt.report(fusedopt.adamw(0.1), models.shapes("mlp_mnist")),
    "resnet50": lambda: fusedopt.report(fusedopt.adamw(0.1), models.shapes("resnet50")),
    "many_small": lambda: fusedopt.report(fusedopt.lion(0.1), models.shapes("many_small")),
    "full": lambda: fusedopt.report(fusedopt.adamw(0.1, groups=FROZEN, **FULL), BF16_RESNET),
    "sgd": lambda: fusedopt.report(fusedopt.sgd(0.1), small(), mode="flat"),
    "layers": lambda: fusedopt.report(fusedopt.adamw(0.1, groups=LAYERS), models.shapes("deep_narrow")),
}


def cells(figure):
    """The corners of all cells of the map by colour."""
    found = {}
    for collection in figure.axes[0].collections:
        assert isinstance(collection, PolyCollection)
        colour = "#" + "".join(f"{round(255 * c):02x}" for c in collection.get_facecolors()[0][:3])
        found[colour] = [path.vertices[:4] for path in collection.get_paths()]
    return found


def texts(figure):
    """All text that is drawn: not that of ticks beyond the ends of an axis."""
    beyond = set()
    for axis in figure.axes:
        low, high = axis.get_xlim()
        labels = zip(axis.get_xticklabels(), axis.get_xticks(), strict=True)
        beyond |= {id(label) for label, place in labels if not low <= place <= high}
    return [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and id(t) not in beyond]


@pytest.mark.parametrize("name", REPORTS)
def test_no_text_lies_over_another_or_beyond_the_edge(name):
    figure = REPORTS[name]().plot()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    width, height = canvas.get_width_height()
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts(figure)]
    for text, box in boxes:
        assert box.x0 >= -1, text
        assert box.y0 >= -1, text
        assert box.x1 <= width + 1, text
        assert box.y1 <= height + 1, text
    for (a, first), (b, second) in itertools.combinations(boxes, 2):
        assert not first.shrunk(0.98, 0.9).overlaps(second.shrunk(0.98, 0.9)), (a, b)
    assert min(t.get_fontsize() for t in texts(figure)) >= 8


def test_a_cell_for_each_leaf_as_wide_as_it_is_long():
    found = cells(fusedopt.report(fusedopt.adamw(0.1), small()).plot())
    used = {name: found[REGION_COLOURS[name]] for name in ("bn_bias", "bn_weight", "fc_bias", "fc_weight")}
    assert {name: len(corners) for name, corners in used.items()} == {
        "bn_bias": 1,
        "bn_weight": 1,
        "fc_bias": 1,
        "fc_weight": 2,
    }
    width = lambda corners: np.ptp(corners[:, 0])  # noqa: E731
    assert width(used["bn_bias"][0]) == pytest.approx(100 / 1024)
    assert width(used["fc_bias"][0]) == pytest.approx(128 / 1024)
    assert [width(c) for c in used["fc_weight"]] == [pytest.approx(1.0)] * 2  # each a bucket
    assert sorted(width(c) for c in found[PADDING]) == [pytest.approx(n / 1024) for n in (28, 28, 640)]
    rows = {c[0, 1] for corners in used.values() for c in corners}
    assert len(rows) == 3


def test_long_buckets_go_on_in_the_next_line():
    found = cells(REPORTS["many_small"]().plot())
    weights = found[REGION_COLOURS["fc_weight"]]
    assert len({c[0, 1] for c in weights}) == drawing.MOST_LINES
    lines = {}
    for c in (c for corners in found.values() for c in corners):
        lines[c[0, 1]] = lines.get(c[0, 1], 0.0) + np.ptp(c[:, 0])
        assert -1e-9 <= c[:, 0].min() <= c[:, 0].max() <= 1 + 1e-9
    assert all(total == pytest.approx(1.0) for total in lines.values())
    area = sum(np.ptp(c[:, 0]) for c in weights) / drawing.MOST_LINES
    assert area == pytest.approx(3500 / 3584, rel=1e-3)  # 28 rows of 128 a leaf
    assert 3000 <= len(weights) <= 3000 + drawing.MOST_LINES  # a cell may be cut by the end of a line


def test_labels_say_how_many_and_how_large():
    figure = REPORTS["full"]().plot()
    labels = [t.get_text() for t in texts(figure)]
    assert "stem.bfloat16\n3 leaves, 20.5 kB, frozen" in labels
    assert "weight.bfloat16\n52 solo, 51.0 MB" in labels
    assert "optimizer state, MB" in labels
    assert {"fusedopt", "optax.adamw in optax.MultiSteps", "mu", "nu", "ema", "master", "accumulated"} <= set(labels)
    title = figure.axes[0].get_title(loc="left")
    assert title.startswith("adamw, apply, on cpu: 161 leaves, 25,557,032 parameters; buckets: ")


def test_bars_are_as_long_as_the_memory():
    report = REPORTS["full"]()
    axis = report.plot().axes[1]
    ends = {}
    for bar in axis.patches:
        ends[round(bar.get_y(), 2)] = max(ends.get(round(bar.get_y(), 2), 0.0), bar.get_x() + bar.get_width())
    ours, theirs = (ends[y] for y in sorted(ends))
    assert ours == pytest.approx(report.state_bytes / 1e6)
    assert theirs == pytest.approx(report.optax_bytes / 1e6)


def test_more_groups_than_fit_are_counted():
    figure = REPORTS["layers"]().plot()
    assert figure.axes[0].get_xlabel() == "and 176 more strips with 352 leaves"
    assert len(figure.axes[0].get_yticks()) == drawing.MOST_STRIPS == 24


def test_it_draws_into_a_figure_that_is_given():
    mine = Figure(figsize=(12, 6), layout="constrained")
    left, _ = mine.subfigures(1, 2)
    report = fusedopt.report(fusedopt.adamw(0.1), small())
    assert report.plot(figure=left) is left
    assert len(left.axes) == 2
    whole = Figure(layout="constrained")
    assert report.plot(figure=whole) is whole


def test_a_figure_of_ours_shows_itself_in_notebooks_and_pyplot_is_left_alone(monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    figure = fusedopt.report(fusedopt.adamw(0.1), small()).plot()
    assert isinstance(figure, Figure)
    assert figure._repr_png_()[:4] == b"\x89PNG"
    assert "matplotlib.pyplot" not in sys.modules


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'fusedopt\[report\]'"):
        fusedopt.report(fusedopt.adamw(0.1), small()).plot()
