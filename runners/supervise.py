"""Runs one server so that nothing of it outlives us, however we die: `supervise.py FD GRACE_S -- COMMAND …`.

FD is the read end of a pipe whose write end only the campaign holds. The campaign gone (also by kill -9, also out of
memory) means end of file here, and the server's whole process group is ended: SIGTERM, GRACE_S seconds, SIGKILL. The
server itself has PR_SET_PDEATHSIG, so that it dies even when this supervisor is the one that is killed. As a child
subreaper the supervisor inherits what the server's own children leave behind in other sessions, and ends them too.

Run by path with -I -S, in a process of its own: stdlib only, starts in about 20 ms, takes about 8 MB.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it goes; nothing outside Linux."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _descendants() -> list[int]:
    """Process ids below this one, found through /proc; deepest last."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        # The command name in brackets may itself hold brackets and blanks.
        parent = int(text.rpartition(")")[2].split()[1])
        children.setdefault(parent, []).append(int(stat.parent.name))
    found: list[int] = []
    queue = [os.getpid()]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def _signal_all(number: int) -> None:
    for pid in _descendants():
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def _reap(codes: dict[int, int]) -> None:
    """Collect everything that has ended below us into `codes` (pid to exit code, negative for a signal)."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        codes[pid] = os.waitstatus_to_exitcode(status)


def _end_all(codes: dict[int, int], grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    if grace_s > 0:
        _signal_all(signal.SIGTERM)
    while time.monotonic() < deadline and _descendants():
        time.sleep(0.02)
        _reap(codes)
    for _ in range(100):
        _reap(codes)
        if not _descendants():
            return
        _signal_all(signal.SIGKILL)
        time.sleep(0.02)


def main(argv: list[str]) -> int:
    """Supervise `argv[3:]`; returns the server's exit code (128 + signal when a signal ended it)."""
    pipe, grace_s, command = int(argv[0]), float(argv[1]), argv[3:]
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe()
    for end in (wake_read, wake_write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    # SIGINT from a terminal reaches the campaign, which stops us in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    codes: dict[int, int] = {}
    server = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent)
    asked_to_stop = False
    while not asked_to_stop:
        ready, _, _ = select.select([pipe, wake_read], [], [], 1.0)
        if pipe in ready and os.read(pipe, 64) == b"":
            asked_to_stop = True
        if wake_read in ready and signal.SIGTERM in os.read(wake_read, 64):
            asked_to_stop = True
        _reap(codes)
        if server.pid in codes:
            break
    _end_all(codes, grace_s if asked_to_stop else 0.0)
    code = codes.get(server.pid, -signal.SIGKILL)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
