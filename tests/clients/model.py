"""The model that the clients ask: the bundled one, with a chat template that shows tools and a context of its own.

The template is no part of the package, since the bundled model was never trained on conversations. The context is
longer than the drafter's, so that prompts of agents fit and requests go on where the drafter ends.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

CONTEXT = 8192  # tokens; the model was trained on 2048
HERE = Path(__file__).resolve().parent
BUNDLED = HERE.parent.parent / "src" / "forerun" / "bundled" / "stdlib" / "target"


def chat_model(cache: Path) -> Path:
    """The folder of the model, written anew."""
    folder = cache / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(BUNDLED, folder)
    shutil.copy(HERE / "chat_template.jinja", folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    return folder
