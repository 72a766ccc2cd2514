"""A forked child that does the work, so that a crash or a hang of it becomes an answer and the run goes on."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch


class WorkerDied(Exception):
    """The child ended without an answer; the text says how (``killed the interpreter (SIGSEGV)``)."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


def can_fork() -> str:
    """Empty if checks can run in a child process here, else why they can't."""
    if not hasattr(os, "fork"):
        return "this platform has no os.fork"
    for name in ("cuda", "xpu"):
        backend = getattr(torch, name, None)
        if backend is not None and backend.is_initialized():
            return f"{name} is initialized in this process, and does not survive a fork"
    return ""


@functools.cache
def warm_up() -> None:
    """Pay torch's first-use costs once, before the first fork, and not in every child.

    Imports what compiling and fake tensors need, and lets torch parse its schemas (the first view of a well-behaved wrapper does).
    """
    for name in ("torch._dynamo", "torch._subclasses.fake_tensor", "torch._functorch.aot_autograd", "torch.export"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    from torch.testing._internal.two_tensor import TwoTensor

    TwoTensor(torch.zeros(2, 2), torch.zeros(2, 2)).t()


class Worker:
    """A child process that answers requests one after the other by ``serve``.

    It is forked from this process, so it knows everything that was imported and built here, and nothing needs to be pickled but requests
    and answers. It runs torch on one thread: a forked child must not touch its parent's thread pool.
    """

    def __init__(self, serve: Callable[[Any], Any]) -> None:
        self._connection, child = multiprocessing.Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of forking beside threads; see the class's docstring
            self._pid = os.fork()
        if self._pid == 0:
            self._connection.close()
            _serve_forever(child, serve)
        child.close()

    def ask(self, request: Any, timeout: float) -> Any:
        """The answer to ``request``.

        Raises:
            WorkerDied: the child ended, or gave no answer within ``timeout`` seconds and was ended; this worker is then closed.
        """
        try:
            self._connection.send(request)
            if not self._connection.poll(timeout):
                self.close(kill=True)
                raise WorkerDied(f"hangs: no end within {timeout:g} s", "hang")
            return self._connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            status = self._wait()
            self._connection.close()
            raise WorkerDied(*_epitaph(status)) from None

    def close(self, *, kill: bool = False) -> None:
        """End the child: by closing its connection, or at once."""
        self._connection.close()
        if kill:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._wait()

    def _wait(self) -> int:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            try:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
            except ChildProcessError:
                return 0
            if pid:
                return status
            time.sleep(0.002)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        return signal.SIGKILL


def _serve_forever(connection: Any, serve: Callable[[Any], Any]) -> None:
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
        torch.set_num_threads(1)
        logging.getLogger("torch").setLevel(logging.CRITICAL)  # dynamo explains each failure at length; results carry what matters
        while True:
            request = connection.recv()
            connection.send(serve(request))
    except (EOFError, BrokenPipeError):
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # never return into the forked copy of the caller


def _epitaph(status: int) -> tuple[str, str]:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name
        return f"killed the interpreter ({name})", f"killed:{name}"
    code = os.waitstatus_to_exitcode(status)
    return f"ended the process with exit code {code} (os._exit, or sys.exit in C)", "killed:exit"
