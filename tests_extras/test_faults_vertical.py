"""Data split by features: parties and the server are killed while they run; the run ends as an undisturbed one.

It takes minutes: `make drills-network` runs it, and `make test-extras` has no case of it.
"""

from __future__ import annotations

import re
import time

import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

from helpers_federation import MOMENTS, PARTIES, begun, harmed, lines_of, same, simulated, text, warned
from test_faults import _hit, kill_server_app

from fedpact.run import Run

#: Seconds after a round, or after the start, in which a fault strikes: a round is six questions, each of one or two.
SPAN = 6.0


def kill_party(federation, party):
    """kill -9 of the party's own process, which has its columns and its keys; its SuperNode stays."""
    return _hit(lambda: federation.processes_of(party, "fedpact.flower.resident"))


def kill_node(federation, party):
    """kill -9 of the party's SuperNode and all that it started."""
    return _hit(lambda: federation.processes_of(party))


def kill_server(federation, party):
    return kill_server_app(federation)


#: What is said of each fault, by the federation or by the party's log.
SAID = {
    kill_party: "in the log of {}: .* the node's process was lost; another is started",
    kill_node: "{} was lost and started again",
    kill_server: "the server app was lost; the run is resumed",
}


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_parties_and_the_server_are_killed_and_the_run_ends_as_an_undisturbed_one(moment, tmp_path):
    """One after the other, in any order: the closer and the other party, one by its process, one by its SuperNode.

    The first fault is while the parties agree on their columns and keys; each other one in a round of its own.
    """
    (rng, say), run, said = begun(), tmp_path / "run", []
    parties = rng.sample(["a", "b"], 2)
    faults = rng.sample([(kill_party, parties[0]), (kill_node, parties[1]), (kill_server, "")], 3)

    def tell(line):
        said.append(line)
        say(line)

    def harm(federation, ended):
        for k, (fault, party) in enumerate(faults):
            reached = lambda k=k: len(lines_of(run / "history.csv")) >= k + 2
            while not (reached() if k else federation.processes_of("a", "flwr-clientapp")):
                assert not ended.wait(0.1), f"the run ended before {fault.__name__}"
            delay, name = rng.uniform(0, SPAN), f"{fault.__name__} {party}".strip()
            time.sleep(delay)
            tell(f"{name}, {delay:.1f} s after {f'round {k}' if k else 'the start'}")
            tell(f"{name}: {fault(federation, party)}")

    federation = harmed(text("vertical_ssca", PARTIES, rounds=len(faults)), tmp_path, 1200, tell, harm)
    for line in warned(federation):
        tell(f"in the run's log: {line}")
    for party in parties:
        for line in lines_of(federation.folder / "state" / party / "node.log"):
            if "was lost" in line:
                tell(f"in the log of {party}: {line}")
    for fault, party in faults:
        assert any(re.search(SAID[fault].format(party), line) for line in said), f"{fault.__name__} {party}"
    same(Run.load(run), simulated("vertical_ssca", tmp_path, rounds=len(faults)), 1e-12)
