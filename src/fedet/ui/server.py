"""The web server of `fedet ui`: routes, live events, and the loop that serves them on loopback."""

from __future__ import annotations

import contextlib
import functools
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote

import anyio
import uvicorn
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from fedet.config.sources import presets
from fedet.errors import ConfigError, FedetError
from fedet.reporting import report as reports
from fedet.reporting import results, words
from fedet.runtime import package_version
from fedet.ui import charts, comparison_view, folder, run_view
from fedet.ui.guard import FILE_POLICY, Guard
from fedet.ui.jobs import Job, Jobs, method_names

STATIC = Path(__file__).with_name("static")
STYLE = Path(reports.__file__).with_name("templates") / "style.css"
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".txt": "text/plain"}
INTERVAL = 0.5
"""Seconds between two looks at the files that somebody watches."""
MOST_FORM = 10_000
"""Bytes of a form; nothing that is sent here is longer."""


@dataclass(frozen=True)
class Site:
    """What the pages are made from: the runs folder, the programs started here, and whether there may be any."""

    root: Path
    jobs: Jobs
    allow_control: bool
    watch: folder.Watch = field(default_factory=lambda: folder.Watch(INTERVAL))

    def routes(self) -> list[Route]:
        """The addresses below the token."""
        return [
            Route("/", self.index),
            Route("/run/{name:path}", self.run),
            Route("/comparison/{name:path}", self.comparison),
            Route("/compare", self.compare),
            Route("/study/{name}", self.study),
            Route("/job/{number:int}", self.job),
            Route("/files/{name:path}", self.file),
            Route("/static/{name}", static),
            Route("/events/{name:path}", self.events),
            Route("/start", self.start, methods=["POST"]),
            Route("/stop/{name:path}", self.stop, methods=["POST"]),
            Route("/resume/{name:path}", self.resume, methods=["POST"]),
        ]

    def index(self, request: Request) -> Response:
        """The list of what is there."""
        failed = [job for job in self.jobs.jobs.values() if not job.running and job.process.returncode not in (0, 130)]
        return self.page(
            request, "index.html.j2", watch="", title="Runs", runs=folder.run_rows(self.root), failed=failed,
            comparisons=folder.comparisons(self.root), studies=folder.studies(self.root),
            presets=presets(), methods=method_names(),
        )  # fmt: skip

    def run(self, request: Request) -> Response:
        """A run, live."""
        name = request.path_params["name"]
        run = folder.run_of(self.root, name)
        parent = name.rpartition("/")[0]
        siblings = folder.comparison_of(self.root, parent).runs if parent and _compared(self.root, parent) else []
        number = request.query_params.get("round", "")
        seen = run_view.view(run, siblings, int(number) if number.isdecimal() and len(number) < 10 else None)
        return self.page(
            request, "run.html.j2", watch=name, name=name, parent=parent if siblings else "", run=run, state=results.state(run),
            report=(run.folder / "report.html").is_file(), ours=self.jobs.of(run.folder) is not None, **seen,
        )  # fmt: skip

    def comparison(self, request: Request) -> Response:
        """A comparison that was made as one."""
        found = folder.comparison_of(self.root, request.path_params["name"])
        if not found.runs:
            raise FedetError(f"{found.name} has nothing to compare yet: none of its runs has started")
        report = f"{found.name}/report.html" if (self.root / found.name / "report.html").is_file() else ""
        extra = {"report": report, "notes": found.notes, "waiting": found.planned - len(found.runs)}
        return self.show_comparison(request, found.runs, found.name, **extra)

    def compare(self, request: Request) -> Response:
        """Runs that somebody ticked."""
        names = list(dict.fromkeys(request.query_params.getlist("run")))[:50]
        if len(names) < 2:
            raise FedetError("tick at least two runs to compare them")
        runs = [folder.run_of(self.root, name) for name in names]
        return self.show_comparison(request, runs, "", report="", notes=[], waiting=0)

    def study(self, request: Request) -> Response:
        """How far a study is, and its table so far."""
        name = request.path_params["name"]
        return self.page(request, "study.html.j2", watch=name, name=name, **folder.study_of(self.root, name))

    def show_comparison(self, request: Request, runs: list[Any], watch: str, **extra: Any) -> Response:
        """The page of some runs next to each other."""
        links = [
            (
                run.folder.relative_to(self.root).as_posix(),
                f"{words.method_name(run.method)}, seed {run.seed}",
                results.state(run),
            )
            for run in runs
        ]
        return self.page(request, "compare.html.j2", watch=watch, links=links, **extra, **comparison_view.view(runs))

    def job(self, request: Request) -> Response:
        """A program that was started here: on to its run as soon as there is one."""
        job = self.jobs.jobs.get(request.path_params["number"])
        if job is None:
            raise FedetError("no such program was started from this page")
        found = job.folder(self.root)
        if found is not None:
            return _go(request, f"/run/{quote(found.relative_to(self.root).as_posix())}")
        response = self.page(request, "job.html.j2", watch=None, title=job.what, job=job)
        if job.running:
            response.headers["refresh"] = "1"
        return response

    def file(self, request: Request) -> Response:
        """A file of a report."""
        path, kind = folder.served_file(self.root, request.path_params["name"])
        return FileResponse(path, media_type=kind, headers={"content-security-policy": FILE_POLICY})

    def events(self, request: Request) -> Response:
        """A message each time the files of a run, a comparison or the whole folder change."""
        name = request.path_params["name"].strip("/")
        place = folder.locate(self.root, name) if name else self.root
        return StreamingResponse(changes(place, self.watch, request.is_disconnected), media_type="text/event-stream")

    async def start(self, request: Request) -> Response:
        """Start a run from a preset."""
        form = await _form(request)
        return self.started(request, await _threaded(lambda: self.jobs.start(form)))

    def resume(self, request: Request) -> Response:
        """Continue a run."""
        return self.started(request, self.jobs.resume(folder.run_of(self.root, request.path_params["name"]).folder))

    def stop(self, request: Request) -> Response:
        """Stop a run that was started here, at its checkpoint."""
        name = request.path_params["name"]
        self.jobs.stop(folder.run_of(self.root, name).folder)
        return _go(request, f"/run/{quote(name)}")

    def started(self, request: Request, job: Job) -> Response:
        """On to the page of a program."""
        return _go(request, f"/job/{job.number}")

    def page(
        self, request: Request, template: str, *, status: int = 200, watch: str | None = None, **context: Any
    ) -> HTMLResponse:
        """Render a template; `watch` names the folder whose changes make it out of date, empty for all of them."""
        common = {
            "base": request.scope["root_path"], "watch": watch, "allow_control": self.allow_control,
            "root": self.root, "version": package_version(), "here": request.url.path,
        }  # fmt: skip
        return HTMLResponse(templates().get_template(template).render(common | context), status)

    def refuse(self, request: Request, error: Exception) -> Response:
        """A sentence instead of a page."""
        if isinstance(error, HTTPException):
            return self.page(request, "error.html.j2", status=error.status_code, title="Not found", sentence=error.detail)
        status = 400 if isinstance(error, ConfigError) or request.method == "POST" else 404
        return self.page(request, "error.html.j2", status=status, title="That did not work", sentence=str(error))


def application(site: Site, token: str, port: int) -> Guard:
    """The guarded ASGI application."""
    handlers: dict[Any, Any] = {FedetError: site.refuse, HTTPException: site.refuse}
    return Guard(Starlette(routes=site.routes(), exception_handlers=handlers), token, port, site.allow_control)


def serve(root: Path, port: int, allow_control: bool, announce: Callable[[str], None]) -> list[str]:
    """Serve the page until Ctrl-C; calls `announce` with its address and returns the runs that were stopped at the end."""
    if allow_control:
        root.mkdir(parents=True, exist_ok=True)
    if not root.is_dir():
        raise ConfigError(f"{root} is not a directory: give the one that holds your run folders")
    token, jobs = secrets.token_urlsafe(24), Jobs(root)
    with _listening(port) as listener:
        port = listener.getsockname()[1]
        app = application(Site(root, jobs, allow_control), token, port)
        config = uvicorn.Config(
            app, loop="asyncio", http="h11", ws="none", log_level="error", access_log=False, server_header=False,
            proxy_headers=False, timeout_graceful_shutdown=1,
        )  # fmt: skip
        announce(f"http://127.0.0.1:{port}/{token}/")
        try:
            with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after an orderly end
                uvicorn.Server(config).run(sockets=[listener])
        finally:
            stopped = jobs.close()
    return [job.what for job in stopped]


async def changes(place: Path, watch: folder.Watch, gone: Callable[[], Any]) -> AsyncIterator[str]:
    """Server-sent events: one at once, then one whenever the files have changed, and a sign of life in between."""
    before, quiet = None, 0
    while not await gone():
        now = await _threaded(lambda: watch.version(place))
        quiet += 1
        if now != before:
            before, quiet = now, 0
            yield f"data: {hash(now) & 0xFFFFFFFF}\n\n"
        elif quiet * INTERVAL >= 15:
            quiet = 0
            yield ": still here\n\n"
        await anyio.sleep(INTERVAL)


def static(request: Request) -> Response:
    """A file of the package: style sheets and scripts."""
    name = request.path_params["name"]
    path = STYLE if name == STYLE.name else STATIC / Path(name).name
    if path.suffix not in TYPES or not path.is_file():
        raise HTTPException(404, f"there is no '{name}' here")
    return FileResponse(path, media_type=TYPES[path.suffix])


@functools.cache
def templates() -> Environment:
    """The pages' templates, which escape everything that they are given."""
    loader = FileSystemLoader([Path(__file__).with_name("templates"), STYLE.parent])
    env = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters |= words.FILTERS | {"value": charts.text, "address": quote}
    return env


def _compared(root: Path, name: str) -> bool:
    return (root / name / "comparison.json").is_file()


def _go(request: Request, where: str) -> RedirectResponse:
    return RedirectResponse(request.scope["root_path"] + where, 303)


async def _form(request: Request) -> dict[str, str]:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_FORM:
            raise HTTPException(413, "the form is too long")
    return dict(parse_qsl(body.decode("utf-8", "replace")))


async def _threaded(work: Callable[[], Any]) -> Any:
    return await anyio.to_thread.run_sync(work)


@contextlib.contextmanager
def _listening(port: int) -> Any:
    """A socket on loopback; port 0 takes a free one."""
    listener = socket.socket(socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(f"can't listen on port {port}: {error.strerror}; choose another one with --port") from None
    with listener:
        yield listener
