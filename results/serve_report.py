"""`longrecall serve-report`: the run reports and the trend as a small local site.

    longrecall serve-report --runs results/runs --store history --port 8700

Reads files that are there, writes none, and answers GET only. Report pages carry their own content security policy,
which names their one script by its hash; every answer adds one that lets nothing be loaded, sent or framed.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longrecall.results.history_command import DEFAULT_STORE, RowsAt, Store, open_history, plain_errors

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from longrecall.results.history import History

PAGES = {
    "report.html": "text/html",
    "report.json": "application/json",
    "report.md": "text/plain",
    "flips.jsonl": "text/plain",
}
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


def list_runs(runs: Path) -> list[dict[str, str]]:
    """The run folders that have a report, newest first; one that cannot be read says why."""
    from longrecall.results.run_folder import REPORT_JSON, RunFolderError, load_report
    from longrecall.results.words import headline, lede

    found = []
    for path in sorted(runs.glob(f"*/{REPORT_JSON}"), key=lambda path: path.stat().st_mtime, reverse=True):
        name = path.parent.name
        try:
            report = load_report(path.parent)
            found.append(
                {"name": name, "headline": headline(report), "lede": lede(report), "when": report.created[:16]}
            )
        except RunFolderError as error:
            found.append({"name": name, "headline": "This report cannot be read", "lede": str(error), "when": ""})
    return found


def make_site(runs: Path, history: "History | None") -> "Starlette":
    """The site as an ASGI application."""
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, PlainTextResponse
    from starlette.responses import Response as Answer
    from starlette.routing import Route

    from longrecall.results.page import render
    from longrecall.results.report import version
    from longrecall.results.storage import HistoryError

    def index(request: "Request") -> "Response":
        values = {"title": "longrecall", "version": version(), "runs": list_runs(runs), "trend": history is not None}
        return HTMLResponse(render("index.html.jinja", values), headers=HEADERS)

    def page(request: "Request") -> "Response":
        name, leaf = request.path_params["run"], request.path_params["leaf"]
        known = {path.parent.name: path.parent for path in runs.glob("*/report.json")}
        if name not in known or leaf not in PAGES:
            return PlainTextResponse(f"no such page: {name}/{leaf}", status_code=404, headers=HEADERS)
        path = known[name] / leaf
        if not path.is_file():
            return PlainTextResponse(f"{name} has no {leaf}", status_code=404, headers=HEADERS)
        return Answer(path.read_bytes(), media_type=f"{PAGES[leaf]}; charset=utf-8", headers=HEADERS)

    def show_trend(request: "Request") -> "Response":
        from longrecall.results.trend_command import trend_data
        from longrecall.results.trend_page import trend_html

        if history is None:
            return PlainTextResponse("no history was given (--store)", status_code=404, headers=HEADERS)
        try:
            return HTMLResponse(trend_html(trend_data(history)), headers=HEADERS)
        except HistoryError as error:
            return PlainTextResponse(f"the history cannot be read: {error}", status_code=500, headers=HEADERS)

    routes = [
        Route("/", index, methods=["GET"]),
        Route("/trend", show_trend, methods=["GET"]),
        Route("/runs/{run}/{leaf}", page, methods=["GET"]),
    ]
    return Starlette(routes=routes)


def serve_site(runs: Path, history: "History | None", *, host: str, port: int) -> None:
    """Serve until interrupted. Raises HistoryError when the port is taken."""
    import socket

    import uvicorn

    from longrecall.results.storage import HistoryError

    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise HistoryError(f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port") from error
    typer.echo(f"longrecall reports at http://{host}:{listener.getsockname()[1]}/  (Ctrl-C ends)")
    config = uvicorn.Config(make_site(runs, history), log_level="warning", lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])


@plain_errors
def serve_report(
    runs: Annotated[Path, typer.Option(help="Folder of run folders.")] = Path("results/runs"),
    store: Store = DEFAULT_STORE,
    rows: RowsAt = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8700,
) -> None:
    """Show run reports and trend as a small local site."""
    serve_site(runs, open_history(store, rows), host=host, port=port)
