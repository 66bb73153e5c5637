"""The clients that are tried, each with the one version that is pinned and what is installed beside it.

What a package needs on its own is what the registry has on the day of the installation; a client whose neighbours must
be pinned too names them in `beside`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Client:
    """One client: its package at PyPI with the version, and packages that are installed in the same step.

    `first` is installed alone before that, for packages that would otherwise be taken in another build.
    """

    name: str
    package: str
    version: str
    beside: tuple[str, ...] = ()
    first: tuple[str, ...] = ()

    @property
    def script(self) -> str:
        """The file that tries it."""
        return f"with_{self.name.replace('-', '_')}.py"

    @property
    def requirements(self) -> tuple[str, ...]:
        """What is installed at last."""
        return f"{self.package}=={self.version}", *self.beside


TORCH = ("torch==2.13.0",)
CLIENTS = (
    Client("openai", "openai", "3.57.0"),
    Client("langchain", "langchain-openai", "1.7.4"),
    Client("litellm", "litellm", "1.110.2"),
    Client("openai-agents", "openai-agents", "0.24.0"),
    Client("pydantic-ai", "pydantic-ai-slim[openai]", "2.68.0"),
    Client("dspy", "dspy", "3.4.1"),
    Client("llama-index", "llama-index-llms-openai-like", "0.8.1"),
    Client("llm", "llm", "0.36"),
    Client("instructor", "instructor", "1.17.0"),
    Client("anthropic", "anthropic", "2.14.0"),
    Client("prometheus", "prometheus-client", "0.26.0"),
    Client("lm-eval", "lm-eval[api]", "0.4.13", beside=("transformers==5.24.0",)),
    Client("aiperf", "aiperf", "0.13.0"),
    Client("guidellm", "guidellm", "0.8.1", first=TORCH),
    Client("aider", "aider-chat", "0.86.2"),
)
