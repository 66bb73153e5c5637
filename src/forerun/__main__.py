"""The `forerun` command, also as `python -m forerun`.

Until a command begins its work, Ctrl-C ends the process at once and without a message: there is nothing to save yet,
and an interrupted import would print a long traceback. For the same reason this file imports nothing of the package
that takes time.
"""

import os
import signal

INTERRUPTED = 130
# How often threads look before they sleep at a barrier. The usual 300,000 times are a millisecond: where another
# program has one of the cores, its turn and the waiting thread's go by for nothing, and decoding takes twice as long.
SPINS = "4000"


def main() -> None:
    """Run the command line that the process was started with, and exit with its status."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    wait_briefly()
    from forerun.cli import main as run

    run()


def wait_briefly() -> None:
    """Let OpenMP's threads wait for each other awake for a short time only, unless the user has said how they wait.

    GNU's OpenMP, which torch for Linux has and kernels are compiled with, reads this when torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


if __name__ == "__main__":
    main()
