"""Several processes of one program on this machine. They end whatever happens, and what they print goes to files."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

ROOT = pathlib.Path(__file__).parents[1]

# A process whose parent was killed, or whose peers are gone, ends by itself: faulthandler writes where it hung and exits,
# from a thread of its own that needs neither the interpreter nor JAX to answer.
MAIN = """
import faulthandler, runpy, sys
faulthandler.dump_traceback_later(float(sys.argv[1]), exit=True)
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class Process(subprocess.Popen):
    """A program in a process of its own; `log` is the file with all that it prints."""

    log: pathlib.Path

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def says(self, text: str, seconds: float) -> None:
        """Waits until it has printed `text`."""
        end = time.monotonic() + seconds
        while text not in self.said():
            assert self.poll() is None, f"ended with {self.returncode}:\n{self.said()}"
            assert time.monotonic() < end, f"no {text!r} within {seconds} s:\n{self.said()}"
            time.sleep(0.05)

    def ends(self, seconds: float) -> int:
        """Waits for its end; its return code, the negative of the signal that ended it."""
        try:
            return self.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.said()}") from None


@contextlib.contextmanager
def started(
    commands: Sequence[Sequence[str]],
    folder: pathlib.Path,
    *,
    seconds: float,
    devices: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[list[Process]]:
    """The processes of these commands, ``(module, *arguments)`` each, as children that are killed at the end of the block.

    Args:
      commands: what follows ``python -m``.
      folder: gets a log of each.
      seconds: after which a process ends by itself.
      devices: CPU devices of each; None: it says so itself.
      environment: in addition to this one.
    """
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **(environment or {})}
    env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}" if devices else ""
    processes: list[Process] = []
    try:
        for i, command in enumerate(commands):
            log = folder / f"process-{i}.log"
            argv = [sys.executable, "-u", "-c", MAIN, str(seconds), *command]
            with log.open("wb") as file:
                process = Process(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, cwd=ROOT)
            process.log = log
            processes.append(process)
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
