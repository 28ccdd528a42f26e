"""What the documentation says is there."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fedpact as fp
from fedpact import experiment as experiment_module
from fedpact.algorithms import ALGORITHMS
from fedpact.core.contract import Algorithm, Batch, Oracle, wire_bytes
from fedpact.core.errors import InvalidArgument
from fedpact.core.keys import client_key
from fedpact.data.partition import SPLITS
from fedpact.experiment import RUN_KEYS, SCHEMES, STOPS, TABLES
from fedpact.problems import PROBLEMS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
SHARED_PAGE = {"sfedprox": "sfedavg", "fedprox_local": "fedavg_stale"}


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def page_of(name: str) -> str:
    return text(DOCS / "algorithms" / f"{SHARED_PAGE.get(name, name)}.md")


def anchors(path: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    titles = re.findall(r"^#+ (.+)$", text(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", text(page)):
        if re.match(r"\w+://", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in anchors(found), f"{target} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_short(page):
    assert len(text(page).splitlines()) <= 160


@pytest.fixture(scope="module")
def skeleton():
    spec = importlib.util.spec_from_file_location("skeleton_algorithm", DOCS / "skeleton_algorithm.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def small() -> fp.data.Federation:
    return fp.data.synthetic(kind="least_squares", rows=60, features=3).split(clients=4, seed=1)


def test_the_skeleton_runs_and_its_steps_are_gradient_steps(skeleton):
    federation, step = small(), 0.25
    run = fp.run(skeleton.FedSGD(step=step), fp.LeastSquares(), federation, rounds=3)
    w = np.zeros(3)
    for _ in range(3):
        gradients = [x.T @ (x @ w - y) / len(y) for x, y in map(federation.client, range(4))]
        w = w - step * np.mean(gradients, axis=0)
    np.testing.assert_allclose(run.model.w.tree["w"], w, rtol=1e-12)
    assert run.history.rounds == 3
    assert {"gradients", "step_gradient"} <= set(run.history.columns)
    assert run.summary["gradients"] == 12
    assert run.history.column("bytes_up").tolist() == [4 * 8 + t * 4 * 3 * 8 for t in range(4)]


def test_the_skeleton_takes_the_theory_step_and_refuses_bad_ones(skeleton):
    run = fp.run(skeleton.FedSGD(), fp.LeastSquares(), small(), rounds=3)
    assert np.all(np.diff(run.history.column("objective")) < 0)
    with pytest.raises(InvalidArgument, match="step"):
        skeleton.FedSGD(step=-1.0)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithms_page_opens_with_who_sees_what(name):
    sections = re.split(r"^## ", page_of(name), flags=re.MULTILINE)
    title, _, body = sections[1].partition("\n")
    assert title == "Who sees what"
    firsts = re.findall(r"^\| ([^|]+) \|", body, re.MULTILINE)
    assert firsts[:1] == ["message"]
    assert {"Hello", "Broadcast", "Upload", "never leaves the client"} <= set(firsts)


def messages(name: str) -> tuple[Algorithm, dict[str, Any], dict[str, Any]]:
    """An algorithm for five parameters, its messages and its measures, from their types alone: nothing is computed."""
    problem = fp.Logistic()
    algorithm = ALGORITHMS[name]().build(problem, 4, 1.0)
    batch = Batch(np.ones((4, 10, 5)), np.ones((4, 10)), np.ones((4, 10)), np.arange(4))
    w0 = problem.init(5, np.float64)

    def round_of(batch: Batch) -> Any:
        key = client_key(jax.random.key(0), 0, 0)
        clients, hellos = jax.vmap(lambda b: algorithm.join(w0, b, key))(batch)
        msg = algorithm.broadcast(algorithm.init(w0, hellos))
        step = jax.vmap(lambda c, b: algorithm.client_step(msg, c, b, Oracle(problem), key))
        measures = jax.vmap(lambda c, b: algorithm.measure(msg, c, b))(clients, batch)
        return {"Hello": hellos, "Broadcast": msg, "Upload": step(clients, batch)[1]}, measures

    return algorithm, *jax.eval_shape(round_of, batch)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_bytes_on_an_algorithms_page_are_those_of_its_messages(name):
    _, sent, _ = messages(name)
    for message, content in sent.items():
        size = wire_bytes(content) / (1 if message == "Broadcast" else 4)
        (row,) = re.findall(rf"^\| {message} \|.*$", page_of(name), re.MULTILINE)
        stated = row.split(" | ")[2]
        assert eval(stated.replace("8n", "8 * 5"), {}) == size, f"{message}: {stated}"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_setting_and_preset_is_on_its_page(name):
    page = page_of(name)
    for field in dataclasses.fields(ALGORITHMS[name]):
        assert f"`{field.name}`" in page, field.name
    for preset in ALGORITHMS[name].presets:
        assert f"`{preset}`" in page, preset


@pytest.mark.parametrize("name", fp.__all__)
def test_every_public_name_has_a_docstring(name):
    thing = getattr(fp, name)
    assert (inspect.getdoc(thing) or "").strip()
    if inspect.isclass(thing):
        assert "__doc__" in vars(thing)
        assert not str(thing.__doc__).startswith(f"{name}(")  # what a dataclass makes up for itself


def test_the_examples_in_python_run_as_printed(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```$", text(DOCS / "python.md"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedpact.report.html.plots_section", lambda *_: "")  # drawing takes longer than the rest
    names: dict[str, Any] = {"__name__": "docs_python"}
    try:
        for block in blocks:
            exec(compile(block, "docs/python.md", "exec", dont_inherit=True), names)
    finally:
        PROBLEMS.pop("huber", None)
    assert names["given"].names == ("north", "south", "west")
    assert names["hospitals"].names == ("north", "south")
    assert [column.name for column in names["table"].schema.columns] == ["age", "ward=a", "ward=b", "ward=c"]
    assert "sparse" in repr(names["sparse"].dataset)
    assert len(names["residual"]) == 11
    assert [run.folder.name for run in names["runs"]] == ["01-fedepm", "02-fedavg"]
    assert names["tuned"].rounds == 2 * 3 + 9
    assert names["fitted"].summary["gradient"] < 1e-4
    assert names["deep"].history.rounds == names["mine"].history.rounds == 3
    assert names["mine"].history.last("objective") < names["mine"].history.column("objective")[0]
    assert "Huber(delta=0.5)" in capsys.readouterr().out


@pytest.mark.parametrize("engine", [fp.LocalEngine, fp.HostEngine])
def test_every_option_of_an_engine_is_explained(engine):
    page = text(DOCS / "python.md")
    for field in (f for f in dataclasses.fields(engine) if f.init):
        assert re.search(rf"^\| `{field.name}` \|", page, re.MULTILINE), field.name


def test_the_names_of_python_only_parts_are_documented():
    page = text(DOCS / "python.md")
    errors = [
        name
        for name in fp.__all__
        if isinstance(getattr(fp, name), type) and "Error" in repr(getattr(fp, name).__mro__)
    ]
    for name in (
        "from_arrays",
        "from_csv",
        "history.column",
        "Federation.from_arrays",
        "LocalEngine",
        "DebugEngine",
        "Experiment",
        "tune",
        *errors,
    ):
        assert name in page, name


def test_the_function_of_tuning_does_not_hide_its_module():
    import fedpact.tune as module

    assert inspect.ismodule(module)
    assert "tune" not in fp.__all__


def test_the_layout_names_every_module():
    layout = text(DOCS / "design.md").split("## Layout and import rules")[1].split("```")[1]
    package = Path(fp.__file__).parent
    there = {path.stem for path in package.glob("[a-z]*.py")}
    there |= {path.parent.name for path in package.glob("*/__init__.py")}
    *layers, last = layout.strip().splitlines()
    assert {line.split()[0] for line in layers} | set(re.findall(r"\w+", last.removesuffix("everything"))) == there
    files = {path.stem for path in (package / "core").glob("*.py")}
    (core,) = re.findall(r"^core +(.+?) {2,}", layout, re.MULTILINE)
    assert set(re.findall(r"\w+", core)) <= files


@pytest.mark.parametrize("key", [*RUN_KEYS, *STOPS, *SCHEMES, *SPLITS, *fp.data.names(), *(f"[{t}]" for t in TABLES)])
def test_every_key_is_in_the_reference(key):
    assert f"`{key}`" in text(DOCS / "experiments.md")


def accepted() -> dict[str, set[str]]:
    """The keys that each table of an experiment file takes, from the code that takes them."""

    def arguments(*functions: Any) -> set[str]:
        return {name for function in functions for name in inspect.signature(function).parameters}

    loaders = [getattr(fp.data, name) for name in fp.data.names()]
    return {
        "data": {"name", "csv"} | arguments(fp.data.from_csv, *loaders) - {"path"},
        "split": {"clients", "how", "seed", "holdout"} | {key for keys in SPLITS.values() for key in keys},
        "problem": {"name"} | arguments(*PROBLEMS.values()),
        "algorithm": {"name", "preset"} | arguments(*ALGORITHMS.values()),
        "run": set(RUN_KEYS),
        "stop": set(STOPS),
    }


def test_every_key_in_the_reference_is_accepted():
    """The other way round: what the page's tables promise, the command takes."""
    page, found, table = text(DOCS / "experiments.md"), set(), ""
    keys = page.split("| table | key |")[1].split("### Participation")[0]
    for name, cell in re.findall(r"^\|\s*(?:`\[(\w+)\]`)?\s*\|\s*([^|]+?)\s*\|", keys, re.MULTILINE):
        table = name or table
        found |= {(table, key) for key in re.findall(r"`(\w+)`", cell)}
    rules = page.split("### Stop rules")[1].split("\n## ")[0]
    found |= {("stop", key) for key in re.findall(r"^\| `(\w+)` \|", rules, re.MULTILINE)}
    found |= {("stop", key) for key in re.findall(r"`(\w+) = ", rules)}
    assert {table for table, _ in found} == set(TABLES)
    assert len(found) > 30
    for table, key in found:
        assert key in accepted()[table], f"[{table}] {key}"


def test_every_key_in_the_docstring_is_accepted():
    found, table = set(), ""
    for line in (experiment_module.__doc__ or "").split("\n\n", 1)[1].splitlines():
        table = line[1 : line.index("]")] if line.startswith("[") else table
        plain = re.sub(r"\{[^}]*\}|\[\[.*\]\]|\"[^\"]*\"", "…", line)
        found |= {(table, key) for key in re.findall(r"(\w+) = ", plain)}
    assert {("stop", "rising"), ("stop", "target"), ("run", "participation"), ("data", "csv")} <= found
    for table, key in found - {("", "name")}:
        assert key in accepted()[table], f"[{table}] {key}"


def test_every_scheme_in_the_reference_takes_its_keys():
    section = text(DOCS / "experiments.md").split("### Participation schemes")[1].split("###")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*)\|", section, re.MULTILINE)
    assert {name for name, _ in rows} == set(SCHEMES)
    for name, keys in rows:
        assert re.findall(r"`(\w+)`", keys) == list(inspect.signature(SCHEMES[name]).parameters), name


def test_the_file_in_the_reference_is_an_experiment(adult_folder, tmp_path):
    (file,) = re.findall(r"^```toml\n(.*?)^```$", text(DOCS / "experiments.md"), re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.toml").write_text(file, encoding="utf-8")
    experiment, name = experiment_module.build(experiment_module.read(tmp_path / "mine.toml", ["stop.rising=4"]))
    assert name == "mine"
    assert repr(experiment.stop) == "GradientNorm(tolerance=1e-06) | Rising(window=4)"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_column_is_in_the_reference(name):
    page = text(DOCS / "experiments.md")
    always = ("round", "accuracy", "participants", "bytes_up", "bytes_down", "gradients", "seconds", "local_seconds")
    algorithm, _, measures = messages(name)
    for column in {*always, *algorithm.notes, *algorithm.info, *measures} - {"rows", "correct"}:
        assert f"`{column}`" in page, column


def test_the_benchmark_finds_its_place_on_the_page():
    page = text(DOCS / "benchmarks.md")
    assert page.index("<!-- results:core -->") < page.index("<!-- end -->")
