"""Experiment files: whatever is wrong with one ends in a sentence, and nothing is left behind."""

from __future__ import annotations

import pytest
from helpers_experiment import experiment, history_cells, tree, write_toml
from helpers_refused import refused, sentence

from fedpact.core.errors import DataError, FedpactError
from fedpact.experiment import build, read

# One setting of an experiment file


SETTINGS = {  # what --set is given: the parts of the sentence
    # names that do not exist: the valid ones are listed and the nearest is suggested
    "algorithm.name=fedagv": ("algorithm must be one of ", "got 'fedagv'. Did you mean 'fedavg'?"),
    'data={name="breast_cancr"}': ("dataset must be one of ", "got 'breast_cancr'. Did you mean 'breast_cancer'?"),
    "problem.name=logistc": ("problem must be one of ", "got 'logistc'. Did you mean 'logistic'?"),
    "split.how=colum": ("how must be one of ", "got 'colum'. Did you mean 'column'?"),
    "algorithm.preset=lipshitz": ("fedavg preset must be one of ", "got 'lipshitz'. Did you mean 'lipschitz'?"),
    "run.engine=locl": ("engine must be one of debug, flower, host, local, ray, got 'locl'. Did you mean 'local'?",),
    "run.precision=half": ("precision must be one of double, single, got 'half'.",),
    'run.participation={scheme="poison",rho=0.5}': ("must be one of ", "got 'poison'. Did you mean 'poisson'?"),
    # keys that do not exist, at the top and in every table
    "algoritm.name=fedavg": ("key of the experiment must be one of ", "got 'algoritm'. Did you mean 'algorithm'?"),
    "nam=x": ("key of the experiment must be one of ", "got 'nam'. Did you mean 'name'?"),
    "data.targt=x": (
        "key of [data] must be one of categorical, categories, classes, coding, csv, drop, ",
        "Did you mean 'target'?",
    ),
    "split.holdot=0.1": ("must be one of ", "got 'holdot'. Did you mean 'holdout'?"),
    "split.colum=site": ("must be one of ", "got 'colum'. Did you mean 'column'?"),
    "problem.intersept=true": ("key of [problem] must be one of ", "got 'intersept'. Did you mean 'intercept'?"),
    "algorithm.stepps=3": ("setting of fedavg must be one of ", "got 'stepps'. Did you mean 'steps'?"),
    "run.round=3": ("key of [run] must be one of ", "got 'round'. Did you mean 'rounds'?"),
    "stop.gradiant=1": ("key of [stop] must be one of ", "got 'gradiant'. Did you mean 'gradient'?"),
    "stop.objective=0.1": ("key of [stop] must be one of ", 'target = { column = "objective", value = 0.1 }'),
    'stop.target={colum="objective",value=1}': ("must be one of ", "got 'colum'. Did you mean 'column'?"),
    'run.participation={scheme="poisson",roh=0.5}': ("must be one of ", "got 'roh'. Did you mean 'rho'?"),
    # values
    'split={how="features",clients=2,names=3}': ("names must be a list of names, one per party, got 3.",),
    'split={how="features",blocks=[[0,[1]],[2]]}': ("block of party '0' must be a list of column numbers",),
    "run.rounds=0": ("rounds must be an integer of at least 1, got 0.",),
    "run.rounds=1.5": ("rounds must be an integer of at least 1, got 1.5.",),
    "run.rounds=": ("rounds must be an integer of at least 1, got ''.",),
    "run.seed=-1": ("seed must be an integer from 0 to ", "got -1."),
    "run.evaluate_every=0": ("evaluate_every must be an integer of at least 1, got 0.",),
    "run.participation=0": ("participation (ρ) must be in (0, 1], got 0.",),
    "run.participation=1.5": ("participation (ρ) must be in (0, 1], got 1.5.",),
    "run.participation=-1": ("participation (ρ) must be in (0, 1], got -1.",),
    "run.participation=half": ("participation must be a number in (0, 1], a scheme or a list of rounds, got 'half'.",),
    'run.participation={scheme="covering",rho=0.2,s0=2}': ("covering (s0) must be at least 5 ", "got 2."),
    "algorithm.steps=0": ("steps must be an integer of at least 1, got 0.",),
    "algorithm.step=0": ("step (γ) must be above 0, got 0.",),
    "algorithm.batch=0": ("batch (B) must be an integer of at least 1, got 0.",),
    "problem.l2=-1": ("l2 (β) must be a number of at least 0, got -1.",),
    "split.holdout=1.5": ("holdout must be a fraction in [0, 1), got 1.5.",),
    "split.seed=-1": ("seed must be an integer of at least 0, got -1.",),
    'split={how="iid",clients=61}': ("clients (m) must be at most the number of rows, 60, got 61.",),
    'split={how="iid",clients=0}': ("clients (m) must be an integer of at least 1, got 0.",),
    'split={how="sizes",sizes=[30,0]}': ("sizes (d_i) must be at least 1 each, got 0.",),
    "split.clients=4": ("clients (m) must be 5, as column says, or left out, got 4.",),
    "stop.gradient=0": ("tolerance must be a number above 0, got 0.",),
    "stop.rising=1": ("window must be an integer of at least 2, got 1.",),
    'stop.target={column="accuracy",value=0.9,above="no"}': ("above must be true or false, got 'no'.",),
    'stop.target={column="accuracy",value="much"}': ("value must be a finite number, got 'much'.",),
    "stop.seconds=-1": ("seconds must be a number above 0, got -1.",),
    'stop.target={column="objective"}': ("[stop] target must have 'value', got only column.",),
    # kinds
    "algorithm=5": ("[algorithm] must be a table, got 5.",),
    "data=5": ("[data] must be a table, got 5.",),
    'data="csv"': ("[data] must be a table, got 'csv'.",),
    "data={}": ("experiment must have a table [data], got none.",),
    "data.target=5": ("target must be one of ", "got 5."),
    "run.engine=5": ("engine must be ", "got 5."),
    'run.precision=["double"]': ("precision must be ", "got ['double']."),
    'run.timing="no"': ("timing must be ", "got 'no'."),
    'problem.intercept="no"': ("intercept must be ", "got 'no'."),
    'problem.divide="no"': ("divide must be ", "got 'no'."),
    'split.how=["iid"]': ("how must be ", "got ['iid']."),
    'algorithm.preset=["a"]': ("preset must be ", "got ['a']."),
    "run.participation=[0,1]": ("must be ", "got "),
    'run.participation={scheme="schedule",rounds=5}': ("must be ", "got 5."),
    'run.participation={scheme=["poisson"]}': ("must be ", "got ['poisson']."),
    'run.participation={scheme="schedule",rounds=[[0],[[1,2],[3]]]}': ("must be ", "got "),
    "stop.target=5": ("[stop] target must be a table, got 5.",),
    "name=[1]": ("name must be ", "got [1]."),
    # schedules
    'run.participation={scheme="schedule",rounds=[[0],[1]]}': (
        "rounds must be at most 2, the schedule's length, got 6.",
    ),
    "run.participation=[[0],[1],[2]]": ("rounds must be at most 3, the schedule's length, got 6.",),
    "run.participation=[[5],[0],[0],[0],[0],[0]]": ("schedule of round 0 must be below 5, got [5].",),
    "run.participation=[[0],[0],[0],[0],[2,5],[0]]": ("schedule of round 4 must be below 5, got [2, 5].",),
    "run.participation=[[0],[0],[0],[0],[2,2],[0]]": ("schedule of round 4 must be without repetition, got ",),
    "run.participation=[[0],[0],[0],[-1],[2],[0]]": ("schedule of round 3 must be a list of client numbers ", "got "),
    # columns that no rule can read
    'stop.target={column="objectiv",value=1}': ("must be one of ", "got 'objectiv'. Did you mean 'objective'?"),
    'stop.target={column="bytes_up",value=1,above=true}': ("must be one of ", "got 'bytes_up'."),
    # --set itself
    "rounds": ("--set must be key=value such as run.rounds=50, got 'rounds'.",),
    "=3": ("--set must be key=value such as run.rounds=50, got '=3'.",),
    "run..rounds=3": ("--set must be key=value such as run.rounds=50, got 'run..rounds=3'.",),
    "run.rounds.x=3": ("--set must name a key inside a table, got 'run.rounds.x=3'.",),
}


@pytest.mark.parametrize("change", SETTINGS)
def test_a_wrong_setting_is_refused_and_leaves_nothing(command, people, tmp_path, change):
    before = tree(tmp_path)
    refused(command("run", people, "--out", "run", "--set", change), *SETTINGS[change])
    assert not (tmp_path / "run").exists()
    assert tree(tmp_path) == before


@pytest.mark.parametrize("change", [c for c in SETTINGS if "=" in c.strip("=") and not c.startswith(("=", "run.."))])
def test_a_wrong_setting_is_refused_in_python_too(people, change):
    with pytest.raises(FedpactError) as caught:
        build(read(people, [change]))
    text = sentence(str(caught.value))
    for part in SETTINGS[change]:
        assert part in text


@pytest.mark.parametrize("arguments", [("tune", "--grid", "scale=1"), ("compare",)], ids=["tune", "compare"])
def test_set_is_checked_by_every_command_that_takes_it(command, people, arguments):
    name, *more = arguments
    refused(command(name, people, "--set", "run.round=3", *more), "got 'round'. Did you mean 'rounds'?")
    refused(command(name, people, "--set", "rounds", *more), "--set must be key=value")


# The experiment file itself


FILES = {
    "not TOML": (b"[run\nrounds = 3\n", "experiment must be valid TOML, got "),
    "a key twice": (b"name = 1\nname = 2\n", "experiment must be valid TOML, got "),
    "not UTF-8": (b'name = "caf\xe9"\n', "experiment must be a TOML file, got "),
    "empty": (b"", "experiment must have a table [data], got none."),
    "no algorithm": (b'[data]\nname = "iris"\n', "experiment must have a table [algorithm], got none."),
    "a word for a table": (b'data = "iris"\n[algorithm]\nname = "fedavg"\n', "[data] must be a table, got 'iris'."),
    "a number for a table": (b'data = 5\n[algorithm]\nname = "fedavg"\n', "[data] must be a table, got 5."),
    "a list for a table": (b'data = ["csv"]\n[algorithm]\nname = "fedavg"\n', "[data] must be a table, got ['csv']."),
    "no name": (b'[data]\nrows = 5\n[algorithm]\nname = "fedavg"\n', "[data] must have 'name' "),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_no_experiment(command, tmp_path, kind):
    content, expected = FILES[kind]
    (tmp_path / "wrong.toml").write_bytes(content)
    for arguments in (("run", "wrong.toml"), ("tune", "wrong.toml", "--grid", "scale=1"), ("compare", "wrong.toml")):
        refused(command(*arguments), expected)
    with pytest.raises(FedpactError) as caught:
        build(read(tmp_path / "wrong.toml"))
    assert expected in sentence(str(caught.value))
    assert list(tree(tmp_path)) == ["wrong.toml"]


def test_an_experiment_file_that_cannot_be_read(command, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("nowhere.toml", "folder", "file/x.toml", "x" * 300 + ".toml"):
        refused(command("run", name), f"experiment must be a TOML file, got '{name}'")
        with pytest.raises(DataError, match="experiment must be a TOML file, got "):
            read(tmp_path / name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_a_schedule_longer_than_the_run_is_used_as_far_as_it_goes(command, people, tmp_path):
    schedule = [[0], [1, 2], [0, 1, 2, 3, 4], [3], [4], [0, 4], [2], [1]]
    write_toml(people, experiment(run={"participation": schedule, "rounds": 6}))
    assert command("run", people, "--out", "run").code == 0
    counts = [int(row["participants"]) for row in history_cells(tmp_path / "run")]
    assert counts == [0, 1, 2, 5, 1, 1, 2]
