"""A forked child that does the work, so that a crash or a hang of it becomes an answer and the run goes on."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any, NamedTuple

import torch


class Frame(NamedTuple):
    """A line of the stack on which a child died."""

    file: str
    line: int
    function: str


class WorkerDied(Exception):
    """The child ended without an answer; the text says how (``killed the interpreter (SIGSEGV)``), ``stack`` where, innermost first."""

    def __init__(self, message: str, kind: str, stack: Sequence[Frame] = ()) -> None:
        super().__init__(message)
        self.kind = kind
        self.stack = tuple(stack)


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

    TwoTensor(torch.zeros(2, 2), torch.zeros(2, 2)).t()  # type: ignore[no-untyped-call]  # torch's own, without hints


_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')
_WHERE_ARE_YOU = getattr(signal, "SIGUSR2", signal.SIGTERM)  # SIGUSR2 exists wherever fork does


class Worker:
    """A child process that answers requests one after the other by ``serve``.

    It is forked from this process, so it knows everything that was imported and built here, and nothing needs to be pickled but requests
    and answers. ``forward`` makes answers that nobody asks for, which are sent first. It runs torch on one thread: a forked child must not touch its parent's thread pool.
    """

    def __init__(self, serve: Callable[[Any], Any], forward: Callable[[], Iterable[Any]] = tuple) -> None:
        self._connection, child = multiprocessing.Pipe()
        self._last_words = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the worker
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of forking beside threads; see the class's docstring
            self._pid = os.fork()
        if self._pid == 0:
            self._connection.close()
            _serve_forever(child, serve, forward, self._last_words)
        child.close()

    def poll(self, timeout: float) -> bool:
        """Whether something that wasn't asked for (``forward``) arrives within ``timeout`` seconds."""
        return self._connection.poll(timeout)

    def receive(self) -> Any:
        """The next of what wasn't asked for."""
        return self._connection.recv()

    def ask(self, request: Any, timeout: float) -> Any:
        """The answer to ``request``.

        Raises:
            WorkerDied: the child ended, or gave no answer within ``timeout`` seconds and was ended; this worker is then closed.
        """
        try:
            self._connection.send(request)
            if not self._connection.poll(timeout):
                stack = self._stack_of_hang()
                self.close(kill=True)
                raise WorkerDied(f"hangs: no end within {timeout:g} s", "hang", stack)
            return self._connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            status = self._wait()
            stack = self._stack()
            self.close()
            raise WorkerDied(*_epitaph(status), stack) from None

    def _stack(self) -> list[Frame]:
        """Where the child was when it died, or when it was asked."""
        self._last_words.seek(0)
        text = self._last_words.read().decode(errors="replace")
        return [Frame(file, int(line), function) for file, line, function in _FRAME.findall(text)]

    def _stack_of_hang(self) -> list[Frame]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, _WHERE_ARE_YOU)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline and not os.fstat(self._last_words.fileno()).st_size:
            time.sleep(0.01)
        time.sleep(0.02)  # until the whole of it is written
        return self._stack()

    def close(self, *, kill: bool = False) -> None:
        """End the child: by closing its connection, or at once."""
        self._connection.close()
        if kill:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._wait()
        self._last_words.close()

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


class Ahead:
    """A second child that works through requests from the last to the first, while this process works from the first to the last.

    It only saves time: what it hasn't answered when it is asked for (not reached yet, died, hangs) is None, and the caller does it
    in the ordinary way. Once the two meet, it ends.
    """

    def __init__(self, serve: Callable[[Any], Any], requests: Sequence[Any]) -> None:
        self._pending = list(requests)
        self._answers: dict[Any, Any] = {}
        backwards = self._pending[::-1]

        def all_of_them(_: Any) -> None:
            raise AssertionError("it is asked nothing")

        self._worker: Worker | None = Worker(all_of_them, forward=lambda: map(serve, backwards))

    def take(self, request: Any, timeout: float) -> Any:
        """The answer to ``request`` if it is there, or is worked on now and comes within ``timeout`` seconds; else None."""
        self._drain()
        if self._worker is not None and self._pending and self._pending[-1] == request:
            if not self._receive(timeout):
                self.close()
            elif not self._pending or self._pending[-1] != request:
                self.close()  # all that comes later is answered
        return self._answers.pop(request, None)

    def _drain(self) -> None:
        while self._worker is not None and self._receive(0):
            pass

    def _receive(self, timeout: float) -> bool:
        if self._worker is None or not self._pending:
            return False
        try:
            ready = self._worker.poll(timeout)
            answer = self._worker.receive() if ready else None
        except (EOFError, ConnectionResetError, BrokenPipeError):
            self.close()
            return False
        if ready:
            self._answers[self._pending.pop()] = answer
        return ready

    def close(self) -> None:
        """End the child."""
        if self._worker is not None:
            self._worker.close(kill=True)
            self._worker = None


def cores() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _serve_forever(
    connection: Any, serve: Callable[[Any], Any], forward: Callable[[], Iterable[Any]], last_words: IO[bytes]
) -> None:
    code = 1
    try:
        # a crash is a result here: its stack goes into the report, not over the user's terminal
        faulthandler.enable(last_words, all_threads=False)
        faulthandler.register(_WHERE_ARE_YOU, last_words, all_threads=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
        torch.set_num_threads(1)
        logging.getLogger("torch").setLevel(
            logging.CRITICAL
        )  # dynamo explains each failure at length; results carry what matters
        for answer in forward():
            connection.send(answer)
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
