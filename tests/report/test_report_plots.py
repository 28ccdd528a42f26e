from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from functools import partial

import matplotlib
import numpy as np
import pytest
from report_fakes import LONG, MARKUP, make_run

from fedpact.core.errors import InvalidArgument, OutputError, UnknownName
from fedpact.report import boxes, curves, lines_over, panels
from fedpact.report.style import render

SERIES = {"FedEPM": ([0.1, 0.5, 1.0], [3.0, 2.0, 1.0], [0.3, 0.2, 0.1]), "SFedAvg": ([0.1, 0.5], [4.0, 3.0], None)}


def svg_texts(path):
    return ["".join(e.itertext()).strip() for e in ElementTree.parse(path).iter() if e.tag.endswith("}text")]


def line(figure, label):
    return next(one for one in figure.axes[0].lines if one.get_label() == label)


def test_curves_write_both_files_with_the_same_bytes_twice(runs, tmp_path):
    for name in ("a", "b"):
        curves(runs, "objective", path=tmp_path / name / "k0=0.5")  # a dot in a name is not a suffix
    for kind in ("svg", "png"):
        first, second = ((tmp_path / name / f"k0=0.5.{kind}").read_bytes() for name in ("a", "b"))
        assert first == second
        assert len(first) > 5_000
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["k0=0.5.png", "k0=0.5.svg"]
    assert b"<dc:date>" not in (tmp_path / "a" / "k0=0.5.svg").read_bytes()


def test_a_figure_that_was_saved_is_saved_as_it_was_and_still_lays_itself_out(runs):
    figure = curves(runs, "objective")
    first, before = render(figure), figure.axes[0].get_position().bounds
    assert render(figure) == first
    figure.axes[0].set_ylabel("objective\nof everyone")
    assert render(figure) != first
    assert figure.axes[0].get_position().bounds[0] > before[0], "there is room for what was added"


def test_svg_text_is_text_and_shows_names_as_they_are(runs, tmp_path):
    curves(runs, "objective", path=tmp_path / "p")
    texts = svg_texts(tmp_path / "p.svg")
    assert MARKUP in texts
    assert "round" in texts
    assert all(part in " ".join(texts) for part in LONG.split())


def test_a_line_holds_the_measured_points_only(runs):
    figure = curves(runs, "objective")
    sparse = line(figure, MARKUP.replace("$", r"\$"))
    assert sparse.get_xdata().tolist() == list(range(0, 101, 10))
    assert line(figure, "SCAFFOLD").get_xdata().max() == 59  # infinite from round 60 on
    assert len(line(figure, "SFedProx").get_xdata()) == 1


def test_lines_differ_in_colour_dash_and_marker(runs):
    lines = curves([make_run(f"run {k}", 0.1) for k in range(30)], "objective").axes[0].lines
    looks = {(one.get_color(), str(one._dash_pattern), one.get_marker()) for one in lines}
    assert len(looks) == 30
    first = curves(runs, "objective").axes[0].lines
    assert len({one.get_color() for one in first}) == len({one.get_marker() for one in first}) == 6


def test_a_run_keeps_its_colour_when_others_are_missing(runs):
    everywhere, some = curves(runs, "objective"), curves(runs, "consensus_error")
    label = MARKUP.replace("$", r"\$")
    assert [one.get_label() for one in some.axes[0].lines] == [label]
    assert line(everywhere, label).get_color() == line(some, label).get_color()


def test_the_scale_is_logarithmic_where_it_helps(runs):
    def scale(*args, **kwargs):
        axes = curves(runs, *args, **kwargs).axes[0]
        return axes.get_xscale(), axes.get_yscale()

    assert scale("objective") == ("linear", "linear")
    assert scale("gradient") == ("linear", "log")
    assert scale("accuracy") == ("linear", "linear")
    assert scale("objective", "bytes", minimum=0.3331) == ("linear", "log")
    assert scale("objective", minimum=0.3331, logy=False) == ("linear", "linear")
    assert scale("objective", logx=True, logy=True) == ("log", "log")
    few, many = make_run("few", 0.1, gradients=10), make_run("many", 0.1, gradients=1000)
    for one in (few, many):
        one.history.data["gradients"] += 1
    assert curves([few, many], "objective", "gradients").axes[0].get_xscale() == "log"


@pytest.mark.parametrize("start", [0.0, 1e-18])
def test_a_start_of_0_neither_prevents_nor_stretches_a_logarithmic_axis(start):
    """Residuals are 0 at the start, or 0 but for rounding."""
    run = make_run("one", 0.1, rounds=4, residual=np.array([start, 1.0, 1e-2, 1e-4, 0.0]))
    axes = curves([run], "residual").axes[0]
    assert axes.get_yscale() == "log"
    assert axes.lines[0].get_xdata().tolist() == [1, 2, 3]
    assert axes.get_ylim()[0] > 1e-6
    below = make_run("two", 0.1, rounds=4, residual=np.array([start, 1.0, -1e-2, 1e-4, 5.0]))
    assert curves([below], "residual").axes[0].get_yscale() == "linear"


def test_shares_are_linear():
    run = make_run("one", 0.1, rounds=2, violations=np.array([0.0, 0.9, 0.001]))
    assert curves([run], "violations").axes[0].get_yscale() == "linear"


def test_the_gap_is_to_the_minimum_and_bytes_are_both_directions():
    run = make_run("one", 0.1, rounds=3)
    run.history.data |= {"bytes_up": np.array([0, 1e6, 2e6, 3e6]), "bytes_down": np.array([0, 2e6, 4e6, 6e6])}
    run.history.data["objective"] = np.array([1.5, 1.25, 1.0, 0.5])
    axes = curves([run], "objective", "bytes", minimum=1.0).axes[0]
    assert axes.lines[0].get_xdata().tolist() == [0, 3]  # gaps 0 and −0.5 have no logarithm
    assert axes.lines[0].get_ydata().tolist() == [0.5, 0.25]
    assert axes.get_xlabel() == "MB sent up and down"
    assert "minimum" in axes.get_ylabel()


def test_a_long_run_is_thinned_without_losing_its_extremes():
    run = make_run("long", 0.0, rounds=50_000)
    run.history.data["objective"][31_415] = 9.0
    ys = curves([run], "objective").axes[0].lines[0].get_ydata()
    assert len(ys) < 1_500
    assert ys.max() == 9.0
    assert ys[-1] == run.history.data["objective"][-1]


def test_a_column_that_no_run_has_is_refused_and_an_unmeasured_one_is_said(runs):
    with pytest.raises(UnknownName, match="Did you mean 'objective'"):
        curves(runs, "objectve")
    with pytest.raises(UnknownName, match="column must be one of"):
        curves(runs, "objective", "epoch")
    with pytest.raises(InvalidArgument, match="runs must be at least one"):
        curves([], "objective")
    runs[3].history.data["accuracy"][:] = np.nan
    axes = curves([runs[3]], "accuracy").axes[0]
    assert [text.get_text() for text in axes.texts] == ["nothing measured"]


def test_runs_of_one_name_and_hidden_names_are_all_in_the_legend(tmp_path):
    curves(
        [make_run(name, 0.1, rounds=5) for name in ("same", "same", "_hidden", "")], "objective", path=tmp_path / "p"
    )
    assert {"same", "same (2)", "_hidden", "(unnamed)"} <= set(svg_texts(tmp_path / "p.svg"))


def test_boxes_show_median_quartiles_and_outliers():
    samples = [*range(1, 10), 100.0, np.nan]
    figure = boxes({"one": {0.1: samples, 0.2: []}, "two": {0.2: [1.0, 2.0, 3.0]}}, ylabel="y", xlabel="ε")
    axes = figure.axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.1", "0.2"]
    ends = {tuple(np.unique(patch.get_path().vertices[:, 1])) for patch in axes.patches}
    assert (*np.quantile(samples[:-1], [0.25, 0.75]),) in ends
    medians = {float(one.get_ydata()[0]) for one in axes.lines if len(set(one.get_ydata())) == 1}
    assert {5.5, 2.0} <= medians
    assert [one.get_ydata().tolist() for one in axes.lines if one.get_marker() == "x" and len(one.get_ydata())] == [
        [100.0]
    ]


def test_lines_over_draw_means_and_deviations(tmp_path):
    axes = lines_over(SERIES, tmp_path / "l", "ε", "objective", "T").axes[0]
    assert axes.lines[0].get_ydata().tolist() == [3.0, 2.0, 1.0]
    assert np.allclose(axes.collections[0].get_segments()[0][:, 1], [2.7, 3.3])
    assert {"FedEPM", "SFedAvg", "ε", "objective", "T"} <= set(svg_texts(tmp_path / "l.svg"))
    assert len(axes.collections) == 1  # the other series has no deviations
    with pytest.raises(InvalidArgument, match="series must be at least one series"):
        lines_over({})


def test_panels_share_one_legend_and_one_look(runs, tmp_path):
    draws = [partial(curves, runs[k:4], "objective", title=f"from {k}") for k in range(4)]
    draws += [partial(lines_over, {"SFedAvg": ([1, 2], [1, 2], None)}), partial(boxes, {"SFedAvg": {1: [1, 2, 3]}})]
    figure = panels(draws, tmp_path / "grid", columns=3, title="all")
    assert [axes.get_subplotspec().get_geometry()[:2] for axes in figure.axes] == [(2, 3)] * 6
    colours = {one.get_color() for axes in figure.axes[:5] for one in axes.lines if one.get_label() == "SFedAvg"}
    assert len(colours) == 1
    assert len(figure.legends) == 1
    assert svg_texts(tmp_path / "grid.svg").count("SFedAvg") == 1
    with pytest.raises(InvalidArgument, match="columns must be an integer"):
        panels(draws, columns=0)


def test_no_text_lies_on_another(runs):
    figure = panels(
        [partial(curves, runs, y, title=y) for y in ("objective", "gradient", "accuracy", "snr")], columns=2
    )
    figure.draw_without_rendering()
    ticks = [tick for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for tick in axis._update_ticks()]
    found = [tick.label1 for tick in ticks]
    found += [text for axes in figure.axes for text in (axes.xaxis.label, axes.yaxis.label, axes._left_title)]
    found += list(figure.legends[0].get_texts())
    extents = [text.get_window_extent() for text in found if text.get_text() and text.get_visible()]
    page = figure.bbox
    for k, one in enumerate(extents):
        assert one.x0 >= page.x0 - 1
        assert one.x1 <= page.x1 + 1
        assert not any(one.overlaps(other) for other in extents[k + 1 :])


def test_drawing_leaves_matplotlib_as_it_was(runs, tmp_path):
    before = dict(matplotlib.rcParams)
    curves(runs, "objective", path=tmp_path / "p")
    assert dict(matplotlib.rcParams) == before


def test_a_path_that_cannot_be_written_is_named(runs, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="file"):
        curves(runs, "objective", path=tmp_path / "file" / "plot")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
