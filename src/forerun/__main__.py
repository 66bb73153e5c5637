"""The `forerun` command, also as `python -m forerun`.

Until a command begins its work, Ctrl-C ends the process at once and without a message: there is nothing to save yet,
and an interrupted import would print a long traceback. For the same reason this file imports nothing of the package
that takes time.
"""

import os
import signal

INTERRUPTED = 130


def main() -> None:
    """Run the command line that the process was started with, and exit with its status."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from forerun.cli import main as run

    run()


if __name__ == "__main__":
    main()
