import hashlib
import io
import os
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from dubito.data import load, locate
from dubito.data.catalogue import ENTRIES
from dubito.data.download import STALE, fetch
from dubito.data.readers import npz_table
from dubito.data.registry import Entry, File, StoredForm
from dubito.errors import DataError, StorageError

CONTENT = os.urandom(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Publisher(ThreadingHTTPServer):
    """Serves CONTENT, as badly as it is told to."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.content = CONTENT
        self.stop_after: int | None = None
        self.ranges = True
        self.refuse_ranges = False
        self.status: int | None = None
        self.asked: list[str | None] = []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/file"


class Answer(BaseHTTPRequestHandler):
    server: Publisher

    def log_message(self, *args):
        pass

    def do_GET(self):
        publisher = self.server
        wanted = self.headers.get("Range")
        publisher.asked.append(wanted)
        if publisher.status or (wanted and publisher.refuse_ranges):
            self.send_error(publisher.status or 416)
            return
        content = publisher.content
        match = re.fullmatch(r"bytes=(\d+)-", wanted or "")
        if match and publisher.ranges:
            start = int(match[1])
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            content = content[start:]
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: publisher.stop_after])


@pytest.fixture
def publisher():
    with Publisher() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(publisher, target, size=len(CONTENT), sha256=SHA256):
    fetch(publisher.url, target, size=size, sha256=sha256)


def test_a_file_arrives_whole_and_alone(publisher, tmp_path):
    target = tmp_path / "deep" / "down" / "file.bin"
    get(publisher, target)
    assert target.read_bytes() == CONTENT
    assert list(target.parent.iterdir()) == [target]
    assert publisher.asked == [None]


def test_a_broken_download_is_never_used_and_continued(publisher, tmp_path):
    target = tmp_path / "file.bin"
    publisher.stop_after = 100_000
    with pytest.raises(OSError, match="broke off after 100000 of 300000 bytes"):
        get(publisher, target)
    assert not target.exists()
    assert (tmp_path / "file.bin.part").read_bytes() == CONTENT[:100_000]
    publisher.stop_after = None
    get(publisher, target)
    assert publisher.asked == [None, "bytes=100000-"]
    assert target.read_bytes() == CONTENT
    assert list(tmp_path.glob("*.part*")) == []


def test_a_publisher_without_ranges_sends_it_all_again(publisher, tmp_path):
    target = tmp_path / "file.bin"
    (tmp_path / "file.bin.part").write_bytes(b"other" * 1000)
    publisher.ranges = False
    get(publisher, target)
    assert target.read_bytes() == CONTENT


def test_a_refused_range_starts_afresh(publisher, tmp_path):
    target = tmp_path / "file.bin"
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:10])
    publisher.refuse_ranges = True
    get(publisher, target)
    assert publisher.asked == ["bytes=10-", None]
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("held", [b"x" * 10, b"x" * 300_000])
def test_a_wrong_piece_is_discarded_not_used(publisher, tmp_path, held):
    target = tmp_path / "file.bin"
    (tmp_path / "file.bin.part").write_bytes(held)
    with pytest.raises(StorageError, match=f"should have sha256 {SHA256}, got"):
        get(publisher, target)
    assert not any(path.is_file() for path in tmp_path.glob("file.bin*"))
    get(publisher, target)
    assert target.read_bytes() == CONTENT


def test_a_piece_that_is_too_long_is_discarded(publisher, tmp_path):
    target = tmp_path / "file.bin"
    (tmp_path / "file.bin.part").write_bytes(CONTENT + b"more")
    get(publisher, target)
    assert target.read_bytes() == CONTENT


def test_wrong_checksum_is_refused(publisher, tmp_path):
    target = tmp_path / "file.bin"
    publisher.content = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    with pytest.raises(StorageError, match="sha256"):
        get(publisher, target)
    assert not any(path.is_file() for path in tmp_path.glob("file.bin*"))


def test_wrong_size_is_refused_before_it_is_read(publisher, tmp_path):
    publisher.content = CONTENT + b"more"
    with pytest.raises(StorageError, match="should have 300000 bytes, the publisher offers 300004"):
        get(publisher, tmp_path / "file.bin")
    assert not any(path.is_file() for path in tmp_path.glob("file.bin*"))


def test_an_error_of_the_publisher_is_named(publisher, tmp_path):
    publisher.status = 404
    with pytest.raises(OSError, match="404 Not Found"):
        get(publisher, tmp_path / "file.bin")


def test_nobody_there(tmp_path):
    with Publisher() as server:
        url = server.url
    with pytest.raises(OSError, match="refused"):
        fetch(url, tmp_path / "file.bin", size=1, sha256=SHA256)


def test_an_exception_in_the_middle_keeps_the_piece(publisher, tmp_path, monkeypatch):
    from dubito.data import download

    monkeypatch.setattr(download, "CHUNK", 50_000)
    advanced = []

    def interrupt(self, *args):
        advanced.append(args)
        if len(advanced) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("rich.progress.Progress.advance", interrupt)
    with pytest.raises(KeyboardInterrupt):
        get(publisher, tmp_path / "file.bin")
    assert (tmp_path / "file.bin.part").read_bytes() == CONTENT[:100_000]
    assert not (tmp_path / "file.bin").exists()


def test_processes_do_not_write_into_each_other(publisher, tmp_path):
    other = tmp_path / "file.bin.part.1"
    other.write_bytes(b"of another process")
    get(publisher, tmp_path / "file.bin")
    assert other.read_bytes() == b"of another process"
    long_ago = time.time() - 2 * STALE
    os.utime(other, (long_ago, long_ago))
    get(publisher, tmp_path / "file.bin")
    assert not other.exists()


def test_a_named_set_is_loaded_from_its_publisher(publisher, monkeypatch):
    archive = io.BytesIO()
    np.savez(archive, X=np.arange(20.0).reshape(10, 2), y=np.arange(10.0))
    publisher.content = archive.getvalue()
    sha256 = hashlib.sha256(publisher.content).hexdigest()
    file = File(path="sub/far.npz", size=len(publisher.content), sha256=sha256, url=publisher.url)
    form = StoredForm(files=(file,), read=npz_table, shapes={"train": (10, 2)})
    entry = Entry(task="regression", licence="own", source="here", target_name="y", forms=(form,))
    monkeypatch.setitem(ENTRIES, "far", entry)
    publisher.stop_after = 50
    with pytest.raises(DataError, match=r"(?s)'far' is not here.*broke off after 50 of"):
        load("far")
    publisher.stop_after = None
    assert len(load("far").train.targets) == 8
    assert (locate.cache_folder() / "sub" / "far.npz").read_bytes() == publisher.content
    load("far")
    assert publisher.asked == [None, "bytes=50-"]
