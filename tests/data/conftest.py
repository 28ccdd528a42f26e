import os
from pathlib import Path

import pytest

import fedpact.data as data


@pytest.fixture(scope="session")
def adult(adult_folder):
    return data.adult()


@pytest.fixture(scope="session")
def golden():
    default = Path(__file__).resolve().parents[3] / "shared" / "golden"
    path = Path(os.environ.get("FEDPACT_GOLDEN", default)) / "fedepm_m50_k12.mat"
    if not path.exists():
        pytest.skip(f"no recorded run at {path}")
    from scipy.io import loadmat

    return {name: value.squeeze() for name, value in loadmat(path).items() if not name.startswith("_")}


@pytest.fixture
def csv_file(tmp_path):
    def write(text, name="people.csv", encoding="utf-8"):
        path = tmp_path / name
        path.write_bytes(text.encode(encoding))
        return path

    return write
