"""A model hub on this machine: the few endpoints of huggingface.co that adapters need, kept in
memory and stricter than the real one. What a test did not foresee is refused and remembered."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from huggingface_hub.utils import validate_repo_id

TOKEN = "hf_of_a_test"
# what a model card's front matter may say here; the real hub takes more
KNOWN = {"library_name", "tags", "base_model", "base_model_relation", "license"}
LICENSES = {"apache-2.0", "mit"}
# asked by the client once, for what it tells of itself
OWN_AFFAIR = "/api/agent-harnesses"


@dataclass
class Repo:
    """A repository: commits by their hash, each all files; branches by name."""

    private: bool
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    summaries: list[str] = field(default_factory=list)

    def commit(self, branch: str, summary: str, files: dict[str, bytes]) -> str:
        """Add to what the branch has."""
        files = self.commits.get(self.branches.get(branch, ""), {}) | files
        name = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[name], self.branches[branch] = files, name
        self.summaries.append(summary)
        return name

    def at(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)


@dataclass
class Hub:
    """All repositories, the requests so far, and those that were refused as unknown."""

    repos: dict[str, Repo] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)  # bytes of each file
    cut: set[str] = field(default_factory=set)  # files whose transfer breaks off half-way

    def uploaded(self, name: str) -> dict[str, bytes]:
        """The files of a repository's main branch."""
        repo = self.repos[name]
        return repo.commits[repo.branches["main"]]


class Refused(Exception):
    """An answer other than success."""

    def __init__(self, status: int, told: str, code: str = "", body: dict | None = None):
        self.status, self.told, self.code, self.body = status, told, code, body


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None:
        pass

    def answer(self) -> None:
        verb, path = self.command, unquote(urlsplit(self.path).path)
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            self.body = b"".join(self.chunks())
        else:
            self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.hub.asked.append(f"{verb} {path}")
        try:
            for pattern, verbs, act in ROUTES:
                if verb in verbs and (found := re.fullmatch(pattern, path)):
                    act(self, **found.groupdict())
                    return
            if path != OWN_AFFAIR:
                self.hub.unknown.append(f"{verb} {path}")
            raise Refused(404, "no such endpoint")
        except Refused as refused:
            headers = {"X-Error-Message": refused.told, "X-Error-Code": refused.code}
            self.reply(refused.body or {"error": refused.told}, refused.status, headers)

    do_GET = do_HEAD = do_POST = answer

    def chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def reply(self, content: object, status: int = 200, headers: dict | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def may_write(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refused(401, "Invalid username or password.")

    def repo(self, name: str) -> Repo:
        found = self.hub.repos.get(name)
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if found is None or (found.private and not allowed):
            raise Refused(404 if allowed else 401, "Repository not found", "RepoNotFound")
        return found

    def commit_of(self, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        repo = self.repo(name)
        if (commit := repo.at(revision)) is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit, repo.commits[commit]

    def create(self) -> None:
        self.may_write()
        asked = json.loads(self.body)
        assert set(asked) <= {"name", "organization", "visibility", "type"}, asked
        name = f"{asked['organization']}/{asked['name']}"
        validate_repo_id(name)
        if name in self.hub.repos:
            told = {"url": f"{self.address()}/{name}"}
            raise Refused(409, "You already created this model repo", body=told)
        repo = self.hub.repos[name] = Repo(asked.get("visibility") == "private")
        repo.commit("main", "initial commit", {".gitattributes": b""})
        self.reply({"url": f"{self.address()}/{name}"})

    def address(self) -> str:
        return f"http://{self.headers['Host']}"

    def branch(self, repo: str, revision: str) -> None:
        self.may_write()
        found = self.repo(repo)
        if revision in found.branches:
            raise Refused(409, "Reference already exists")
        found.branches[revision] = found.branches["main"]
        self.reply({})

    def validate(self) -> None:
        problems = card_problems(json.loads(self.body)["content"])
        errors = {"errors": [{"message": text} for text in problems], "warnings": []}
        if problems:
            raise Refused(400, "Bad request", body=errors)
        self.reply(errors)

    def preupload(self, repo: str, revision: str) -> None:
        self.may_write()
        commit, _ = self.commit_of(repo, revision)
        names = [file["path"] for file in json.loads(self.body)["files"]]
        modes = [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]
        self.reply({"commitOid": commit, "files": modes})

    def commit(self, repo: str, revision: str) -> None:
        self.may_write()
        self.commit_of(repo, revision)
        header, *lines = [json.loads(line) for line in self.body.splitlines()]
        files = {}
        for line in lines:
            assert line["key"] == "file" and line["value"]["encoding"] == "base64", line["key"]
            files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        if problems := card_problems(files["README.md"].decode()):
            raise Refused(400, problems[0])
        summary = header["value"]["summary"]
        made = self.hub.repos[repo].commit(revision, summary, files)
        address = f"{self.address()}/{repo}/commit/{made}"
        self.reply({"success": True, "commitOid": made, "commitUrl": address})

    def info(self, repo: str, revision: str = "main") -> None:
        commit, files = self.commit_of(repo, revision)
        siblings = [{"rfilename": name} for name in sorted(files)]
        private = self.hub.repos[repo].private
        told = {"_id": "1", "id": repo, "modelId": repo, "sha": commit, "private": private}
        self.reply(told | {"tags": [], "downloads": 0, "likes": 0, "siblings": siblings})

    def tree(self, repo: str, revision: str) -> None:
        assert parse_qs(urlsplit(self.path).query)["recursive"] == ["true"]
        _, files = self.commit_of(repo, revision)
        self.reply([file | {"type": "file"} for file in map(entry, files.items())])

    def file(self, repo: str, revision: str, name: str) -> None:
        commit, files = self.commit_of(repo, revision)
        if name not in files:
            raise Refused(404, "Entry not found", "EntryNotFound")
        etag = f'"{entry((name, files[name]))["oid"]}"'
        headers = {"X-Repo-Commit": commit, "ETag": etag, "Accept-Ranges": "bytes"}
        data, status, begin = files[name], 200, 0
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            status, begin = 206, int(asked[1])
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        if name in self.hub.cut:
            headers["Content-Length"] = str(len(data) - begin)
            data, self.close_connection = data[: (begin + len(data)) // 2], True
        elif self.command == "GET":
            self.hub.sent[name] = self.hub.sent.get(name, 0) + len(data) - begin
        self.reply(data[begin:], status, headers)


NAME = r"(?P<repo>[^/]+/[^/]+)"
ROUTES = [
    (r"/api/repos/create", ["POST"], Handler.create),
    (r"/api/validate-yaml", ["POST"], Handler.validate),
    (rf"/api/models/{NAME}/branch/(?P<revision>.+)", ["POST"], Handler.branch),
    (rf"/api/models/{NAME}/preupload/(?P<revision>.+)", ["POST"], Handler.preupload),
    (rf"/api/models/{NAME}/commit/(?P<revision>.+)", ["POST"], Handler.commit),
    (rf"/api/models/{NAME}/revision/(?P<revision>.+)", ["GET"], Handler.info),
    (rf"/api/models/{NAME}/tree/(?P<revision>[^/]+)", ["GET"], Handler.tree),
    (rf"/api/models/{NAME}", ["GET"], Handler.info),
    (rf"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<name>.+)", ["GET", "HEAD"], Handler.file),
]


def entry(file: tuple[str, bytes]) -> dict:
    """A file as the tree of a commit lists it; `oid` is what git calls its content."""
    name, data = file
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return {"path": name, "size": len(data), "oid": oid}


def card_problems(text: str) -> list[str]:
    """What is wrong with a model card's front matter."""
    _, front, _ = text.split("---\n", 2)
    fields = yaml.safe_load(front)
    problems = [f"unknown field {name}" for name in fields if name not in KNOWN]
    if "base_model" in fields:
        validate_repo_id(fields["base_model"])
    if not all(re.fullmatch(r"[a-z0-9_-]+", tag) for tag in fields["tags"]):
        problems.append("a tag is no tag")
    if fields.get("license", "mit") not in LICENSES:
        problems.append(f'"license" must be one of {sorted(LICENSES)}')
    return problems


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """The hub's address."""
    handler = type("HandlerOfHub", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
