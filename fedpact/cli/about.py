"""What there is and what a model says: `fedpact list`, `show` and `predict`."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from fedpact.core.files import json_text, write_atomic


def list_names(options: argparse.Namespace) -> int:
    """`fedpact list`."""
    from fedpact import data
    from fedpact.algorithms import ALGORITHMS
    from fedpact.data import partition
    from fedpact.data.partition import SPLITS
    from fedpact.problems import PROBLEMS

    def first(thing: Any) -> str:
        return (inspect.getdoc(thing) or "").splitlines()[0]

    files = Counter(cls.__module__ for cls in ALGORITHMS.values())  # one that shares its file is told by its class
    about = dict(line.split(maxsplit=1) for line in (partition.__doc__ or "").splitlines() if line[:1].islower())
    groups = {
        "algorithms": {
            name: first(sys.modules[cls.__module__] if files[cls.__module__] == 1 else cls)
            for name, cls in ALGORITHMS.items()
        },
        "problems": {name: first(cls) for name, cls in PROBLEMS.items()},
        "datasets": data.names(),
        "splits": {
            name: about[name] + (f" (option: {', '.join(keys)})" if keys else "") for name, keys in SPLITS.items()
        },
    }
    if options.json:
        print(json_text(groups), end="")
        return 0
    for group, names in groups.items():
        print(group)
        for name, text in names.items():
            print(f"  {name:<20}{text}")
    return 0


def show(options: argparse.Namespace) -> int:
    """`fedpact show NAME`."""
    from fedpact.algorithms import algorithm
    from fedpact.experiment import needs, settings_table
    from fedpact.report import text_table

    cls = algorithm(options.name)
    box = inspect.getdoc(sys.modules[cls.__module__]) or ""
    if options.json:
        about = {"name": cls.name, "box": box, "settings": settings_table(cls), "presets": dict(cls.presets)}
        print(json_text(about | {"needs": needs(cls)}), end="")
        return 0
    print(box + "\n\nSettings\n" + text_table(settings_table(cls)))
    width = max(12, *(len(name) + 1 for name in cls.presets))
    print("\nPresets")
    width = max([12, *(len(name) + 2 for name in cls.presets)])
    for name, values in cls.presets.items():
        print(f"  {name:<{width}}{', '.join(f'{k}={v}' for k, v in values.items()) or '(the defaults)'}")
    print("\nNeeds of the problem, by preset")
    for name, wanted in needs(cls).items():
        print(f"  {name:<{width}}{', '.join(wanted) or 'a gradient alone'}")
    return 0


def predict(options: argparse.Namespace) -> int:
    """`fedpact predict MODEL data.csv`."""
    import numpy as np

    from fedpact.model import Model

    model = Model.load(options.model)
    values = model.predict_csv(options.data)
    classes = model.schema.classes if model.schema and model.problem.classifies else ()
    many = values.ndim == 2  # a probability of every class
    labels = [classes[int(np.argmax(v) if many else v > 0.5)] for v in values] if classes else []
    if options.json:
        found: dict[str, Any] = {"predictions": values.tolist()}
        text = json_text(found | ({"classes": list(classes), "labels": labels} if classes else {}))
    elif classes:
        head = ",".join(f"probability of {name}" for name in (classes if many else classes[1:]))
        cells = [",".join(map(repr, np.atleast_1d(v).tolist())) for v in values]
        rows = [f"{cell},{label}" for cell, label in zip(cells, labels, strict=True)]
        text = "\n".join([f"{head},label", *rows]) + "\n"
    else:
        text = "\n".join(["prediction", *(repr(float(v)) for v in values)]) + "\n"
    if options.out:
        write_atomic(Path(options.out), text.encode())
    else:
        sys.stdout.write(text)
    return 0
