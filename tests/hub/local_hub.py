"""A model hub in this process: the few endpoints of huggingface.co that adapters need, behind the
client's own transport, and stricter than the real ones. What a test did not foresee is refused and
remembered.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from urllib.parse import unquote

import yaml
from huggingface_hub import constants, set_client_factory
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import _http, validate_repo_id

# the library under the client, which has had two names
httpx: Any = import_module(HTTPError.__module__.partition(".")[0])

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


class Refused(Exception):
    """An answer other than success."""

    def __init__(self, status: int, message: str, code: str = "", body: dict | None = None):
        headers = {"X-Error-Message": message, "X-Error-Code": code}
        self.response = httpx.Response(status, headers=headers, json=body or {"error": message})


def success(content: object) -> Any:
    return httpx.Response(200, json=content)


@dataclass
class Hub:
    """All repositories, the requests so far, and those that were refused as unknown."""

    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)  # bytes of each file
    is_down: bool = False

    def uploaded(self, name: str) -> dict[str, bytes]:
        """The files of a repository's main branch."""
        repo = self.repos[name]
        return repo.commits[repo.branches["main"]]

    def answer(self, request: Any) -> Any:
        if self.is_down:
            raise httpx.ConnectError("nobody listens")
        path = unquote(request.url.path)
        request.read()
        self.requests.append(f"{request.method} {path}")
        try:
            for pattern, verbs, act in ROUTES:
                if request.method in verbs and (match := re.fullmatch(pattern, path)):
                    return act(self, request, **match.groupdict())
            if path != OWN_AFFAIR:
                self.unknown.append(self.requests[-1])
            raise Refused(404, "no such endpoint")
        except Refused as refused:
            return refused.response

    def repo(self, request: Any, name: str) -> Repo:
        repo, allowed = self.repos.get(name), is_allowed(request)
        if repo is None or (repo.private and not allowed):
            raise Refused(404 if allowed else 401, "Repository not found", "RepoNotFound")
        return repo

    def commit_of(self, request: Any, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        repo = self.repo(request, name)
        if (commit := repo.at(revision)) is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit, repo.commits[commit]

    def create(self, request: Any) -> Any:
        must_be_allowed(request)
        fields = json.loads(request.content)
        assert set(fields) <= {"name", "organization", "visibility", "type"}, fields
        name = f"{fields['organization']}/{fields['name']}"
        validate_repo_id(name)
        address = {"url": f"{constants.ENDPOINT}/{name}"}
        if name in self.repos:
            raise Refused(409, "You already created this model repo", body=address)
        self.repos[name] = Repo(fields.get("visibility") == "private")
        self.repos[name].commit("main", "initial commit", {".gitattributes": b""})
        return success(address)

    def branch(self, request: Any, repo: str, revision: str) -> Any:
        must_be_allowed(request)
        branches = self.repo(request, repo).branches
        if revision in branches:
            raise Refused(409, "Reference already exists")
        branches[revision] = branches["main"]
        return success({})

    def validate(self, request: Any) -> Any:
        problems = card_problems(json.loads(request.content)["content"])
        errors = {"errors": [{"message": text} for text in problems], "warnings": []}
        if problems:
            raise Refused(400, "Bad request", body=errors)
        return success(errors)

    def preupload(self, request: Any, repo: str, revision: str) -> Any:
        must_be_allowed(request)
        commit, _ = self.commit_of(request, repo, revision)
        names = [file["path"] for file in json.loads(request.content)["files"]]
        modes = [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]
        return success({"commitOid": commit, "files": modes})

    def commit(self, request: Any, repo: str, revision: str) -> Any:
        must_be_allowed(request)
        self.commit_of(request, repo, revision)
        header, *lines = [json.loads(line) for line in request.content.splitlines()]
        files = {}
        for line in lines:
            assert line["key"] == "file" and line["value"]["encoding"] == "base64", line["key"]
            files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        if problems := card_problems(files["README.md"].decode()):
            raise Refused(400, problems[0])
        commit = self.repos[repo].commit(revision, header["value"]["summary"], files)
        address = f"{constants.ENDPOINT}/{repo}/commit/{commit}"
        return success({"success": True, "commitOid": commit, "commitUrl": address})

    def info(self, request: Any, repo: str, revision: str = "main") -> Any:
        commit, files = self.commit_of(request, repo, revision)
        about = {"_id": "1", "id": repo, "modelId": repo, "sha": commit}
        about |= {"private": self.repos[repo].private, "tags": [], "downloads": 0, "likes": 0}
        return success(about | {"siblings": [{"rfilename": name} for name in sorted(files)]})

    def tree(self, request: Any, repo: str, revision: str) -> Any:
        assert request.url.params["recursive"] == "true"
        _, files = self.commit_of(request, repo, revision)
        return success([entry(*file) | {"type": "file"} for file in files.items()])

    def file(self, request: Any, repo: str, revision: str, name: str) -> Any:
        commit, files = self.commit_of(request, repo, revision)
        if name not in files:
            raise Refused(404, "Entry not found", "EntryNotFound")
        data, etag = files[name], f'"{entry(name, files[name])["oid"]}"'
        headers = {"X-Repo-Commit": commit, "ETag": etag, "Content-Length": str(len(data))}
        if request.method == "HEAD":
            return httpx.Response(200, headers=headers)
        self.sent[name] = self.sent.get(name, 0) + len(data)
        return httpx.Response(200, headers=headers, content=data)


def is_allowed(request: Any) -> bool:
    return request.headers.get("Authorization") == f"Bearer {TOKEN}"


def must_be_allowed(request: Any) -> None:
    if not is_allowed(request):
        raise Refused(401, "Invalid username or password.")


NAME = r"(?P<repo>[^/]+/[^/]+)"
ROUTES = [
    (r"/api/repos/create", ["POST"], Hub.create),
    (r"/api/validate-yaml", ["POST"], Hub.validate),
    (rf"/api/models/{NAME}/branch/(?P<revision>.+)", ["POST"], Hub.branch),
    (rf"/api/models/{NAME}/preupload/(?P<revision>.+)", ["POST"], Hub.preupload),
    (rf"/api/models/{NAME}/commit/(?P<revision>.+)", ["POST"], Hub.commit),
    (rf"/api/models/{NAME}/revision/(?P<revision>.+)", ["GET"], Hub.info),
    (rf"/api/models/{NAME}/tree/(?P<revision>[^/]+)", ["GET"], Hub.tree),
    (rf"/api/models/{NAME}", ["GET"], Hub.info),
    (rf"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<name>.+)", ["GET", "HEAD"], Hub.file),
]


def entry(name: str, data: bytes) -> dict:
    """A file as the tree of a commit lists it; `oid` is what git calls its content."""
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return {"path": name, "size": len(data), "oid": oid}


def card_problems(text: str) -> list[str]:
    """What is wrong with a model card's front matter."""
    fields = yaml.safe_load(text.split("---\n")[1])
    problems = [f"unknown field {name}" for name in fields if name not in KNOWN]
    if "base_model" in fields:
        validate_repo_id(fields["base_model"])
    if not all(re.fullmatch(r"[a-z0-9_-]+", tag) for tag in fields["tags"]):
        problems.append("a tag is no tag")
    if fields.get("license", "mit") not in LICENSES:
        problems.append(f'"license" must be one of {sorted(LICENSES)}')
    return problems


@contextmanager
def reached(hub: Hub) -> Iterator[None]:
    """Every request of the client goes there."""
    options = {"follow_redirects": True, "event_hooks": {"request": [_http.hf_request_event_hook]}}
    transport = httpx.MockTransport(hub.answer)
    set_client_factory(lambda: httpx.Client(transport=transport, **options))
    try:
        yield
    finally:
        set_client_factory(_http.default_client_factory)
