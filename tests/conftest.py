"""Shared by the end-to-end tests: where the data and the caches are, and a quick way to run the command."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from helpers_command import Zygote
from helpers_experiment import experiment, write_csv, write_toml

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"

if not os.environ.get("FEDPACT_DATA") and (SHARED / "data").is_dir():
    os.environ["FEDPACT_DATA"] = str(SHARED / "data")


#: Tests that take some seconds each on two cores, by their names: drills, so that `make test` stays below ten minutes.
LONG = frozenset((Path(__file__).parent / "drills.txt").read_text(encoding="utf-8").splitlines())


def pytest_addoption(parser):
    parser.addoption("--one-of-each", action="store_true", help="one drill of each kind that `make test` has none of")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.nodeid in LONG:
            item.add_marker(pytest.mark.drill)
    if config.getoption("--one-of-each"):
        kinds = {id(item): _kind(item) for item in items}
        first = {kinds[id(item)]: item for item in items if not item.get_closest_marker("drill")}  # make test has it
        others = [
            item
            for item in items
            if item.get_closest_marker("drill") and first.setdefault(kinds[id(item)], item) is not item
        ]
        config.hook.pytest_deselected(items=others)
        dropped = set(map(id, others))
        items[:] = [item for item in items if id(item) not in dropped]


def _kind(item):
    """A test without its parameters; the results of papers are of one kind."""
    if item.path.stem.endswith("_results"):
        return "results"
    return item.path, getattr(item, "originalname", item.name)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Caches of this session's own, shared by its workers and their subprocesses: every program is compiled once."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "fedpact-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDPACT_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def zygote(cache, tmp_path_factory):
    forks = Zygote(tmp_path_factory.mktemp("zygote"))
    yield forks
    forks.close()


@pytest.fixture
def command(zygote, tmp_path):
    """command("run", "x.toml", …) runs `fedpact run x.toml …` in tmp_path to its end."""

    def run(*arguments, cwd=tmp_path, timeout=120, **options):
        return zygote.start(*arguments, cwd=cwd, **options).wait(timeout)

    return run


@pytest.fixture
def people(tmp_path):
    """A CSV file of patients at five sites, and the experiment file that trains on it."""
    write_csv(tmp_path / "people.csv")
    return write_toml(tmp_path / "people.toml", experiment())


@pytest.fixture(scope="session")
def finished_once(zygote, tmp_path_factory):
    """The folder of a finished run of `people`; never changed, see `finished`."""
    folder = tmp_path_factory.mktemp("finished")
    write_csv(folder / "people.csv")
    write_toml(folder / "people.toml", experiment())
    done = zygote.start("run", "people.toml", "--out", "run", cwd=folder).wait()
    assert done.code == 0, done.err
    return folder / "run"


@pytest.fixture
def finished(finished_once, tmp_path):
    """A copy of the finished run's folder, to damage."""
    return Path(shutil.copytree(finished_once, tmp_path / "finished"))


@pytest.fixture(scope="session")
def adult_folder():
    folder = Path(os.environ.get("FEDPACT_DATA", "")) / "adult"
    if not all((folder / name).is_file() for name in ("adult.data", "adult.test")):
        pytest.skip("Adult is in neither $FEDPACT_DATA nor ../shared/data")
    return folder


@pytest.fixture(scope="session")
def mnist_files():
    folder = Path(os.environ.get("FEDPACT_DATA", "")) / "mnist"
    if not list(folder.glob("train-images-idx3-ubyte*")):
        pytest.skip("MNIST is in neither $FEDPACT_DATA nor ../shared/data")


@pytest.fixture(scope="session")
def golden_folder():
    folder = Path(os.environ.get("FEDPACT_GOLDEN") or SHARED / "golden")
    if not (folder / "fedepm_m50_k12.mat").is_file():
        pytest.skip(f"no recording fedepm_m50_k12.mat in {folder}")
    return folder
