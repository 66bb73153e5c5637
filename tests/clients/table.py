"""The clients that are tried, each with the one version that is pinned and what is installed with it.

What a package needs on its own is what the registry has on the day of the installation; a client whose neighbours must
be pinned too names them in `beside`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Client:
    """One client: its package at PyPI with the version, and how its environment is made.

    `first` is installed before it, for packages that would otherwise be taken in another build, and `beside` with it.
    `alone` are options of pip with which the package itself is installed, and then what is `beside` it follows;
    `variables` are set meanwhile.
    """

    name: str
    package: str
    version: str
    first: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def script(self) -> str:
        """The file that tries it."""
        return f"with_{self.name.replace('-', '_')}.py"

    @property
    def steps(self) -> list[tuple[str, ...]]:
        """The arguments of each call of `pip install`."""
        requirement = f"{self.package}=={self.version}"
        rest = [(*self.alone, requirement), self.beside] if self.alone else [(requirement, *self.beside)]
        return [step for step in (self.first, *rest) if step]


TORCH = ("torch==2.13.0",)  # by itself, so that pip takes a build for CPUs where it knows an index of them
VLLM_IMPORTS = ("xgrammar==0.2.8", "apache-tvm-ffi==0.1.15.post2")  # their own needs are large, and not used
VLLM_NEEDS = """
    aiohttp cachetools cbor2 cloudpickle einops fastapi llguidance msgspec openai openai-harmony partial_json_parser
    pillow prometheus_client psutil py-cpuinfo pybase64 pydantic pyzmq regex requests tqdm transformers==5.20.0 uvloop
"""
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
    Client(  # without its kernels and what they need, which are gigabytes; only the source can be had so
        "vllm-bench",
        "vllm",
        "0.33.0",
        first=(*TORCH, "jinja2", "packaging", "setuptools<81", "setuptools_scm", "wheel"),
        alone=(
            "--no-deps",
            "--no-build-isolation",
            "--no-binary",
            "vllm",
            "xgrammar==0.2.8",
            "apache-tvm-ffi==0.1.15.post2",
        ),
        variables=(("VLLM_TARGET_DEVICE", "empty"), ("VLLM_VERSION_OVERRIDE", "0.33.0")),
        beside=tuple(VLLM_NEEDS.split()),
    ),
    Client("aider", "aider-chat", "0.86.2"),
)
