"""Google Cloud Storage on loopback, for tests: buckets of objects in this process.

It speaks what TensorStore's `gcs` driver and gcsfs use of the JSON API, with its rules:
an object appears whole or not at all, every write gives it another generation, what is
asked for under a condition is refused where that does not hold, and lists come in pages.
Every change is kept, so that a test can look at what a writer that died at any moment
would have left behind.
"""

import base64
import contextlib
import http.server
import json
import re
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.message import Message
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest


# So few that every test's lists have more pages than one.
_PAGE = 3


@dataclass(frozen=True)
class Object:
    """One object, at one generation."""

    content: bytes
    generation: int


@dataclass(frozen=True)
class Answer:
    """What the store says to a request."""

    status: int
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class Refusal(Exception):  # noqa: N818 (it is no error of ours)
    """A request that is answered by a status alone."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        error = {"error": {"code": status, "message": why}}
        self.answer = Answer(status, json.dumps(error).encode())


class ObjectStore:
    """Buckets, and the changes that were made to them.

    Attributes:
        buckets: The objects of every bucket, by name.
        history: What every bucket held before each change, and after the last one.
        refuse: Is asked before every request, by its method, its bucket and the name of
            its object, by which status it is to fail.
    """

    def __init__(self, *buckets: str) -> None:
        self.buckets: dict[str, dict[str, Object]] = {name: {} for name in buckets}
        self.history: list[dict[str, dict[str, Object]]] = []
        self.refuse: Callable[[str, str, str], int | None] = lambda *_: None
        self._uploads: dict[str, tuple[str, str, dict[str, str], bytes]] = {}
        self._generation = 1_700_000_000_000_000
        self._lock = threading.RLock()

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        """Returns the names of objects, in order."""
        return sorted(n for n in self.buckets[bucket] if n.startswith(prefix))

    def put(self, bucket: str, name: str, content: bytes) -> None:
        """Writes an object, as somebody else might."""
        with self._lock:
            self._change()
            self._generation += 1
            self.buckets[bucket][name] = Object(content, self._generation)

    def drop(self, bucket: str, name: str) -> None:
        """Deletes an object, as somebody else might."""
        with self._lock:
            self._change()
            del self.buckets[bucket][name]

    def _change(self) -> None:
        self.history.append({name: dict(one) for name, one in self.buckets.items()})

    # The API.

    def answer(
        self, method: str, target: str, headers: Message, content: bytes
    ) -> Answer:
        """Answers a request."""
        parts = urlsplit(target)
        query = {key: one[0] for key, one in parse_qs(parts.query).items()}
        found = re.fullmatch(
            r"(/upload|/download)?/storage/v1/b/([^/]+)(?:/o(?:/([^/]+))?)?",
            parts.path,
        )
        if found is None:
            return Refusal(501, f"{method} {target}").answer
        where, bucket = found[1] or "", unquote(found[2])
        name = unquote(found[3] or query.get("name", ""))
        if where == "/upload" and not name:
            name = self._upload_name(query, headers, content)
        status = self.refuse(method, bucket, name)
        with self._lock:
            try:
                if status is not None:
                    raise Refusal(status, "refused by the test")
                if bucket not in self.buckets:
                    raise Refusal(404, "The specified bucket does not exist.")
                if where == "/upload":
                    return self._upload(method, bucket, name, query, headers, content)
                if not parts.path.rstrip("/").endswith("/o") and not name:
                    return _json({"kind": "storage#bucket", "name": bucket})
                if not name:
                    return self._list(bucket, query)
                if method == "DELETE":
                    self._check(bucket, name, query)
                    self._object(bucket, name)
                    self.drop(bucket, name)
                    return Answer(204)
                return self._get(
                    bucket, name, query, headers, is_media=where == "/download"
                )
            except Refusal as refusal:
                return refusal.answer

    def _object(self, bucket: str, name: str) -> Object:
        if name not in self.buckets[bucket]:
            raise Refusal(404, f"No such object: {bucket}/{name}")
        return self.buckets[bucket][name]

    def _check(self, bucket: str, name: str, query: dict[str, str]) -> None:
        """Refuses what is asked for under a condition that does not hold."""
        one = self.buckets[bucket].get(name)
        now = str(one.generation if one else 0)
        if query.get("ifGenerationMatch", now) != now:
            raise Refusal(412, "conditionNotMet")
        if query.get("ifGenerationNotMatch") == now:
            raise Refusal(304, "notModified")

    def _get(
        self,
        bucket: str,
        name: str,
        query: dict[str, str],
        headers: Message,
        *,
        is_media: bool,
    ) -> Answer:
        one = self._object(bucket, name)
        self._check(bucket, name, query)
        if query.get("generation", str(one.generation)) != str(one.generation):
            raise Refusal(404, f"No such object: {bucket}/{name}")
        if not is_media and query.get("alt") != "media":
            return _json(_described(bucket, name, one))
        marks = {
            "Content-Type": "application/octet-stream",
            "X-Goog-Generation": str(one.generation),
        }
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("Range", ""))
        if wanted is None:
            return Answer(200, one.content, marks)
        size = len(one.content)
        if wanted[1]:
            start, stop = int(wanted[1]), int(wanted[2] or size) + 1
        else:
            start, stop = max(0, size - int(wanted[2])), size
        if start >= size:
            raise Refusal(416, "requestedRangeNotSatisfiable")
        stop = min(stop, size)
        marks["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        return Answer(206, one.content[start:stop], marks)

    def _list(self, bucket: str, query: dict[str, str]) -> Answer:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        start, end = query.get("startOffset", ""), query.get("endOffset")
        entries: dict[str, Object | None] = {}
        for name in self.names(bucket, prefix):
            if name < start or (end and name >= end):
                continue
            inside, cut, _ = name[len(prefix) :].partition(delimiter or "\0")
            if delimiter and cut:
                entries[prefix + inside + cut] = None
            else:
                entries[name] = self.buckets[bucket][name]
        names = [name for name in entries if name > query.get("pageToken", "")]
        size = min(int(query.get("maxResults", _PAGE)), _PAGE)
        page, more = names[:size], names[size:]
        objects = [(name, one) for name in page if (one := entries[name])]
        return _json(
            {
                "kind": "storage#objects",
                "items": [_described(bucket, name, one) for name, one in objects],
                "prefixes": [name for name in page if entries[name] is None],
                **({"nextPageToken": page[-1]} if more else {}),
            }
        )

    def _upload(
        self,
        method: str,
        bucket: str,
        name: str,
        query: dict[str, str],
        headers: Message,
        content: bytes,
    ) -> Answer:
        if "upload_id" in query:
            return self._continue(method, query["upload_id"], headers, content)
        kind = query.get("uploadType")
        if kind == "resumable":
            number = str(len(self._uploads))
            self._uploads[number] = bucket, name, query, b""
            place = f"http://{headers['Host']}/upload/storage/v1/b/{bucket}/o"
            return Answer(200, headers={"Location": f"{place}?upload_id={number}"})
        if kind == "multipart":
            content = _two_parts(headers, content)[1]
        elif kind != "media":
            raise Refusal(501, f"uploadType={kind}")
        return self._write(bucket, name, query, content)

    def _upload_name(
        self, query: dict[str, str], headers: Message, content: bytes
    ) -> str:
        if "upload_id" in query:
            return self._uploads[query["upload_id"]][1]
        is_whole = query.get("uploadType") == "resumable"
        facts = json.loads(content) if is_whole else _two_parts(headers, content)[0]
        return facts["name"]

    def _continue(
        self, method: str, number: str, headers: Message, content: bytes
    ) -> Answer:
        bucket, name, query, before = self._uploads[number]
        if method == "DELETE":
            del self._uploads[number]
            return Answer(499)
        whole = before + content
        self._uploads[number] = bucket, name, query, whole
        size = headers.get("Content-Range", "*").rpartition("/")[2]
        if size != str(len(whole)):
            last = max(0, len(whole) - 1)
            return Answer(308, headers={"Range": f"bytes=0-{last}"})
        return self._write(bucket, name, query, whole)

    def _write(
        self, bucket: str, name: str, query: dict[str, str], content: bytes
    ) -> Answer:
        self._check(bucket, name, query)
        self.put(bucket, name, content)
        return _json(_described(bucket, name, self.buckets[bucket][name]))


def _json(value: Any) -> Answer:
    kind = {"Content-Type": "application/json; charset=UTF-8"}
    return Answer(200, json.dumps(value).encode(), kind)


def _described(bucket: str, name: str, one: Object) -> dict[str, str]:
    when = "2026-01-01T00:00:00.000000Z"  # the same for all: nothing may rely on it
    return {
        "kind": "storage#object",
        "name": name,
        "bucket": bucket,
        "generation": str(one.generation),
        "metageneration": "1",
        "size": str(len(one.content)),
        "contentType": "application/octet-stream",
        "etag": base64.b64encode(str(one.generation).encode()).decode(),
        "crc32c": base64.b64encode(zlib.crc32(one.content).to_bytes(4)).decode(),
        "timeCreated": when,
        "updated": when,
    }


def _two_parts(headers: Message, content: bytes) -> tuple[Any, bytes]:
    """Returns the facts and the content of an upload in two parts."""
    mark = b"--" + headers.get_boundary("").encode()
    facts, rest = content.split(mark, 2)[1:]
    body = rest.rpartition(b"\n" + mark)[0].removesuffix(b"\r")
    first = re.split(rb"\r?\n\r?\n", facts, maxsplit=1)[1]
    return json.loads(first), re.split(rb"\r?\n\r?\n", body, maxsplit=1)[1]


class _Handler(http.server.BaseHTTPRequestHandler):
    """Carries requests to the store."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    store: ObjectStore

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # clients go when they like
            super().handle()

    def _serve(self) -> None:
        content = self._content()
        said = self.store.answer(self.command, self.path, self.headers, content)
        self.send_response(said.status)
        for key, value in said.headers.items():
            self.send_header(key, value)
        if said.status not in (204, 304):
            self.send_header("Content-Length", str(len(said.content)))
        self.end_headers()
        if said.status not in (204, 304):
            self.wfile.write(said.content)

    do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815

    def _content(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        whole = b""
        while size := int(self.rfile.readline(), 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@contextlib.contextmanager
def serving(store: ObjectStore) -> Iterator[str]:
    """Serves a store, and has all clients of this process and its children use it.

    Args:
        store: The store.

    Yields:
        Its address.
    """
    handler = type("Handler", (_Handler,), {"store": store})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        try:
            with pytest.MonkeyPatch.context() as patch:
                use(address, patch)
                yield address
        finally:
            server.shutdown()
            thread.join()


def use(address: str, patch: pytest.MonkeyPatch) -> None:
    """Has the clients of this process use a store.

    Args:
        address: The store's.
        patch: What takes it back.
    """
    patch.setenv("STORAGE_EMULATOR_HOST", address)
    patch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
    patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
    # What gcsfs asks of other services of Google's, before it is imported.
    patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
