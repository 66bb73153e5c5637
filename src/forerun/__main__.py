"""The `forerun` command, also as `python -m forerun`.

Until a command starts its work, Ctrl-C ends the process at once and without a message: there is nothing to save yet,
and an interrupted import would print a long traceback. For the same reason this file imports nothing that takes time
before it sets the handler.
"""

import os
import signal

INTERRUPTED = 130
# How often a thread polls a barrier before it sleeps. The default, 300,000 times, takes a millisecond: if another
# program uses one of the cores, threads waste that time in turn, and decoding takes twice as long.
SPINS = "4000"


def main() -> None:
    """Run the command line that the process was started with, and exit with its status."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    wait_briefly()
    from forerun.cli import main as run

    run()


def wait_briefly() -> None:
    """Let OpenMP's threads poll for a short time only before they sleep, unless the user has set OMP_WAIT_POLICY.

    GNU's OpenMP, which torch for Linux and forerun's kernels use, reads the variable when torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


if __name__ == "__main__":
    main()
