"""A small server that speaks the Hub's HTTP protocol on 127.0.0.1, enough for the real huggingface_hub client.

Create, branches, preupload, LFS upload, commit; info, tree; resolve with ranges, revisions, 401, 403 (gated), 404. It
can drop a connection in the middle of a file and send damaged bytes. Repositories live in memory.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """Commits (a folder of bytes each) and branches that name one."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    access: str = "public"  # "private": 401 without the token; "gated": 403

    def commit(self, branch: str, changes: dict[str, bytes | None]) -> str:
        """Add files to a branch (None deletes); the new commit's id."""
        files = {**self.commits.get(self.branches.get(branch, ""), {}), **changes}
        kept = {name: data for name, data in files.items() if data is not None}
        digest = hashlib.sha1(repr([(n, hashlib.sha1(d).hexdigest()) for n, d in sorted(kept.items())]).encode())
        digest.update(str(len(self.commits)).encode())
        sha = digest.hexdigest()
        self.commits[sha], self.branches[branch] = kept, sha
        return sha


@dataclass
class Hub:
    """The server's state, which a test may change at any time.

    Attributes:
        drop_after: cut the next file's connection after this many bytes; used once.
        corrupt: flip a byte of every file of this name.
        log: (method, path, range header) of each request.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    token: str = "hf_test"
    drop_after: int | None = None
    corrupt: str | None = None
    log: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""


def _lfs(name: str) -> bool:
    return name.endswith(".safetensors")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    def _answer(self, status: int, body: Any = b"", headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _error(self, status: int, code: str) -> None:
        self._answer(status, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _repository(self, name: str) -> Repository | None:
        """The repository if the caller may see it; else the error has been sent."""
        found, known = self.hub.repositories.get(name), self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if found is None:
            self._error(404 if known else 401, "RepoNotFound")
        elif found.access == "gated":
            self._error(403, "GatedRepo")
            return None
        elif found.access == "private" and not known:
            self._error(401, "RepoNotFound")
            return None
        return found

    def _files(self, repository: Repository, revision: str) -> tuple[str, dict[str, bytes]] | None:
        sha = repository.branches.get(revision, revision)
        if sha not in repository.commits:
            self._error(404, "RevisionNotFound")
            return None
        return sha, repository.commits[sha]

    def _route(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.log.append((self.command, path, self.headers.get("Range")))
        body = self._body()
        for pattern, handle in _ROUTES:
            found = re.fullmatch(pattern, path)
            if found:
                handle(self, body, *found.groups())
                return
        self._answer(404, {"error": f"no such route: {path}"})

    do_GET = do_HEAD = do_POST = do_PUT = _route

    # -- writing ------------------------------------------------------------------------------------------------------

    def _create(self, body: bytes) -> None:
        fields = json.loads(body)
        name = f"{fields.get('organization') or 'someone'}/{fields['name']}"
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._error(401, "Unauthorized")
            return
        if name in self.hub.repositories:
            self._answer(409, {"error": "exists", "url": f"{self.hub.url}/{name}"})
            return
        made = self.hub.repositories[name] = Repository()
        made.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"})
        self._answer(200, {"url": f"{self.hub.url}/{name}", "name": name})

    def _branch(self, body: bytes, name: str, branch: str) -> None:
        repository = self._repository(name)
        if repository is not None:
            exists = branch in repository.branches
            repository.branches.setdefault(branch, repository.branches["main"])
            self._answer(409 if exists else 201, {})

    def _preupload(self, body: bytes, name: str, revision: str) -> None:
        if self._repository(name) is not None:
            files = [
                {"path": f["path"], "uploadMode": "lfs" if _lfs(f["path"]) else "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})

    def _batch(self, body: bytes, name: str) -> None:
        objects = []
        for one in json.loads(body)["objects"]:
            links = {
                "upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"},
                "verify": {"href": f"{self.hub.url}/verify"},
            }
            objects.append({**one, **({} if one["oid"] in self.hub.blobs else {"actions": links})})
        self._answer(200, {"transfer": "basic", "objects": objects}, {"Content-Type": "application/vnd.git-lfs+json"})

    def _put(self, body: bytes, oid: str) -> None:
        right = hashlib.sha256(body).hexdigest() == oid
        if right:
            self.hub.blobs[oid] = body
        self._answer(200 if right else 400)

    def _verify(self, body: bytes) -> None:
        asked = json.loads(body)
        self._answer(200 if len(self.hub.blobs.get(asked["oid"], b"")) == asked["size"] else 404, {})

    def _commit(self, body: bytes, name: str, revision: str) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        changes: dict[str, bytes | None] = {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                changes[value["path"]] = self.hub.blobs[value["oid"]]
        sha = repository.commit(revision, changes)
        self._answer(200, {"commitUrl": f"{self.hub.url}/{name}/commit/{sha}", "commitOid": sha, "success": True})

    # -- reading ------------------------------------------------------------------------------------------------------

    def _info(self, body: bytes, name: str, revision: str | None) -> None:
        repository = self._repository(name)
        found = self._files(repository, revision or "main") if repository is not None else None
        if found is not None:
            siblings = [{"rfilename": one} for one in sorted(found[1])]
            self._answer(200, {"id": name, "modelId": name, "sha": found[0], "siblings": siblings, "tags": []})

    def _tree(self, body: bytes, name: str, revision: str, folder: str | None) -> None:
        repository = self._repository(name)
        found = self._files(repository, revision) if repository is not None else None
        if found is None:
            return
        inside = [one for one in sorted(found[1]) if not folder or one.startswith(folder + "/")]
        entries = [
            {"type": "file", "path": one, "size": len(found[1][one]), "oid": hashlib.sha1(found[1][one]).hexdigest()}
            for one in inside
        ]
        if entries:
            self._answer(200, entries)
        else:
            self._error(404, "EntryNotFound")

    def _resolve(self, body: bytes, name: str, revision: str, path: str) -> None:
        repository = self._repository(name)
        found = self._files(repository, revision) if repository is not None else None
        if found is None:
            return
        if path not in found[1]:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": found[0]})
            return
        data = found[1][path]
        etag = (hashlib.sha256 if _lfs(path) else hashlib.sha1)(data).hexdigest()
        headers = {"X-Repo-Commit": found[0], "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if _lfs(path):
            headers.update({"X-Linked-ETag": f'"{etag}"', "X-Linked-Size": str(len(data))})
        if self.hub.corrupt == path:
            data = data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 0xFF]) + data[len(data) // 2 + 1 :]
        asked = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked:
            start, end = int(asked.group(1)), int(asked.group(2) or len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            data = data[start : end + 1]
        if self.command == "GET" and self.hub.drop_after is not None and len(data) > self.hub.drop_after:
            kept, self.hub.drop_after = data[: self.hub.drop_after], None
            self.send_response(206 if asked else 200)
            for key, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(kept)
            self.close_connection = True
            return
        self._answer(206 if asked else 200, data, headers)


_NAME = r"([\w.-]+/[\w.-]+)"
_ROUTES: list[tuple[str, Any]] = [
    (r"/api/repos/create", _Handler._create),
    (r"/api/validate-yaml", lambda handler, body: handler._answer(200, {"errors": [], "warnings": []})),
    (r"/api/whoami-v2", lambda handler, body: handler._answer(200, {"name": "someone", "type": "user", "auth": {}})),
    (rf"/api/models/{_NAME}/branch/(.+)", _Handler._branch),
    (rf"/api/models/{_NAME}/preupload/(.+)", _Handler._preupload),
    (rf"/api/models/{_NAME}/commit/(.+)", _Handler._commit),
    (rf"/api/models/{_NAME}/tree/([^/]+)/?(.+)?", _Handler._tree),
    (rf"/api/models/{_NAME}(?:/revision/(.+))?", _Handler._info),
    (rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler._batch),
    (r"/lfs/(\w+)", _Handler._put),
    (r"/verify", _Handler._verify),
    (rf"/{_NAME}/resolve/([^/]+)/(.+)", _Handler._resolve),
]


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Serve until the block ends; ``hub.url`` is the endpoint."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
