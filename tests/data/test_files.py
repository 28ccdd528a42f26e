import bz2
import gzip
import hashlib
import http.server
import importlib
import io
import lzma
import threading
import zipfile

import pytest

import fedpact.data as data
from fedpact.core.errors import DataError, DatasetMissing
from fedpact.data.files import contents, locate

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


# What a packed file holds


def zipped(*bodies):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for i, body in enumerate(bodies):
            archive.writestr(f"{i}.csv", body)
    return file.getvalue()


PACK = {".zip": zipped, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, "": bytes}
NAMES = [f"set{suffix}" for suffix in PACK]
NOWHERE = "http://127.0.0.1:9/set.gz"


def keep(folder, name, content):
    (folder / "set").mkdir(parents=True, exist_ok=True)
    (folder / "set" / name).write_bytes(content)
    return folder / "set" / name


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("checksum", [MD5, SHA256])
def test_contents_are_unpacked_and_their_checksum_is_that_of_what_is_inside(folders, which, suffix, checksum):
    packed = PACK[suffix](BODY)
    assert (packed == BODY) == (suffix == "")
    keep(folders[which], f"set{suffix}", packed)
    assert contents("set", NAMES, checksum, NOWHERE) == BODY


def test_contents_of_the_own_folder_come_first_then_in_the_order_of_the_names(folders):
    """Each is damaged in turn: the error names the one that was looked at."""
    places = [(0, "set.gz"), (0, "set.xz"), (1, "set.gz"), (1, "set.xz")]
    for which, name in places:
        keep(folders[which], name, b"nonsense")
    for which, name in places:
        path = folders[which] / "set" / name
        with pytest.raises(DataError) as caught:
            contents("set", ["set.gz", "set.xz"], SHA256, NOWHERE)
        assert str(caught.value).startswith(f"{path} must be a file that can be read, got: no whole {name[3:]} file (")
        path.unlink()


@pytest.mark.parametrize("suffix", PACK)
def test_contents_with_another_checksum(folders, suffix):
    path = keep(folders[0], f"set{suffix}", PACK[suffix](BODY + b"\n"))
    found = hashlib.sha256(BODY + b"\n").hexdigest()
    with pytest.raises(DataError) as caught:
        contents("set", NAMES, SHA256, NOWHERE)
    text = f"{path} must hold the official data with checksum {SHA256}, got {found}. Delete it"
    assert str(caught.value).startswith(text)
    assert path.exists()


def changed(packed):
    """A byte in the middle is another one."""
    middle = len(packed) // 2
    return packed[:middle] + bytes([packed[middle] ^ 0x55]) + packed[middle + 1 :]


DAMAGE = {
    "of another kind": lambda packed: b"hello",
    "empty": lambda packed: b"",
    "cut": lambda packed: packed[: len(packed) // 2],
    "changed": changed,
}


@pytest.mark.parametrize("suffix", [".zip", ".gz", ".xz", ".bz2"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_archives(folders, suffix, damage):
    path = keep(folders[0], f"set{suffix}", DAMAGE[damage](PACK[suffix](BODY)))
    with pytest.raises(DataError) as caught:
        contents("set", NAMES, SHA256, NOWHERE)
    said = str(caught.value)
    unreadable = said.startswith(f"{path} must be a file that can be read, got: no whole {suffix} file (")
    nothing = hashlib.sha256(b"").hexdigest()  # gzip and bzip2 read an empty file as nothing
    assert unreadable or (damage == "empty" and f"{path} must hold the official data" in said and nothing in said)
    assert "Delete it" in said


@pytest.mark.parametrize("bodies", [(), (BODY, b"more")], ids=["none", "two"])
def test_a_zip_file_must_hold_one_file(folders, bodies):
    keep(folders[0], "set.zip", zipped(*bodies))
    with pytest.raises(DataError, match=rf"no whole \.zip file \(it holds {len(bodies)} files instead of one\)\."):
        contents("set", NAMES, SHA256, NOWHERE)


def test_contents_that_cannot_be_read(folders):
    (folders[0] / "set" / "set.gz").mkdir(parents=True)  # a folder is no file: it is looked for elsewhere
    keep(folders[1], "set.gz", gzip.compress(BODY))
    assert contents("set", NAMES, SHA256, NOWHERE) == BODY


def test_downloaded_contents_are_verified_and_kept_as_they_came(server, folders):
    packed = gzip.compress(BODY)
    server.RequestHandlerClass.files = {"/set.gz": packed}
    asked = len(server.RequestHandlerClass.asked)
    for _ in range(2):
        assert contents("set", NAMES, SHA256, server.url + "/set.gz") == BODY
    assert server.RequestHandlerClass.asked[asked:] == ["/set.gz"]  # the second time it came from the cache
    assert (folders[1] / "set" / "set.gz").read_bytes() == packed
    assert files_in(folders[1]) == ["set.gz"]


@pytest.mark.parametrize(
    ("body", "checksum", "reason"),
    [
        (gzip.compress(BODY), "0" * 64, f"the checksum must be {'0' * 64}, got {SHA256}"),
        (gzip.compress(BODY), "0" * 32, f"the checksum must be {'0' * 32}, got {MD5}"),
        (gzip.compress(BODY)[:40], SHA256, "no whole .gz file ("),
        (b"<html>a page that asks for a login</html>", SHA256, "no whole .gz file ("),
        (None, SHA256, "HTTP Error 404"),
    ],
    ids=["sha256", "md5", "cut", "a page", "404"],
)
def test_a_failed_download_of_contents_leaves_nothing(server, folders, body, checksum, reason):
    own, cache = folders
    server.RequestHandlerClass.files = {} if body is None else {"/set.gz": body}
    with pytest.raises(DatasetMissing) as caught:
        contents("set", ["set.xz", "set.gz"], checksum, server.url + "/set.gz")
    sentence = str(caught.value)
    assert sentence.startswith("set.xz of dataset 'set' must be in one of three places, got none: ")
    assert f"$FEDPACT_DATA has none of {own / 'set'}/{{set.xz,set.gz}}; " in sentence
    assert f"the cache has none of {cache / 'set'}/{{set.xz,set.gz}}; " in sentence
    assert f"{server.url}/set.gz failed ({reason}" in sentence
    assert f"Put the file at {cache / 'set' / 'set.xz'}, or in $FEDPACT_DATA/set/." in sentence
    assert files_in(cache) == []


def test_contents_that_are_nowhere(folders, monkeypatch):
    monkeypatch.delenv("FEDPACT_DATA")
    with pytest.raises(DatasetMissing, match=r"\$FEDPACT_DATA is not set; .*; http://127\.0\.0\.1:9/set\.gz failed \("):
        contents("set", NAMES, SHA256, NOWHERE)
