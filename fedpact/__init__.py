"""fedpact: federated learning by penalties, ADMM and constraints.

Names are imported when they are first asked for, so that `import fedpact` and `fedpact --version` are quick.
"""

import importlib as _importlib
import os as _os
import sys as _sys
import types as _types
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from fedpact import data, privacy
    from fedpact.algorithms import (
        SSCA,
        FedADMM,
        FedAvg,
        FedAvgStale,
        FedEPM,
        FedPDM,
        FedProx,
        FedProxLocal,
        FedSGD,
        InexactADMM,
        LocalSGD,
        Scaffold,
        SFedAvg,
        SFedProx,
        VerticalSGD,
        VerticalSSCA,
    )
    from fedpact.core import stop
    from fedpact.core.errors import (
        BudgetSpent,
        CheckpointError,
        ClientError,
        DataError,
        DatasetMissing,
        FedpactError,
        InvalidArgument,
        OutputError,
        UnknownName,
    )
    from fedpact.core.participation import Covering, Everyone, Fraction, Independent, Poisson, Schedule
    from fedpact.definition import Experiment
    from fedpact.engines import DebugEngine, HostEngine, LocalEngine
    from fedpact.model import Model
    from fedpact.privacy import Private
    from fedpact.problems import (
        CNN1,
        CNN2,
        L1,
        MCP,
        Box,
        ClientLoss,
        Constrained,
        ElasticNet,
        Gap,
        GroupL1,
        LeastSquares,
        Logistic,
        Loss,
        Misses,
        MulticlassLogistic,
        Network,
        NonconvexLogistic,
        Norm1,
        Norm2,
        PerRow,
        Softmax,
        TorchCNN1,
        TorchCNN2,
        TwoLayer,
        from_equinox,
        from_flax,
        optimum,
    )
    from fedpact.run import Run, Runs, compare, run, trials

__version__ = "0.1.0"

# `tune` is not here: the function would hide the module. It is fedpact.tune.tune.
__all__ = [
    "CNN1",
    "CNN2",
    "L1",
    "MCP",
    "SSCA",
    "Box",
    "BudgetSpent",
    "CheckpointError",
    "ClientError",
    "ClientLoss",
    "Constrained",
    "Covering",
    "DataError",
    "DatasetMissing",
    "DebugEngine",
    "ElasticNet",
    "Everyone",
    "Experiment",
    "FedADMM",
    "FedAvg",
    "FedAvgStale",
    "FedEPM",
    "FedPDM",
    "FedProx",
    "FedProxLocal",
    "FedSGD",
    "FedpactError",
    "Fraction",
    "Gap",
    "GroupL1",
    "HostEngine",
    "Independent",
    "InexactADMM",
    "InvalidArgument",
    "LeastSquares",
    "LocalEngine",
    "LocalSGD",
    "Logistic",
    "Loss",
    "Misses",
    "Model",
    "MulticlassLogistic",
    "Network",
    "NonconvexLogistic",
    "Norm1",
    "Norm2",
    "OutputError",
    "PerRow",
    "Poisson",
    "Private",
    "Run",
    "Runs",
    "SFedAvg",
    "SFedProx",
    "Scaffold",
    "Schedule",
    "Softmax",
    "TorchCNN1",
    "TorchCNN2",
    "TwoLayer",
    "UnknownName",
    "VerticalSGD",
    "VerticalSSCA",
    "compare",
    "data",
    "from_equinox",
    "from_flax",
    "optimum",
    "privacy",
    "run",
    "stop",
    "trials",
]

# Arrays have explicit dtypes; single and double live side by side. JAX reads this when it is imported.
_os.environ["JAX_ENABLE_X64"] = "1"
if "jax" in _sys.modules:
    _sys.modules["jax"].config.update("jax_enable_x64", True)

_OF = {
    "fedpact.algorithms": "SSCA FedADMM FedAvg FedAvgStale FedEPM FedPDM FedProx FedProxLocal FedSGD InexactADMM "
    "LocalSGD Scaffold SFedAvg SFedProx VerticalSGD VerticalSSCA",
    "fedpact.core.errors": "BudgetSpent CheckpointError ClientError DataError DatasetMissing FedpactError "
    "InvalidArgument OutputError UnknownName",
    "fedpact.core.participation": "Covering Everyone Fraction Independent Poisson Schedule",
    "fedpact.definition": "Experiment",
    "fedpact.engines": "DebugEngine HostEngine LocalEngine",
    "fedpact.model": "Model",
    "fedpact.privacy": "Private",
    "fedpact.problems": "CNN1 CNN2 L1 MCP Box ClientLoss Constrained ElasticNet Gap GroupL1 LeastSquares Logistic Loss "
    "Misses MulticlassLogistic Network NonconvexLogistic Norm1 Norm2 PerRow Softmax TorchCNN1 TorchCNN2 TwoLayer "
    "from_equinox from_flax optimum",
    "fedpact.run": "Run Runs compare run trials",
}
_HOME = {name: module for module, names in _OF.items() for name in names.split()}
_LAYERS = ("algorithms", "core", "data", "engines", "folder", "metrics", "model", "privacy", "problems", "report")
_MODULES = {**{name: f"fedpact.{name}" for name in _LAYERS}, "stop": "fedpact.core.stop"}


if not _TYPE_CHECKING:  # who knows the names above, and no others

    def __getattr__(name: str) -> _Any:
        if name in _MODULES:
            found = _importlib.import_module(_MODULES[name])
        elif name in _HOME:
            found = getattr(_importlib.import_module(_HOME[name]), name)
        else:
            raise AttributeError(f"module 'fedpact' has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})


class _Package(_types.ModuleType):
    """`fedpact.run` is the function, also once the module of that name has been imported."""

    def __setattr__(self, name: str, value: _Any) -> None:
        if name == "run" and isinstance(value, _types.ModuleType):
            value = value.run
        super().__setattr__(name, value)


_sys.modules[__name__].__class__ = _Package
