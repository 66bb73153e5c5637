"""The path of a streamed request through the server: the files of serve/ that it enters, each counted once.

`python -m pytest tests/serve/test_request_path.py -s` prints them in the order in which they are entered.
docs/architecture.md has them in a table.
"""

import sys
import threading
from pathlib import Path
from types import FrameType

from kit.servers import TEMPLATE, drafting, running, until
from test_round_path import SRC, listed

BOUND = 21
BODY = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": TEMPLATE, "max_tokens": 4, "stream": True}


def test_a_streamed_chat_enters_few_files_which_are_documented() -> None:
    entered: dict[str, list[str]] = {}
    recording = threading.Event()

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and recording.is_set() and path.parent == SRC / "serve":
            functions = entered.setdefault(str(path.relative_to(SRC)), [])
            if frame.f_code.co_name not in functions:
                functions.append(frame.f_code.co_name)

    before = threading.getprofile()
    threading.setprofile(note)  # in the threads that the server starts
    try:
        with drafting() as llm, running(llm) as server:
            server.post("/v1/chat/completions", **BODY)  # which fills caches
            connections, gate = server.server.connections, server.server.service.gate
            until(lambda: server.look(lambda: not [*connections] and not gate.num_in))
            recording.set()
            assert server.post("/v1/chat/completions", **BODY).text.endswith("data: [DONE]\n\n")
            until(lambda: "serve/records.py" in entered)
            recording.clear()
    finally:
        threading.setprofile(before)
        sys.setprofile(None)
    shown = "".join(f"\n  {path}: {', '.join(functions)}" for path, functions in entered.items())
    print(f"\n{len(entered)} files{shown}")
    assert len(entered) <= BOUND, shown
    assert list(entered) == listed("A streamed chat"), "the table in docs/architecture.md has other files"
