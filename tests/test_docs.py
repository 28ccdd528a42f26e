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
from fedpact.core.vertical import Layout, Split, traffic
from fedpact.data.partition import SPLITS
from fedpact.experiment import RUN_KEYS, SCHEMES, STOPS, TABLES
from fedpact.problems import PROBLEMS
from fedpact.problems.plain_constraints import TERMS

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
    run = fp.run(skeleton.Skeleton(step=step), fp.LeastSquares(), federation, rounds=3)
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
    run = fp.run(skeleton.Skeleton(), fp.LeastSquares(), small(), rounds=3)
    assert np.all(np.diff(run.history.column("objective")) < 0)
    with pytest.raises(InvalidArgument, match="step"):
        skeleton.Skeleton(step=-1.0)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithms_page_opens_with_who_sees_what(name):
    sections = re.split(r"^## ", page_of(name), flags=re.MULTILINE)
    title, _, body = sections[1].partition("\n")
    assert title == "Who sees what"
    firsts = re.findall(r"^\| ([^|]+) \|", body, re.MULTILINE)
    assert firsts[:1] == ["message"]
    sent = {"Task", "Partial", "Closed", "Feedback", "Block"} if ALGORITHMS[name].vertical else {"Broadcast", "Upload"}
    assert sent | {"Hello", "never leaves the client"} <= set(firsts)


LAYOUT = Layout(((0, 1), (2,), (3, 4)), ("a", "b", "c"), 0)


def messages(name: str) -> tuple[Algorithm, dict[str, Any], dict[str, Any]]:
    """An algorithm for five parameters, its messages and its measures, from their types alone: nothing is computed."""
    problem: Any = fp.Logistic(l2=0.0) if ALGORITHMS[name].vertical or "ssca" in name else fp.Logistic()
    if "ssca" in name:  # whose columns depend on the problem
        limits = [fp.Loss() <= 1.0] if ALGORITHMS[name].vertical else [fp.Loss() <= 1.0, fp.ClientLoss() <= 1.0]
        problem = fp.Constrained(problem, fp.Loss() + fp.Norm2(), limits)
    return messages_of(ALGORITHMS[name](), problem)


def messages_of(settings: Any, problem: Any) -> tuple[Algorithm, dict[str, Any], dict[str, Any]]:
    algorithm = settings.build(problem, LAYOUT if settings.vertical else 4, 1.0)
    batch = Batch(np.ones((4, 10, 5)), np.ones((4, 10)), np.ones((4, 10)), np.arange(4))
    w0 = problem.init(5, np.float64)

    def round_of(batch: Batch) -> Any:
        key = client_key(jax.random.key(0), 0, 0)
        clients, hellos = jax.vmap(lambda b: algorithm.join(w0, b, key))(batch)
        msg = algorithm.broadcast(algorithm.init(w0, hellos))
        step = jax.vmap(lambda c, b: algorithm.client_step(msg, c, b, Oracle(problem), key))
        seen = (algorithm.observe or algorithm.broadcast)(algorithm.init(w0, hellos))
        measures = jax.vmap(lambda c, b: algorithm.measure(seen, c, b))(clients, batch)
        return {"Hello": hellos, "Broadcast": msg, "Upload": step(clients, batch)[1]}, measures

    return algorithm, *jax.eval_shape(round_of, batch)


def stated(name: str, message: str) -> str:
    """The cell of a message's bytes on its algorithm's page."""
    (row,) = re.findall(rf"^\| {message} \|.*$", page_of(name), re.MULTILINE)
    return row.split(" | ")[2]


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if not ALGORITHMS[name].vertical])
def test_the_bytes_on_an_algorithms_page_are_those_of_its_messages(name):
    _, sent, _ = messages_of(ALGORITHMS[name](), fp.Logistic())
    for message, content in sent.items():
        size = wire_bytes(content) / (1 if message == "Broadcast" else 4)
        told = stated(name, message)
        assert eval(told.replace("8n", "8 * 5"), {}) == size, f"{message}: {told}"


@pytest.mark.parametrize("functions", [1, 3])
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if ALGORITHMS[name].vertical])
def test_the_bytes_of_the_exchange_are_those_of_its_messages(name, functions):
    """Two layers on 5 columns at three clients: relayed messages count on both ways; the closer sends itself none."""
    model = fp.TwoLayer(inputs=5, hidden=7, classes=3)
    split, w = Split.of(model), model.init(5, np.float64)
    B, head = 11, w.size - 35
    size = {
        message: [
            eval(
                re.sub(r"(?<=[\dA-Z])(?=[A-Zn])", "*", stated(name, message)),
                {"B": B, "H": 7, "P_i": p, "K": functions, "n_0": head},
            )
            for p in (2, 1, 2)
        ]
        for message in ("Task", "Partial", "Closed", "Feedback", "Block")
    }
    relayed = sum(size["Partial"][1:]) + sum(size["Feedback"][1:])
    found = traffic(LAYOUT, split, w, B, functions, "two-step")
    assert found.up == relayed + size["Closed"][0] + sum(size["Block"])
    assert found.down == relayed + sum(size["Task"]) + 8 * head


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


@pytest.mark.drill
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
    assert names["tuned"].rounds == 2 * 9
    assert names["fitted"].summary["gradient"] < 1e-4
    assert names["deep"].history.rounds == names["mine"].history.rounds == 3
    assert names["mine"].history.last("objective") < names["mine"].history.column("objective")[0]
    assert "Huber(delta=0.5)" in capsys.readouterr().out


def run_as_printed(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    blocks = re.findall(r"^```python\n(.*?)^```$", text(DOCS / page), re.MULTILINE | re.DOTALL)
    assert blocks
    monkeypatch.chdir(folder)
    monkeypatch.setattr("fedpact.report.html.plots_section", lambda *_: "")
    names: dict[str, Any] = {"__name__": "docs_example"}
    for block in blocks:
        exec(compile(block, page, "exec", dont_inherit=True), names)
    return names


@pytest.mark.drill
def test_the_examples_of_constraints_run_as_printed(tmp_path, monkeypatch):
    names = run_as_printed("constraints.md", tmp_path, monkeypatch)
    assert names["run"].outcome.startswith("a stop rule was met")
    assert names["run"].summary["over_limit"] < 1e-3
    assert names["modest"].to_dict()["subject_to"][0]["function"] == "docs_example.confidence"
    sizes = [float(names[run].model.w.norm2()) for run in ("small", "same")]
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-2)
    assert names["small"].history.last("multiplier_constraint_1") == names["nu"]
    np.testing.assert_allclose(names["omega"], [-0.5, -0.5], atol=1e-9)
    np.testing.assert_allclose([*names["slacks"], *names["multipliers"]], [0, 1], atol=1e-9)


@pytest.mark.drill
def test_the_examples_of_split_features_run_as_printed(tmp_path, monkeypatch):
    names = run_as_printed("vertical.md", tmp_path, monkeypatch)
    assert [len(block) for block in names["two"].blocks] == [2, 28]
    assert names["run"].metrics["pooled"]["accuracy"] > 0.9
    assert names["run"].history.column("participants").tolist() == [0] + 40 * [3]
    assert names["joined"].unmatched["ward"]["missing"] == 3
    assert names["found"].notices[-1] == "Records that some party lacks were left out: 3 of 60 of lab, 3 of 60 of ward."
    assert (tmp_path / "out" / "joined" / "model.bin").is_file()
    ends = [names[run].history.last("objective") for run in ("apart", "found")]
    assert ends[0] == pytest.approx(ends[1], abs=1e-10)


def test_the_tables_of_these_pages_are_those_of_experiments(tmp_path):
    """The problem in the file is the one in Python, and the split and the files are what `build` takes."""
    (problem,) = re.findall(r"^```toml\n(.*?)^```$", text(DOCS / "constraints.md"), re.MULTILINE | re.DOTALL)
    split, files = re.findall(r"^```toml\n(.*?)^```$", text(DOCS / "vertical.md"), re.MULTILINE | re.DOTALL)
    (tmp_path / "lab.csv").write_text("id,sugar\na,1\nb,2\nc,4\n")
    (tmp_path / "ward.csv").write_text("id,age,outcome\na,1,well\nb,2,sick\nd,4,sick\n")
    rest = '[data]\nname = "breast_cancer"\n[split]\nclients = 4\n[algorithm]\nname = "ssca"\n'
    own = '[problem]\nname = "logistic"\nl2 = 0\n[algorithm]\nname = "vertical_ssca"\n'
    built = []
    for k, content in enumerate((problem + rest, split + '[data]\nname = "breast_cancer"\n' + own, files + own)):
        (tmp_path / f"{k}.toml").write_text(content, encoding="utf-8")
        built.append(experiment_module.build(experiment_module.read(tmp_path / f"{k}.toml"))[0])
    terms = [function.terms[0][1] for function in built[0].problem.subject_to]
    assert terms[:3] == [fp.Misses(of=0), fp.Gap("mean texture", 19.0), fp.ClientLoss()]
    assert built[1].federation.parties == ("means", "errors", "worst")
    assert built[2].federation.parties == ("lab", "ward")
    assert built[2].federation.sizes.tolist() == [2]


@pytest.mark.parametrize("name", TERMS)
def test_every_term_is_explained(name):
    assert f"| `{name}` |" in text(DOCS / "constraints.md")
    assert f"`{name}`" in text(DOCS / "experiments.md")


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


@pytest.mark.parametrize(
    "key", [*RUN_KEYS, *STOPS, *SCHEMES, *SPLITS, *PROBLEMS, *fp.data.names(), *(f"[{t}]" for t in TABLES)]
)
def test_every_key_is_in_the_reference(key):
    assert f"`{key}`" in text(DOCS / "experiments.md")


def accepted() -> dict[str, set[str]]:
    """The keys that each table of an experiment file takes, from the code that takes them."""

    def arguments(*functions: Any) -> set[str]:
        return {name for function in functions for name in inspect.signature(function).parameters}

    loaders = [getattr(fp.data, name) for name in fp.data.names()]
    return {
        "data": {"name", "csv"} | arguments(fp.data.from_csv, fp.data.align, *loaders) - {"path", "files", "holdout"},
        "split": {"clients", "how", "seed", "holdout"} | {key for keys in SPLITS.values() for key in keys},
        "problem": {"name"} | arguments(*PROBLEMS.values()),
        "algorithm": {"name", "preset"} | arguments(*ALGORITHMS.values()),
        "run": set(RUN_KEYS),
        "stop": set(STOPS),
        "privacy": arguments(fp.Private),
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
