"""What the server needs besides the core: whether it is there, and how to get it."""

from __future__ import annotations

from importlib.util import find_spec

from forerun.errors import MissingPackage

NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def require_packages() -> None:
    """Raise MissingPackage where a package that the server needs is not installed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise MissingPackage(
            f"forerun serve needs {', '.join(missing)}, which is not installed: pip install 'forerun[serve]'"
        )
