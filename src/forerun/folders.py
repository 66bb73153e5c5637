"""The folders in which forerun keeps files: one for each kind of file, below the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """The folder for one kind of file, such as "kernels"; nothing is made there.

    Raises OSError where the user has no home folder.
    """
    try:
        from platformdirs import user_cache_path

        base = user_cache_path("forerun", appauthor=False)
    except ImportError:  # the core also runs with what torch and transformers install, which does not include it
        base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "forerun")
    except RuntimeError:  # platformdirs knows of no home; earlier versions give a path that begins with "~"
        base = Path()
    if not base.is_absolute():
        raise OSError("no home folder is known: set XDG_CACHE_HOME to a folder of your own")
    return base / kind
