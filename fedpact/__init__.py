"""fedpact: federated learning by penalties, ADMM and constraints."""

import jax as _jax

_jax.config.update("jax_enable_x64", True)  # arrays have explicit dtypes; single and double live side by side

from fedpact import data  # noqa: E402
from fedpact.algorithms import (  # noqa: E402
    FedAvg,
    FedAvgStale,
    FedEPM,
    FedProx,
    FedProxLocal,
    InexactADMM,
    SFedAvg,
    SFedProx,
)
from fedpact.core import stop  # noqa: E402
from fedpact.core.errors import (  # noqa: E402
    CheckpointError,
    ClientError,
    DataError,
    DatasetMissing,
    FedpactError,
    InvalidArgument,
    OutputError,
    UnknownName,
)
from fedpact.core.participation import Covering, Everyone, Fraction, Poisson, Schedule  # noqa: E402
from fedpact.engines import DebugEngine, LocalEngine  # noqa: E402
from fedpact.model import Model  # noqa: E402
from fedpact.problems import LeastSquares, Logistic, NonconvexLogistic, optimum  # noqa: E402
from fedpact.run import Experiment, Run, Runs, compare, run, trials  # noqa: E402

__version__ = "0.1.0"

# `tune` is not here: the function would hide the module. It is fedpact.tune.tune.
__all__ = [
    "CheckpointError",
    "ClientError",
    "Covering",
    "DataError",
    "DatasetMissing",
    "DebugEngine",
    "Everyone",
    "Experiment",
    "FedAvg",
    "FedAvgStale",
    "FedEPM",
    "FedProx",
    "FedProxLocal",
    "FedpactError",
    "Fraction",
    "InexactADMM",
    "InvalidArgument",
    "LeastSquares",
    "LocalEngine",
    "Logistic",
    "Model",
    "NonconvexLogistic",
    "OutputError",
    "Poisson",
    "Run",
    "Runs",
    "SFedAvg",
    "SFedProx",
    "Schedule",
    "UnknownName",
    "compare",
    "data",
    "optimum",
    "run",
    "stop",
    "trials",
]
