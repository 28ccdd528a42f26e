"""Problems: the model, its loss and gradient, and what else is known about them."""

from fedpact.problems.least_squares import LeastSquares
from fedpact.problems.logistic import Logistic
from fedpact.problems.nonconvex_logistic import NonconvexLogistic
from fedpact.problems.optimum import Optimum, optimum

__all__ = ["PROBLEMS", "LeastSquares", "Logistic", "NonconvexLogistic", "Optimum", "optimum"]

#: By the names experiment files use.
PROBLEMS = {"least_squares": LeastSquares, "logistic": Logistic, "nonconvex_logistic": NonconvexLogistic}
