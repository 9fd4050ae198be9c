"""Runs a command and ends it, with all that it started, when whoever started this is gone: `keeper.py COMMAND ...`

Standard input is a pipe whose other end the starter holds. However it goes (kill -9 included), the pipe then ends.
SIGTERM ends the command as well.
Standard library only: it is run as a file, by an interpreter that need not have the package.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

GRACE = 5.0
"""Seconds to end by itself."""


def end(group: int) -> None:
    """End all processes of a group: those that take longer than `GRACE` by force."""
    deadline = time.monotonic() + GRACE
    sent = signal.SIGTERM
    while time.monotonic() < deadline:
        try:
            os.killpg(group, sent)
        except ProcessLookupError:
            return
        sent = signal.SIGCONT  # does nothing but find out whether one is left, and wake it if it was stopped
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def main() -> None:
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        end(command.pid)

    signal.signal(signal.SIGTERM, lambda *_: end(command.pid))
    threading.Thread(target=watch, daemon=True).start()
    code = command.wait()
    end(command.pid)  # what it left behind
    raise SystemExit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
