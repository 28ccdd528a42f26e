"""fedpact: federated learning by penalties, ADMM and constraints."""

import jax as _jax

_jax.config.update("jax_enable_x64", True)  # arrays have explicit dtypes; single and double live side by side

from fedpact import data  # noqa: E402
from fedpact.algorithms import (  # noqa: E402
    SSCA,
    FedADMM,
    FedAvg,
    FedAvgStale,
    FedEPM,
    FedProx,
    FedProxLocal,
    FedSGD,
    InexactADMM,
    Scaffold,
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
from fedpact.core.participation import Covering, Everyone, Fraction, Independent, Poisson, Schedule  # noqa: E402
from fedpact.engines import DebugEngine, HostEngine, LocalEngine  # noqa: E402
from fedpact.model import Model  # noqa: E402
from fedpact.problems import (  # noqa: E402
    CNN1,
    CNN2,
    ClientLoss,
    Constrained,
    Gap,
    LeastSquares,
    Logistic,
    Loss,
    Misses,
    Network,
    NonconvexLogistic,
    Norm1,
    Norm2,
    PerRow,
    Softmax,
    TwoLayer,
    from_equinox,
    from_flax,
    optimum,
)
from fedpact.run import Experiment, Run, Runs, compare, run, trials  # noqa: E402

__version__ = "0.1.0"

# `tune` is not here: the function would hide the module. It is fedpact.tune.tune.
__all__ = [
    "CNN1",
    "CNN2",
    "SSCA",
    "CheckpointError",
    "ClientError",
    "ClientLoss",
    "Constrained",
    "Covering",
    "DataError",
    "DatasetMissing",
    "DebugEngine",
    "Everyone",
    "Experiment",
    "FedADMM",
    "FedAvg",
    "FedAvgStale",
    "FedEPM",
    "FedProx",
    "FedProxLocal",
    "FedSGD",
    "FedpactError",
    "Fraction",
    "Gap",
    "HostEngine",
    "Independent",
    "InexactADMM",
    "InvalidArgument",
    "LeastSquares",
    "LocalEngine",
    "Logistic",
    "Loss",
    "Misses",
    "Model",
    "Network",
    "NonconvexLogistic",
    "Norm1",
    "Norm2",
    "OutputError",
    "PerRow",
    "Poisson",
    "Run",
    "Runs",
    "SFedAvg",
    "SFedProx",
    "Scaffold",
    "Schedule",
    "Softmax",
    "TwoLayer",
    "UnknownName",
    "compare",
    "data",
    "from_equinox",
    "from_flax",
    "optimum",
    "run",
    "stop",
    "trials",
]
