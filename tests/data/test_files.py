import hashlib
import http.server
import importlib
import threading

import pytest

import fedpact.data as data
from fedpact.core.errors import DataError, DatasetMissing
from fedpact.data.files import locate

BODY = b"1,2,3\n" * 1000
MD5, SHA256 = hashlib.md5(BODY).hexdigest(), hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def server():
    """Serves the `files` mapping; a path ending in .short breaks off half-way."""

    class Handler(http.server.BaseHTTPRequestHandler):
        files: dict[str, bytes] = {"/set.csv": BODY, "/set.short": BODY}  # noqa: RUF012
        asked: list[str] = []  # noqa: RUF012

        def do_GET(self):
            self.asked.append(self.path)
            body = self.files.get(self.path)
            self.send_response(200 if body is not None else 404)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            body = body or b""
            self.wfile.write(body[: len(body) // 2] if self.path.endswith(".short") else body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        running.url = f"http://127.0.0.1:{running.server_address[1]}"
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def folders(tmp_path, monkeypatch):
    own, cache = tmp_path / "own", tmp_path / "cache"
    monkeypatch.setenv("FEDPACT_DATA", str(own))
    monkeypatch.setenv("FEDPACT_CACHE", str(cache))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return own, cache


def put(folder, content):
    (folder / "set").mkdir(parents=True)
    (folder / "set" / "set.csv").write_bytes(content)
    return folder / "set" / "set.csv"


def files_in(folder):
    return sorted(p.name for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("checksum", [MD5, SHA256])
def test_download_is_verified_and_kept(server, folders, checksum):
    path = locate("set", "set.csv", checksum, server.url + "/set.csv")
    assert path == folders[1] / "set" / "set.csv"
    assert path.read_bytes() == BODY
    assert files_in(folders[1]) == ["set.csv"]
    assert locate("set", "set.csv", checksum, server.url + "/set.csv") == path
    assert server.RequestHandlerClass.asked == ["/set.csv"]  # the second time it came from the cache


@pytest.mark.parametrize(
    ("address", "checksum", "reason"),
    [
        ("/set.csv", "0" * 64, f"the checksum must be {'0' * 64}, got {SHA256}"),
        ("/set.csv", "0" * 32, f"the checksum must be {'0' * 32}, got {MD5}"),
        ("/set.short", SHA256, f"the checksum must be {SHA256}, got"),
        ("/none.csv", SHA256, "HTTP Error 404"),
    ],
)
def test_failed_download_leaves_nothing_and_says_where_it_looked(server, folders, address, checksum, reason):
    own, cache = folders
    with pytest.raises(DatasetMissing) as caught:
        locate("set", "set.csv", checksum, server.url + address)
    sentence = str(caught.value)
    assert sentence.startswith("set.csv of dataset 'set' must be in one of three places, got none: ")
    assert f"$FEDPACT_DATA has no {own / 'set' / 'set.csv'}" in sentence
    assert f"the cache has no {cache / 'set' / 'set.csv'}" in sentence
    assert f"{server.url}{address} failed ({reason}" in sentence
    assert f"Put the file at {cache / 'set' / 'set.csv'}" in sentence
    assert files_in(cache) == []


def test_nobody_answers(folders, monkeypatch):
    monkeypatch.delenv("FEDPACT_DATA")
    with pytest.raises(DatasetMissing, match=r"\$FEDPACT_DATA is not set; .*; http://127\.0\.0\.1:9/set failed \("):
        locate("set", "set.csv", SHA256, "http://127.0.0.1:9/set")
    with pytest.raises(DatasetMissing, match=r"; nonsense failed \(unknown url type"):
        locate("set", "set.csv", SHA256, "nonsense")


def test_cache_that_cannot_be_written(server, folders):
    folders[1].write_text("a file where the folder should be")
    with pytest.raises(DatasetMissing, match=r"/set\.csv failed \(.*(Not a directory|File exists)"):
        locate("set", "set.csv", SHA256, server.url + "/set.csv")


def test_own_folder_comes_before_the_cache_and_the_cache_before_the_address(folders):
    own, cache = folders
    kept = put(cache, BODY)
    assert locate("set", "set.csv", SHA256, "http://127.0.0.1:9/") == kept
    mine = put(own, BODY)
    assert locate("set", "set.csv", SHA256, "http://127.0.0.1:9/") == mine


@pytest.mark.parametrize("which", [0, 1])
def test_local_file_with_another_checksum(folders, which):
    path = put(folders[which], BODY + b"\n")
    found = hashlib.sha256(BODY + b"\n").hexdigest()
    with pytest.raises(DataError) as caught:
        locate("set", "set.csv", SHA256, "http://127.0.0.1:9/")
    text = f"{path} must be the official file with checksum {SHA256}, got {found}. Delete it"
    assert str(caught.value).startswith(text)
    assert path.exists()


def test_local_file_that_cannot_be_read(folders):
    (folders[0] / "set" / "set.csv").mkdir(parents=True)
    with pytest.raises(DataError, match=r"set\.csv must be a file that can be read, got: Is a directory\."):
        locate("set", "set.csv", SHA256, "http://127.0.0.1:9/")


def test_cache_without_a_variable_is_in_the_home_folder(tmp_path, folders, monkeypatch):
    monkeypatch.delenv("FEDPACT_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    path = put(tmp_path / ".cache" / "fedpact", BODY)
    assert locate("set", "set.csv", MD5, "http://127.0.0.1:9/") == path


def test_adult_by_download(adult, adult_folder, server, folders, monkeypatch):
    names = ("adult.data", "adult.test")
    server.RequestHandlerClass.files = {f"/{name}": (adult_folder / name).read_bytes() for name in names}
    monkeypatch.setattr(importlib.import_module("fedpact.data.adult"), "URL", server.url + "/")
    assert data.adult().digest == adult.digest
    assert files_in(folders[1]) == ["adult.data", "adult.test"]


def test_adult_that_is_nowhere(folders, monkeypatch):
    module = importlib.import_module("fedpact.data.adult")
    assert module.URL == "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
    monkeypatch.setattr(module, "URL", "http://127.0.0.1:9/")
    with pytest.raises(DatasetMissing, match=r"adult\.test of dataset 'adult' must be in one of three places"):
        data.adult()
