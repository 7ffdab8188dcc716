"""A folder behind a web server of our own, which knows ranges, counts what it sends, and can misbehave."""

import gzip
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


class WebFiles:
    """`sent`: bytes by path. `cut`: so many answers end half-way. `slow`: answers to ranges wait for `go_on`. `busy`:
    what the next answers say instead.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sent: Counter[str] = Counter()
        self.cut = 0
        self.busy: list[int] = []
        self.elsewhere: str | None = None  # everybody is sent there
        self.missing = 404  # what it says of what is not there
        self.knows_ranges = True
        self.compresses = ""  # what ends so, for who takes it; what is compressed has no ranges, as nginx does
        self.version: str | None = None  # of all that lies there
        self.held_after: int | None = None  # bytes, after which answers wait
        self.is_held, self.go_on = threading.Event(), threading.Event()
        self.url = ""


@contextmanager
def serving(folder: Path) -> Iterator[WebFiles]:
    files = WebFiles(folder)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            if files.elsewhere:
                self.send_response(302)
                self.send_header("Location", files.elsewhere + self.path)
                self.send_header("Content-Length", "0")
                return self.end_headers()
            with lock:
                status = files.busy.pop(0) if files.busy else 0
            if status:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                return self.end_headers()
            path = files.folder / unquote(self.path.partition("?")[0].lstrip("/"))
            if not path.is_file():
                self.send_response(files.missing)
                self.send_header("Content-Length", "0")
                return self.end_headers()
            body = path.read_bytes()
            if files.compresses and path.name.endswith(files.compresses) and "gzip" in self.headers["Accept-Encoding"]:
                body = gzip.compress(body)
                self.send_response(200)
                self.send_header("Content-Encoding", "gzip")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if with_body:
                    self.wfile.write(body)
                return None
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "") if files.knows_ranges else "")
            self.send_response(206 if wanted else 200)
            if wanted:
                start, last = map(int, wanted.groups())
                self.send_header("Content-Range", f"bytes {start}-{min(last, len(body) - 1)}/{len(body)}")
                body = body[start : last + 1]
            if files.knows_ranges:
                self.send_header("Accept-Ranges", "bytes")
            if files.version:
                self.send_header("ETag", files.version)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if not with_body:
                return None
            with lock:
                cut = files.cut > 0 and len(body) > 1
                files.cut -= cut
                if cut:
                    body = body[: len(body) // 2]
                hold = files.held_after is not None and files.sent.total() >= files.held_after
            if hold:
                files.is_held.set()
                files.go_on.wait()
            counted = Counter({self.path: 0 if cut else len(body)})
            with lock:
                files.sent += counted  # before: who has all of it may look at once
            try:
                self.wfile.write(body)
            except OSError:
                with lock:
                    files.sent -= counted
            self.close_connection |= cut
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    files.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield files
    finally:
        files.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()
