from __future__ import annotations

import html
import re
import shutil
import subprocess
from functools import partial
from html.parser import HTMLParser

import matplotlib
import numpy as np
import pytest
from report_fakes import CHECKS, MARKUP, make_run, make_runs

import fedpact.report
from fedpact.core.errors import InvalidArgument, OutputError
from fedpact.report import curves, panels, write_report
from fedpact.report.page import inline_svg

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Reads a page and refuses it when an element is not closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in ("href", "xlink:href", "src")]
        self.links += [f"#{found}" for _, value in attrs for found in re.findall(r"url\(#([^)]*)\)", value or "")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    runs, folder = make_runs(), tmp_path_factory.mktemp("report") / "out"
    figure = panels([partial(curves, runs, "objective")] * 2)
    tables = {"Time to <target>": [{"run": "FedEPM", "rounds": 34}]}
    return write_report(runs, folder, "Six & more", "One <lead>.", CHECKS, {"My figure": figure}, tables)


def test_the_page_is_well_formed_and_stands_alone(report):
    page = Page(report.read_text(encoding="utf-8"))
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)  # no network, no broken link
    assert "script" not in page.tags
    assert page.tags.count("svg") == page.tags.count("figure") == 12


def test_every_run_check_notice_and_table_is_there(report, runs):
    page = Page(report.read_text(encoding="utf-8"))
    for run in runs:
        assert run.name in page.text
        assert run.outcome in page.text
        assert all(notice in page.text for notice in run.notices)
    for claim, _, detail in CHECKS:
        assert claim in page.text
        assert detail in page.text
    for verdict, (claim, _, _) in zip(("✓ holds", "✗ does not hold", "– not tested"), CHECKS, strict=True):
        assert f"{verdict} {claim}" in page.text
    assert "Hold: 1. Do not hold: 1. Not tested: 1." in page.text
    assert {"Six & more", "One <lead>.", "Time to <target>", "My figure"} <= {text.strip() for text in page.texts}
    assert "algorithm.penalty.growth" in page.text
    assert "20240117" in page.text  # a setting is shown as it was given
    assert matplotlib.__version__ in page.text


def test_nothing_of_the_user_becomes_markup(report):
    text = report.read_text(encoding="utf-8")
    for markup in ("<script>", "<b>PDM", "<i>SFedProx", "<lead>", "<target>"):
        assert markup not in text
        assert markup.replace("<", "&lt;").replace(">", "&gt;") in text
    assert MARKUP in Page(text).text


def test_a_notice_of_several_runs_is_said_once(report):
    text = Page(report.read_text(encoding="utf-8")).text
    assert text.count("noise (39)") == 1
    assert f"FedEPM (paper), {MARKUP}: noise (39)" in text


def test_missing_values_and_columns(report):
    text = report.read_text(encoding="utf-8")
    assert not re.search(r">(nan|inf|None)<", text)
    page = Page(text)
    assert "Not measured: SFedAvg." in page.text  # its accuracy is all NaN
    assert "Not measured in the other 5 runs." in page.text  # snr


def test_plots_are_also_files(report):
    names = {p.name for p in (report.parent / "plots").iterdir()}
    stems = {name[:-4] for name in names}
    assert names == {f"{stem}.{kind}" for stem in stems for kind in ("svg", "png")}
    assert stems == {
        *("objective_by_round", "objective_gap_by_bytes", "objective_gap_by_gradients", "gradient_by_round"),
        *("accuracy_by_round", "snr_by_round", "penalty_by_round", "consensus_error_by_round", "my_figure"),
        *("clients_accuracy", "clients_auc", "calibration"),
    }


def test_held_out_metrics(report):
    text = Page(report.read_text(encoding="utf-8")).text
    assert "0.01234" in text  # pooled calibration error
    assert text.count("hospital 7 ") == 2  # the tables of the two runs with eight clients
    assert "Spread over clients" in text
    assert "hospital 59" not in text  # sixty clients are not listed


def test_the_spread_over_clients_by_hand(tmp_path):
    run = make_run("many", 0.1, rounds=2, clients=41)
    for k, client in enumerate(run.metrics["clients"]):
        client["accuracy"] = k / 40
        del client["auc"]
    text = Page(write_report([run], tmp_path, "t").read_text(encoding="utf-8")).text
    assert "many accuracy 41 0 0.1 0.5 0.9 1 hospital 0 hospital 40" in text


def test_the_same_runs_give_the_same_bytes(runs, tmp_path):
    runs = [runs[0], runs[3]]
    for run in runs:
        keep = ("round", "objective", "bytes_up", "bytes_down")
        run.history.data = {name: run.history.data[name] for name in keep}
    first, second = (write_report(runs, tmp_path / name, "t") for name in "ab")
    for path in first.parent.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (second.parent / path.relative_to(first.parent)).read_bytes()


def test_the_gap_is_to_the_lowest_objective_or_to_the_one_given(tmp_path):
    run = make_run("one", 0.1, rounds=3)
    objective = np.array([1.5, 1.25, 1.125, 1.0625])
    run.history.data = {"round": np.arange(4.0), "objective": objective, "gradients": np.arange(4.0)}
    other = make_run("other", 0.1, rounds=3)
    other.history.data = run.history.data | {"objective": objective + 1}
    two = write_report([run, other], tmp_path / "a", "t").read_text("utf-8")
    assert "lowest objective of these runs, 1.0625" in two
    assert "the least objective, 1;" in write_report([run], tmp_path / "b", "t", minimum=1.0).read_text("utf-8")
    alone = write_report([run], tmp_path / "c", "t").read_text("utf-8")
    assert "Gap to the minimum" not in alone, "a run's own best says nothing about the minimum"


def test_columns_are_explained_in_words_and_noise_that_was_not_added_is_left_out(tmp_path):
    columns = {name: np.linspace(1, 2, 5) for name in ("violations", "epsilon", "descent", "spread")}
    run = make_run("one", 0.1, rounds=4, noise_scale=np.array([np.nan, 0, 0, 0, 0]), **columns)
    page = Page(write_report([run], tmp_path / "a", "t").read_text(encoding="utf-8"))
    for words in (
        "Local steps solved too coarsely",
        "no privacy budget",
        "falls from round to round",
        "all clients agree",
    ):
        assert words in page.text
    assert "Scale of the noise" not in page.text
    run.history.data["noise_scale"][2] = 0.1
    assert "Scale of the noise" in write_report([run], tmp_path / "b", "t").read_text(encoding="utf-8")


def test_a_run_with_hardly_anything(tmp_path):
    run = make_run("bare", 0.1)
    run.history.data = {"round": np.array([0.0])}
    run.summary, run.config, run.notices = {}, {}, []
    del run.metrics
    page = Page(write_report([run], tmp_path, "Bare").read_text(encoding="utf-8"))
    assert "bare" in page.text
    assert "figure" not in page.tags
    with pytest.raises(InvalidArgument, match="runs must be at least one"):
        write_report([], tmp_path, "none")


def test_a_folder_that_cannot_be_written_is_named_and_nothing_is_left(tmp_path):
    run = make_run("one", 0.1)
    run.history.data = {name: run.history.data[name] for name in ("round", "objective")}
    (tmp_path / "taken").write_text("mine")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "deeper"):
        with pytest.raises(OutputError, match="taken"):
            write_report([run], folder, "t")
    assert [p.name for p in tmp_path.rglob("*")] == ["taken"]
    assert (tmp_path / "taken").read_text() == "mine"


def test_inline_svg_keeps_text_and_makes_ids_its_own():
    svg = b"""<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 9 9">
    <defs><style>*{color:red}</style></defs>
    <path id="m"/><use xlink:href="#m" clip-path="url(#c)"/><text>id="m" &lt;</text>
    </svg>"""
    text = inline_svg(svg, "p1", 'a "label"')
    assert 'id="p1-m"' in text
    assert 'xlink:href="#p1-m"' in text
    assert "url(#p1-c)" in text
    assert '<text>id="m" &lt;</text>' in text
    assert "color:red" not in text
    assert text.startswith('<svg viewBox="0 0 9 9"')


def test_everything_public_is_exported_in_order():
    names = fedpact.report.__all__
    assert names == sorted(names)
    assert all(getattr(fedpact.report, name).__doc__ for name in names)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_lays_it_out_without_sideways_scrolling(report, tmp_path):
    """The page in a frame as wide as a telephone; a script around it writes the page's width into a title."""
    page = html.escape(report.read_text(encoding="utf-8"))
    measure = "document.title = 'width ' + this.contentDocument.documentElement.scrollWidth"
    frame = f'<iframe style="width: 400px; height: 900px; border: 0" onload="{measure}" srcdoc="{page}"></iframe>'
    (tmp_path / "probe.html").write_text(f"<!DOCTYPE html><meta charset='utf-8'>{frame}", encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += f" --disable-component-update --disable-sync --user-data-dir={tmp_path / 'profile'} --hide-scrollbars"
    command = ["chromium", *flags.split(), "--dump-dom", f"file://{tmp_path / 'probe.html'}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert int(re.search(r"<title>width (\d+)</title>", dom)[1]) == 400


def test_the_largest_coefficients_are_listed_by_name(tmp_path):
    """Of 25 features the 20 largest in size; one run has them per unit too, several side by side."""
    rows = [{"feature": f"f{k}", "coefficient": (-1) ** k * float(k), "per_unit": 10.0 * k} for k in range(25)]
    one, two = make_run("one", 0.1, rounds=2), make_run("two", 0.1, rounds=2)
    one.coefficients, two.coefficients = rows, rows[:24]
    alone = Page(write_report([one], tmp_path / "a", "t").read_text(encoding="utf-8")).text
    assert "feature coefficient per unit of its column f24 24 240 f23 -23 230" in alone
    assert "The 20 largest of 25" in alone
    assert "f5 -5 50" in alone
    assert "f4 4 40" not in alone
    both = Page(write_report([one, two], tmp_path / "b", "t").read_text(encoding="utf-8")).text
    assert "feature one two f24 24 – f23 -23 -23" in both
    assert "Coefficients" not in Page(write_report([make_run("x", 0.1)], tmp_path / "c", "t").read_text("utf-8")).text
