"""Google Cloud Storage on loopback, for tests: buckets of objects in this process.

It speaks what TensorStore's `gcs` driver and gcsfs use of the JSON API, and answers 501
to all else. An object appears whole or not at all, and every write gives it another
generation. Every change is kept, so that a test can look at what a writer that died at
any moment left behind.
"""

import base64
import contextlib
import http.server
import json
import re
import threading
import zlib
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

import pytest


@dataclass(frozen=True)
class Object:
    """One object, at one generation."""

    content: bytes
    generation: int


class RefusalError(Exception):
    """A request that is answered by a status and a reason."""


class ObjectStore:
    """Buckets of objects by name, and what they held before each change."""

    def __init__(self):
        self.buckets, self.history, self._uploads = {}, [], []
        self._generation = 1_700_000_000_000_000
        self._lock = threading.RLock()

    def names(self, bucket, prefix=""):
        """Returns the names of objects, in order."""
        return sorted(n for n in self.buckets[bucket] if n.startswith(prefix))

    def put(self, bucket, name, content):
        """Writes an object, as somebody else might; deletes it if that is None."""
        with self._lock:
            self.history.append({name: dict(x) for name, x in self.buckets.items()})
            self._generation += 1
            self.buckets[bucket][name] = Object(content, self._generation)
            if content is None:
                del self.buckets[bucket][name]

    def answer(self, method, target, headers, content):
        """Returns the status, the headers and the content that answer a request."""
        parts = urlsplit(target)
        query = {key: one[0] for key, one in parse_qs(parts.query).items()}
        pattern = r"(/upload|/download)?/storage/v1/b/([^/]+)(/o)?(?:/([^/]+))?/?"
        found = re.fullmatch(pattern, parts.path)
        try:
            if found is None:
                raise RefusalError(501, f"{method} {target}")
            where, bucket, name = found[1], unquote(found[2]), unquote(found[4] or "")
            if bucket not in self.buckets:
                raise RefusalError(404, "The specified bucket does not exist.")
            with self._lock:
                if where == "/upload":
                    return self._upload(bucket, query, headers, content)
                if not found[3]:
                    return as_json({"kind": "storage#bucket", "name": bucket})
                if not name:
                    return self._list(bucket, query)
                if name not in self.buckets[bucket]:
                    raise RefusalError(404, f"No such object: {bucket}/{name}")
                self._check(bucket, name, query)
                if method == "DELETE":
                    self.put(bucket, name, None)
                    return 204, {}, b""
                if where == "/download" or query.get("alt") == "media":
                    return self._get(self.buckets[bucket][name], headers)
                return as_json(described(bucket, name, self.buckets[bucket][name]))
        except RefusalError as refusal:
            status, why = refusal.args
            error = {"error": {"code": status, "message": why}}
            return status, {}, json.dumps(error).encode()

    def _check(self, bucket, name, query):
        """Refuses what is asked for under a condition that does not hold."""
        one = self.buckets[bucket].get(name)
        now = str(one.generation if one else 0)
        wanted = (query.get(x, now) for x in ("ifGenerationMatch", "generation"))
        is_same = query.get("ifGenerationNotMatch") == now
        if is_same or {*wanted} != {now}:
            raise RefusalError(304 if is_same else 412, "conditionNotMet")

    def _get(self, one, headers):
        marks = {"X-Goog-Generation": str(one.generation)}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("Range", ""))
        if wanted is None:
            return 200, marks, one.content
        size = len(one.content)
        start, stop = int(wanted[1]), min(int(wanted[2] or size) + 1, size)
        marks["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        return 206, marks, one.content[start:stop]

    def _list(self, bucket, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        start, end = query.get("startOffset", ""), query.get("endOffset", "\U0010ffff")
        items, prefixes = [], {}
        for name in self.names(bucket, prefix):
            inside, cut, _ = name[len(prefix) :].partition(delimiter or "\0")
            if not start <= name < end:
                continue
            if cut:
                prefixes[prefix + inside + cut] = None
            else:
                items.append(described(bucket, name, self.buckets[bucket][name]))
        found = {"items": items, "prefixes": list(prefixes)}
        return as_json({"kind": "storage#objects", **found})

    def _upload(self, bucket, query, headers, content):
        if query.get("uploadType") == "resumable":
            facts = {"name": query.get("name"), **json.loads(content or "{}")}
            self._uploads.append((facts["name"], query))
            place = f"http://{headers['Host']}/upload/storage/v1/b/{bucket}/o"
            return 200, {"Location": f"{place}?upload_id={len(self._uploads) - 1}"}, b""
        name = query.get("name")
        if "upload_id" in query:
            name, query = self._uploads[int(query["upload_id"])]
            size = headers.get("Content-Range", "*").rpartition("/")[2]
            if size != str(len(content)):
                raise RefusalError(501, "an upload in several parts")
        self._check(bucket, name, query)
        self.put(bucket, name, content)
        return as_json(described(bucket, name, self.buckets[bucket][name]))


def as_json(value):
    kind = {"Content-Type": "application/json; charset=UTF-8"}
    return 200, kind, json.dumps(value).encode()


def described(bucket, name, one):
    when = "2026-01-01T00:00:00.000000Z"  # the same for all: nothing may rely on it
    return {
        "kind": "storage#object",
        "name": name,
        "bucket": bucket,
        "generation": str(one.generation),
        "metageneration": "1",
        "size": str(len(one.content)),
        "etag": base64.b64encode(str(one.generation).encode()).decode(),
        "crc32c": base64.b64encode(zlib.crc32(one.content).to_bytes(4)).decode(),
        "timeCreated": when,
        "updated": when,
    }


class Handler(http.server.BaseHTTPRequestHandler):
    """Carries requests to the store."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    store: ObjectStore

    def handle(self):
        with contextlib.suppress(ConnectionError):  # clients go when they like
            super().handle()

    def serve(self):
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        arguments = self.command, self.path, self.headers, content
        status, headers, content = self.store.answer(*arguments)
        self.send_response(status)
        if status not in (204, 304):
            headers = headers | {"Content-Length": str(len(content))}
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if status not in (204, 304):
            self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = serve  # noqa: N815

    def log_message(self, format, *args):
        """Says nothing."""


@contextlib.contextmanager
def serving(store):
    """Serves a store, and has all clients of this process and its children use it."""
    handler = type("OwnHandler", (Handler,), {"store": store})
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        for name, value in {
            "STORAGE_EMULATOR_HOST": address,
            "TENSORSTORE_GCS_HTTP_URL": address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            # What gcsfs asks of other services of Google's, before it is imported.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }.items():
            patch.setenv(name, value)
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
