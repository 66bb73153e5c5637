"""The page: an application for browsers at `/`, and what it is told of the model.

This file decides which files are sent, with which headers. They ship with the package and load nothing from elsewhere,
which the Content-Security-Policy also enforces. They need no key; what they ask for does.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from forerun.errors import TokenizerError
from forerun.serve.service import Service

HTML, SCRIPT, STYLE, ICON = "text/html", "text/javascript", "text/css", "image/svg+xml"
FILES = {  # by address: the file and its type
    "/": ("index.html", HTML),
    "/page/style.css": ("style.css", STYLE),
    "/page/app.js": ("app.js", SCRIPT),
    "/page/fields.js": ("fields.js", SCRIPT),
    "/page/stream.js": ("stream.js", SCRIPT),
    "/page/lane.js": ("lane.js", SCRIPT),
    "/page/charts.js": ("charts.js", SCRIPT),
    "/page/uplot.min.js": ("uplot.min.js", SCRIPT),
    "/page/uplot.min.css": ("uplot.min.css", STYLE),
    "/page/icon.svg": ("icon.svg", ICON),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
PageHandler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class PageRoutes:
    """The page of one service."""

    service: Service
    contents: Mapping[str, bytes]

    @classmethod
    def of(cls, service: Service) -> PageRoutes:
        """With its files read."""
        folder = resources.files("forerun").joinpath("serve").joinpath("page")
        return cls(service, {path: folder.joinpath(name).read_bytes() for path, (name, _) in FILES.items()})

    def table(self) -> Iterator[tuple[str, PageHandler]]:
        """The addresses, all of them for GET."""
        yield from ((path, self.file) for path in FILES)
        yield "/page/settings", self.settings

    async def file(self, request: Request) -> Response:
        """One of the files."""
        path = request.url.path
        return Response(self.contents[path], media_type=FILES[path][1], headers=HEADERS)

    async def settings(self, request: Request) -> Response:
        """What the page has to know: the model, what drafts, and the defaults of requests. It wants a key if all do."""
        self.service.keys.tenant(request.headers.get("authorization"))
        return Response(json.dumps(self.told()), media_type="application/json", headers=HEADERS)

    def told(self) -> dict[str, Any]:
        """The same as an object."""
        llm = self.service.llm
        options, params = llm.engine.options, llm.get_default_sampling_params()
        wish = options.speculation
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        return {
            "model": self.service.model_name,
            "fingerprint": llm.fingerprint,
            "format": llm.format,
            "max_model_len": llm.plan.max_model_len,
            "draft": llm.draft_name,
            "arms": list(llm.drafter_names),
            "verification": options.verification,
            "speculation": {"depth": wish.shown_depth, "width": wish.width},
            "chat": self.chats(),
            "defaults": {name: getattr(params, name) for name in names},
        }

    def chats(self) -> bool:
        """Whether the model has a chat template that can be used."""
        try:
            self.service.llm.tokenizer.require_chat_template()
        except TokenizerError:
            return False
        return True
