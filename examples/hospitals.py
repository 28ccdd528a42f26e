"""Write hospitals.csv, a made-up table of patients at six hospitals, beside this file: the data of hospitals.toml."""

import csv
import sys
from pathlib import Path

import numpy as np

HOSPITALS, WARDS = ("Ash", "Birch", "Cedar", "Elm", "Fir", "Oak"), ("emergency", "medicine", "surgery")


def main(folder: Path) -> None:
    """600 patients; age and ward decide most of the outcome, and hospitals differ in whom they treat."""
    rng = np.random.default_rng(0)
    with (folder / "hospitals.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["id", "hospital", "age", "dose", "sex", "ward", "outcome"])
        for patient in range(600):
            home = rng.integers(len(HOSPITALS))
            age, dose = rng.normal(45 + 5 * home, 12), rng.uniform(0, 5)
            sex, ward = rng.choice(["f", "m"]), rng.choice(WARDS)
            risk = (age - 58) / 10 - 0.5 * (dose - 2.5) + (ward == "emergency") + rng.logistic()
            cells = [patient, HOSPITALS[home], round(age, 1), round(dose, 2), sex, ward]
            table.writerow([*cells, "worse" if risk > 0.3 else "better"])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
