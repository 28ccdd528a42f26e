"""What a run does before its first round, gone through over nodes of this process: what it would refuse is refused
before a federation is started for it.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpact.flower.links import Direct
from fedpact.flower.node import Node
from fedpact.flower.server import greet, numbered, patience_of, prepare


def rehearse(values: Mapping[str, Any], configs: Mapping[str, Mapping[str, Any]], run: Path | None = None) -> None:
    """Greet nodes of these configurations, agree on the features, make the experiment; nothing of it is kept.

    `run` is the run's folder, which may hold one that is to go on.
    """
    patience = patience_of(values)
    with tempfile.TemporaryDirectory(prefix="fedpact-") as place:
        link = Direct([Node({"name": name, **config}, Path(place) / name) for name, config in configs.items()])
        told = _greeted(values, link, patience)
        order = numbered([told[k] for k in sorted(told)])
        link.nodes, link.names = [link.nodes[k] for k in order], [link.names[k] for k in order]
        prepare(values, link, [told[k].get("survey") for k in order], run, patience)


def _greeted(values: Mapping[str, Any], link: Direct, patience: float) -> dict[int, Mapping[str, Any]]:
    """What the nodes tell. Parts of one dataset are of one that is read once: it may be large, and they may be many."""
    first, *others = link.nodes
    if set(first.config) != {"name", "client"}:
        return greet(values, link, patience)
    names, link.names = link.names, link.names[:1]
    told = greet(values, link, patience)
    link.names = names
    for k, node in enumerate(others, 1):
        node.at = node._session(link.session)
        node.at.source, node.at.rules = copy.copy(first.at.source), first.at.rules
        told[k] = {**told[0], "name": node.name, "client": node.config["client"]}
    return told
