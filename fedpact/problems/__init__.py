"""Problems: the model, its loss and gradient, and what else is known about them."""

from fedpact.problems.constraints import ClientLoss, Constrained, Gap, Loss, Misses, Norm1, Norm2, PerRow
from fedpact.problems.least_squares import LeastSquares
from fedpact.problems.logistic import Logistic
from fedpact.problems.multiclass_logistic import MulticlassLogistic
from fedpact.problems.network import CNN1, CNN2, Network, Softmax, TwoLayer, from_equinox, from_flax
from fedpact.problems.nonconvex_logistic import NonconvexLogistic
from fedpact.problems.optimum import Optimum, optimum
from fedpact.problems.regulariser import L1, MCP, Box, ElasticNet, GroupL1
from fedpact.problems.torch_cnn import TorchCNN1, TorchCNN2

__all__ = [
    "CNN1",
    "CNN2",
    "L1",
    "MCP",
    "PROBLEMS",
    "Box",
    "ClientLoss",
    "Constrained",
    "ElasticNet",
    "Gap",
    "GroupL1",
    "LeastSquares",
    "Logistic",
    "Loss",
    "Misses",
    "MulticlassLogistic",
    "Network",
    "NonconvexLogistic",
    "Norm1",
    "Norm2",
    "Optimum",
    "PerRow",
    "Softmax",
    "TorchCNN1",
    "TorchCNN2",
    "TwoLayer",
    "from_equinox",
    "from_flax",
    "optimum",
]

#: By the names experiment files use.
PROBLEMS = {
    "least_squares": LeastSquares,
    "logistic": Logistic,
    "nonconvex_logistic": NonconvexLogistic,
    "multiclass_logistic": MulticlassLogistic,
    "two_layer": TwoLayer,
    "cnn1": CNN1,
    "cnn2": CNN2,
    "torch_cnn1": TorchCNN1,
    "torch_cnn2": TorchCNN2,
    "softmax": Softmax,
    "constrained": Constrained,
}
