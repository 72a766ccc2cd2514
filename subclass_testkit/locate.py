"""Where in the subject's own code a failure happened: the line that raised, or the functions that only the operation ran."""

from __future__ import annotations

import inspect
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

_SHOWN = 4
_OURS = frozenset({"torch", "subclass_testkit", "builtins"})


class SubjectCode:
    """The source files that belong to a tensor class: those of the packages of the classes that it inherits from."""

    def __init__(self, cls: type) -> None:
        roots = {c.__module__.partition(".")[0] for c in cls.__mro__} - _OURS
        self._folders: list[str] = []
        self._files: set[str] = set()
        for name in sorted(roots):
            module = sys.modules.get(name)
            folders = [str(Path(p)) + "/" for p in getattr(module, "__path__", ())]
            file = getattr(module, "__file__", None)
            self._folders += folders
            if file and not folders:
                self._files.add(file)

    def owns(self, file: str) -> bool:
        return file in self._files or any(file.startswith(folder) for folder in self._folders)

    def short(self, file: str) -> str:
        """The file's name from its package on (``mypkg/tensor.py``)."""
        for folder in self._folders:
            if file.startswith(folder):
                return str(Path(file).relative_to(Path(folder).parent))
        return Path(file).name

    def definition_of(self, cls: type) -> str:
        """``mypkg/tensor.py:12``: where the class is defined; empty where there is no source."""
        try:
            return f"{self.short(inspect.getsourcefile(cls) or '')}:{inspect.getsourcelines(cls)[1]}"
        except (OSError, TypeError):
            return ""

    def line_of(self, error: BaseException) -> str:
        """``mypkg/tensor.py:120, in _slice: scale = scale[start]``: the innermost line of the subject's own; empty if there is none.

        Of an endless recursion, the lines that come again and again.
        """
        lines = [tb for tb in _steps(error.__traceback__) if self.owns(tb.tb_frame.f_code.co_filename)]
        if not lines:
            return ""
        if isinstance(error, RecursionError):
            counts = Counter(self._place(tb) for tb in lines)
            often = max(counts.values()) // 2
            return " -> ".join([place for place, count in counts.items() if count > often][:_SHOWN])
        file, number = lines[-1].tb_frame.f_code.co_filename, lines[-1].tb_lineno
        text = linecache.getline(file, number).strip()
        return self._place(lines[-1]) + (f": {text}" if text else "")

    def _place(self, tb: TracebackType) -> str:
        code = tb.tb_frame.f_code
        return f"{self.short(code.co_filename)}:{tb.tb_lineno}, in {code.co_name}"

    def frame_of(self, stack: Sequence[tuple[str, int, str]]) -> str:
        """``mypkg/tensor.py:120, in _slice``: the innermost frame (file, line, function) of the subject's own; else the innermost."""
        for file, line, function in [*(frame for frame in stack if self.owns(frame[0])), *stack[:1]]:
            return f"{self.short(file)}:{line}, in {function}"
        return ""

    def functions(self, codes: dict[CodeType, None]) -> str:
        """``mypkg/tensor.py:120 _slice, :88 _rebuild``: the functions by file and line, in the order of their calls."""
        shown: list[str] = []
        last = ""
        for code in list(codes)[:_SHOWN]:
            file = self.short(code.co_filename)
            shown.append(f"{'' if file == last else file}:{code.co_firstlineno} {code.co_name}")
            last = file
        rest = len(codes) - _SHOWN
        return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")

    @contextmanager
    def recording(self) -> Iterator[dict[CodeType, None]]:
        """The subject's functions that run inside, in order of their first call."""
        calls: dict[CodeType, None] = {}

        def note(frame: FrameType, event: str, _: Any) -> None:
            code = frame.f_code
            if event == "call" and code not in calls and self.owns(code.co_filename) and not code.co_name.startswith("<"):
                calls[code] = None

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            yield calls
        finally:
            sys.setprofile(before)


def _steps(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def only_in(code: SubjectCode, run: Callable[[], Any], usual: Callable[[], Any]) -> str:
    """The subject's functions that ``run`` calls and ``usual`` doesn't."""
    with code.recording() as ordinary:
        usual()
    with code.recording() as calls:
        run()
    return code.functions({c: None for c in calls if c not in ordinary})
