"""The surrogate problem for a conic solver: an independent witness."""

import clarabel
import numpy as np
import scipy.sparse as sp


def conic(objective, constraints, penalty):
    """ω, s of min a0·ω + t0‖ω‖² + c Σs, b + a·ω + t‖ω‖² ≤ s, s ≥ 0, by Clarabel."""
    a0, t0 = objective
    d, m = len(a0), len(constraints)
    quadratic = sp.diags([2 * t0] * d + [0.0] * m, format="csc")
    linear = np.concatenate([a0, np.full(m, penalty)])
    rows, right, cones = [-sp.hstack([sp.csc_matrix((m, d)), sp.eye(m)])], [np.zeros(m)], [clarabel.NonnegativeConeT(m)]
    for k, (b, a, t) in enumerate(constraints):
        unit = np.zeros(m)
        unit[k] = 1.0
        gap = np.concatenate([-np.asarray(a), unit])  # u = s − b − a·ω = gap·x − b
        if t == 0:
            rows.append(sp.csc_matrix(-gap[None]))
            right.append(np.array([-b]))
            cones.append(clarabel.NonnegativeConeT(1))
            continue
        # t‖ω‖² ≤ u  ⇔  ‖(2√t ω, 1 − u)‖ ≤ 1 + u
        body = sp.vstack(
            [-gap[None], -2 * np.sqrt(t) * sp.hstack([sp.eye(d), sp.csc_matrix((d, m))]), gap[None]], format="csc"
        )
        rows.append(body)
        right.append(np.concatenate([[1 - b], np.zeros(d), [1 + b]]))
        cones.append(clarabel.SecondOrderConeT(d + 2))
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-10
    solver = clarabel.DefaultSolver(
        quadratic, linear, sp.vstack(rows, format="csc"), np.concatenate(right), cones, settings
    )
    found = solver.solve()
    x = np.array(found.x)
    return x[:d], x[d:], str(found.status)
