"""The options of commands that ask a server in place of a model that is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

if TYPE_CHECKING:
    from forerun.traffic.client import ServerAddress


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Options that name a server, and how it is asked."""

    TITLE: ClassVar[str] = "Server"

    server: Annotated[
        str | None, typer.Option(help="Instead of a model: the address of any OpenAI-compatible server.")
    ] = None
    api_key: Annotated[str, typer.Option(help="Key, if servers want one.", envvar="OPENAI_API_KEY")] = ""
    served_model_name: Annotated[str, typer.Option(help="Model to ask; default: the first that is served.")] = ""
    timeout_s: Annotated[float, typer.Option(min=1, help="Seconds without news after which a request failed.")] = 600.0

    def addresses(
        self, chat: bool, other: str | None, option: str, other_model: str
    ) -> tuple[ServerAddress, ServerAddress | None]:
        """The server, and the other one, whose address and model the options `option` and `option`-model name."""
        from forerun.traffic.client import ServerAddress

        assert self.server is not None, "this is asked for a server"
        first = ServerAddress(
            self.server, self.api_key, self.served_model_name, chat, self.timeout_s, url_option="server"
        )
        if other is None:
            return first, None
        return first, replace(first, url=other, model=other_model, url_option=option, model_option=f"{option}_model")
