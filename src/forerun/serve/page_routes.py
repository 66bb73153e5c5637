"""The web page at `/`: its static files, and the settings of the model that it shows.

The files are part of the package and load nothing from other hosts, which the Content-Security-Policy also enforces.
They need no API key, but the requests that the page sends do.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from importlib import resources
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from forerun.serve.service import Service

SCRIPTS = ("app.js", "fields.js", "stream.js", "lane.js", "talk.js", "charts.js", "uplot.min.js")
STYLES = ("style.css", "uplot.min.css")
FILES = {  # by path: the file and its media type
    "/": ("index.html", "text/html"),
    **{f"/page/{name}": (name, "text/javascript") for name in SCRIPTS},
    **{f"/page/{name}": (name, "text/css") for name in STYLES},
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
PageHandler = Callable[[Request], Awaitable[Response]]


def page_routes(service: Service) -> Iterator[tuple[str, PageHandler]]:
    """The page's (path, handler) pairs, all for GET."""
    folder = resources.files("forerun").joinpath("serve").joinpath("page")
    for path, (name, kind) in FILES.items():
        yield path, partial(page_file, folder.joinpath(name).read_bytes(), kind)

    async def settings(request: Request) -> Response:
        service.keys.tenant(request.headers.get("authorization"))  # raises without a valid key
        return Response(json.dumps(page_settings(service)), media_type="application/json", headers=HEADERS)

    yield "/page/settings", settings


async def page_file(content: bytes, kind: str, _: Request) -> Response:
    """The response with one file."""
    return Response(content, media_type=kind, headers=HEADERS)


def page_settings(service: Service) -> dict[str, Any]:
    """The settings that the page shows: the model, its drafters, and the defaults of requests."""
    llm = service.llm
    options, params = llm.options, llm.get_default_sampling_params()
    return {
        "model": service.model_name,
        "fingerprint": llm.fingerprint,
        "format": llm.format,
        "max_model_len": llm.plan.max_model_len,
        "draft": llm.draft_name,
        "arms": list(llm.drafter_names),
        "verification": options.verification,
        "speculation": {"depth": options.speculation.shown_depth, "width": options.speculation.width},
        "chat": llm.tokenizer.template().is_usable,
        "defaults": {name: getattr(params, name) for name in DEFAULTS},
    }
