"""The algorithms, one file each, and their registry."""

from __future__ import annotations

from fedpact.algorithms.fedadmm import FedADMM
from fedpact.algorithms.fedavg import FedAvg
from fedpact.algorithms.fedavg_stale import FedAvgStale, FedProxLocal
from fedpact.algorithms.fedepm import FedEPM
from fedpact.algorithms.fedpdm import FedPDM
from fedpact.algorithms.fedprox import FedProx
from fedpact.algorithms.fedsgd import FedSGD
from fedpact.algorithms.inexact_admm import InexactADMM
from fedpact.algorithms.local_sgd import LocalSGD
from fedpact.algorithms.scaffold import Scaffold
from fedpact.algorithms.sfedavg import SFedAvg, SFedProx
from fedpact.algorithms.ssca import SSCA
from fedpact.algorithms.vertical_sgd import VerticalSGD
from fedpact.algorithms.vertical_ssca import VerticalSSCA
from fedpact.core.errors import unknown
from fedpact.core.settings import Settings

__all__ = [
    "ALGORITHMS",
    "SSCA",
    "FedADMM",
    "FedAvg",
    "FedAvgStale",
    "FedEPM",
    "FedPDM",
    "FedProx",
    "FedProxLocal",
    "FedSGD",
    "InexactADMM",
    "LocalSGD",
    "SFedAvg",
    "SFedProx",
    "Scaffold",
    "VerticalSGD",
    "VerticalSSCA",
    "algorithm",
]

#: By the names experiment files and the command use.
ALGORITHMS: dict[str, type[Settings]] = {
    cls.name: cls
    for cls in (
        FedEPM,
        SFedAvg,
        SFedProx,
        FedAvg,
        FedProx,
        InexactADMM,
        FedAvgStale,
        FedProxLocal,
        FedADMM,
        Scaffold,
        FedSGD,
        FedPDM,
        SSCA,
        LocalSGD,
        VerticalSSCA,
        VerticalSGD,
    )
}


def algorithm(name: str) -> type[Settings]:
    """The settings class of an algorithm, by name."""
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS)
    return ALGORITHMS[name]
