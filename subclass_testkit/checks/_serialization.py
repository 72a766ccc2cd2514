"""Saving and loading: torch.save with every way to load, a fresh process, multiprocessing, other formats."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from typing import Any, cast

import torch

from subclass_testkit import oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks import _kept
from subclass_testkit.checks.base import CheckGroup
from subclass_testkit.outcome import CheckFailed, CheckSkipped, Refused
from subclass_testkit.script import Script

_SAVE = "f = io.BytesIO()\ntorch.save({what}, f)\n_ = f.seek(0)"
_LOCATIONS = {
    "cpu": "'cpu'",
    "device": "torch.device('cpu')",
    "dict": "{'cpu': 'cpu'}",
    "meta": "'meta'",
}
_WHY_SAVE = "a checkpoint that loads with other values, or as another class, is found out long after it was written"
_FIX_SAVE = (
    "leave pickling to torch (flatten and unflatten), or return everything that the constructor takes from __reduce_ex__"
)
_FRESH = """import sys, torch
v = torch.load(sys.argv[1], weights_only=False)
inner = [getattr(v, n) for n in v.__tensor_flatten__()[0]] if hasattr(v, "__tensor_flatten__") else [v.as_subclass(torch.Tensor)]
torch.save([type(v).__qualname__, v.shape, v.stride(), v.dtype, v.requires_grad, inner], sys.argv[2])"""


class SerializationChecks(CheckGroup):
    """torch.save and torch.load, and what else writes tensors to disk or to another process."""

    @over("w", "w.t()", "w[8:16]", "w[:, 8:16]", "w.detach()", "nn.Parameter(w)", "nn.Parameter(w, False)", "w.clone()")
    @check(needs=("serialization",), requires=("serialization",), why=_WHY_SAVE, fix=_FIX_SAVE)
    def test_save_and_load(self, source: str) -> None:
        """torch.save and torch.load give the tensor back: class, shape, dtype, requires_grad, context, values; views too."""
        self.need_shape(len(self.shape) == 2, "views of a matrix")
        script = self.script()
        _kept.take(script, "s", source)
        script.run(_SAVE.format(what="s") + "\nv = torch.load(f, weights_only=False)")
        view = "[" in source or ".t()" in source
        _kept.expect_kept(script, "v", "s", label=f"{source}, saved and loaded,", context=not view, strides=not view)
        if "Parameter" in source:
            script.expect(
                "isinstance(v, nn.Parameter)", f"{source}, saved and loaded, is no nn.Parameter any more.", kind="class"
            )

    @over(*_LOCATIONS)
    @check(
        needs=("serialization",),
        requires=("serialization",),
        axes="variant",
        why="checkpoints are loaded with map_location; a forgotten inner tensor stays behind",
        fix=_FIX_SAVE,
    )
    def test_map_location(self, where: str) -> None:
        """torch.load with a map_location puts every inner tensor, and what the tensor reports, there."""
        script = self.script()
        script.run(_SAVE.format(what="w") + f"\nv = torch.load(f, weights_only=False, map_location={_LOCATIONS[where]})")
        expected = torch.device("meta" if where == "meta" else "cpu")
        for name, inner in {"": script["v"], **oracle.inner_tensors(script["v"])}.items():
            if inner.device != expected:
                what = f"the inner tensor {name!r}" if name else "it"
                dotted = f"v.{name}" if name else "v"
                script.fail(
                    f"loaded with map_location={_LOCATIONS[where]}, {what} is on {inner.device}.",
                    kind="device",
                    assertion=f"assert {dotted}.device.type == {expected.type!r}",
                )
        _kept.expect_kept(
            script, label=f"loaded with map_location={_LOCATIONS[where]}, it", device=where != "meta", context=where != "meta"
        )

    @check(
        needs=("serialization",),
        requires=("serialization",),
        axes="variant",
        why="large checkpoints are mapped, not read; a class that copies or writes while it is built defeats it",
        fix="take the inner tensors as they are in __tensor_unflatten__ or __setstate__",
    )
    def test_mmap(self) -> None:
        """torch.load with mmap=True gives the tensor back."""
        script = self.script()
        with _file() as path:
            script.ns["path"] = path
            script.note("path = tempfile.mktemp()")
            script.run("torch.save(w, path)\nv = torch.load(path, mmap=True, weights_only=False)")
            _kept.expect_kept(script, label="loaded with mmap=True, it")

    @check(
        needs=("serialization",),
        axes="variant",
        why="weights_only=True is torch.load's default; what can't be loaded with it can't be shared",
        fix="put nothing but primitives, dtypes and importable classes into the pickle; no lambdas, no objects with side effects",
    )
    def test_weights_only_with_safe_globals(self) -> None:
        """torch.load with weights_only=True gives the tensor back, once the classes that the file names are declared safe."""
        script = self.script()
        script.run("import pkgutil\n" + _SAVE.format(what="w"))
        try:
            script.run(
                "names = torch.serialization.get_unsafe_globals_in_checkpoint(f)\n_ = f.seek(0)\n"
                "with torch.serialization.safe_globals([pkgutil.resolve_name(n) for n in names]):\n    v = torch.load(f, weights_only=True)"
            )
        except Refused as error:
            names = ", ".join(script.ns.get("names", ()))
            script.fail(
                f"with all that the file names ({names}) declared safe, torch.load(weights_only=True) fails: {error}",
                kind="weights_only",
                likely="the pickle holds something else than data (it calls setters, or builtins that are never safe).",
            )
        _kept.expect_kept(script, label="loaded with weights_only=True, it")

    @check(
        level="should",
        needs=("serialization",),
        axes="one",
        why="weights_only=True is torch.load's default: people's first torch.load of a checkpoint fails",
        fix="call torch.serialization.add_safe_globals([...]) in the module that defines the class",
    )
    def test_weights_only_by_default(self) -> None:
        """torch.load with its defaults works where the package is imported: the class has registered itself as safe."""
        if self.subject.cls.__module__.partition(".")[0] == "torch":
            raise CheckSkipped("a class of torch itself: not the user's to register")
        script = self.script()
        script.run(_SAVE.format(what="w"))
        try:
            script.run("v = torch.load(f)")
        except (Refused, CheckFailed):
            f = script["f"]
            f.seek(0)
            names = ", ".join(n.rpartition(".")[2] for n in torch.serialization.get_unsafe_globals_in_checkpoint(f))
            # A clear error of torch's own, and the author's choice: contested as a fault, so it counts as a refusal.
            raise Refused(
                "torch.load(f), with weights_only=True as it is by default, refuses a class that isn't registered: "
                f"torch.serialization.add_safe_globals([{names}]) in its module does that.",
                kind="weights_only",
            ) from None
        _kept.expect_kept(script, label="loaded with torch.load's defaults, it")

    @check(
        needs=("serialization",),
        axes="one",
        why="two modules that share a weight must share it after loading",
        fix="let pickle's memo work: don't rebuild in __deepcopy__ or __reduce_ex__ without it",
    )
    def test_identity_in_a_checkpoint(self) -> None:
        """A tensor that is twice in a checkpoint is one tensor again after loading; others in it stay what they are."""
        script = self.script(source=self.hp(seed=3))
        script.run(f"other = (lambda hp: {self.subject.make_text})(source)")
        script.run(_SAVE.format(what="{'a': w, 'b': w, 'c': [hp, other]}") + "\nv = torch.load(f, weights_only=False)")
        script.expect("v['a'] is v['b']", "saved twice in one file, it is loaded as two tensors.", kind="identity")
        script.equal("v['a']", "w", label="loaded from a dict, it")
        script.equal("v['c'][0]", "hp", label="a plain tensor beside it")
        script.equal("v['c'][1]", "other", label="another one beside it")

    @check(
        needs=("serialization",),
        tier="standard",
        axes="one",
        timeout=180,
        why="what was registered, cached or patched in the process that saved isn't there in the one that loads",
        fix="pickle by importable names only; put registrations into the module that defines the class",
    )
    def test_load_in_a_fresh_process(self) -> None:
        """A new Python process that has imported torch alone loads the tensor: same class, shape, dtype, and inner values."""
        module = self.subject.cls.__module__
        if module == "__main__" or "<locals>" in self.subject.cls.__qualname__:
            raise CheckSkipped(f"{module}.{self.subject.cls.__qualname__} can't be imported in another process")
        script = self.script()
        with _file() as path, _file() as answer:
            self._save_and_load_there(script, path, answer)
            if script["done"].returncode:
                lines = script["done"].stderr.strip().splitlines() or ["no message"]
                if f"No module named '{module.partition('.')[0]}'" in lines[-1]:
                    raise CheckSkipped(f"a new process can't import {module}: it isn't installed, and not on PYTHONPATH")
                if "<module '__main__'" in lines[-1]:  # of an inner tensor or a value in the context
                    raise CheckSkipped(f"a part of it is defined in a script, which another process can't import: {lines[-1]}")
                script.fail(f"torch.load in a fresh process fails: {lines[-1]}", kind="fresh-process")
            self._answer(script, torch.load(answer, weights_only=False))

    def _save_and_load_there(self, script: Script, path: str, answer: str) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        script.ns.update(path=path)
        script.note("path = tempfile.mktemp()")
        script.run("torch.save(w, path)")
        script.note("code = f'import torch; torch.load({path!r}, weights_only=False)'")
        script.note("subprocess.run([sys.executable, '-c', code], check=True)")
        command = [sys.executable, "-c", _FRESH, path, answer]
        script.ns["done"] = subprocess.run(command, env=env, capture_output=True, text=True)

    def _answer(self, script: Script, answer: list[object]) -> None:
        w = script["w"]
        script.ns["got"] = answer[:-1]
        script.ns["want"] = [type(w).__qualname__, w.shape, w.stride(), w.dtype, w.requires_grad]
        script.expect("got == want", "loaded in a fresh process, it is {got}, expected {want}.", kind="kept")
        inner = list(oracle.inner_tensors(w).values()) or [w.detach().as_subclass(torch.Tensor)]
        loaded = [t for x in answer[-1] for t in (list(oracle.inner_tensors(x).values()) or [x])]  # type: ignore[attr-defined]
        for number, (a, b) in enumerate(zip(loaded, inner, strict=True)):
            if not oracle.same_bits(a, b):
                script.fail(f"loaded in a fresh process, its inner tensor number {number} has other values.", kind="value")

    # --- other processes and formats

    @check(
        own_process=True,
        axes="one",
        why="data loaders and launchers share weights among processes; torch's default crashes for a tensor without storage",
        fix="handle torch.Tensor.share_memory_ in __torch_function__: share each inner tensor and return self",
    )
    def test_share_memory(self) -> None:
        """share_memory_ moves every inner tensor to shared memory and keeps the values, or is refused."""
        script = self.script()
        script.run("r = w.share_memory_()")
        script.expect("r is w", "share_memory_() gives another object.", kind="identity")
        script.equal("w", "d", label="after share_memory_(), it")
        for name, inner in (oracle.inner_tensors(script["w"]) or {"": script["w"]}).items():
            if not cast(Any, inner).is_shared():
                dotted = f".{name}" if name else ""
                script.fail(
                    f"after share_memory_(), {f'its inner tensor {name!r}' if name else 'it'} isn't in shared memory.",
                    kind="shared",
                    assertion=f"assert w{dotted}.is_shared()",
                )

    @check(
        own_process=True,
        axes="one",
        why="a queue hands tensors to workers through this pickler; the outer storage, where there is none, kills the process",
        fix="leave pickling to torch, or define __reduce_ex__ from the inner tensors",
    )
    def test_multiprocessing_pickle(self) -> None:
        """The pickler of torch.multiprocessing gives the tensor back, or refuses."""
        script = self.script()
        script.run(
            "import torch.multiprocessing\nfrom multiprocessing.reduction import ForkingPickler\nv = pickle.loads(ForkingPickler.dumps(w))"
        )
        _kept.expect_kept(script, label="passed through torch.multiprocessing's pickler, it")

    @over("queue", "DataLoader")
    @check(
        own_process=True,
        tier="full",
        axes="one",
        timeout=60,
        why="data loaders and launchers share weights among processes",
        fix="handle torch.Tensor.share_memory_ in __torch_function__, and define __reduce_ex__ from the inner tensors",
    )
    def test_other_process(self, how: str) -> None:
        """A worker process, by a queue or a DataLoader, sees the same values, or the hand-over is refused."""
        script = self.script()
        if how == "queue":
            script.run(
                "context = torch.multiprocessing.get_context('fork')\nq, r = context.SimpleQueue(), context.SimpleQueue()"
            )
            script.run(
                "work = lambda: r.put(plain(q.get()).double().tolist())\np = context.Process(target=work)\np.start()\nq.put(w)"
            )
            script.run("p.join(20)")
            script.expect("not r.empty()", "the process that was to receive it by a queue has died.", kind="died")
            script.run("got = torch.tensor(r.get(), dtype=torch.float64).to(d.dtype)")
        else:
            script.run(
                "got = next(iter(torch.utils.data.DataLoader([w], batch_size=None, num_workers=1, multiprocessing_context='fork')))"
            )
        script.equal("got", "d", label=f"passed by a {how}, it")

    @over(
        ("dlpack", "torch.from_dlpack(w)"),
        ("dlpack capsule", "torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(w))"),
        ("from_numpy", "torch.from_numpy(w.numpy())"),
    )
    @check(
        needs=("wrapper",),
        own_process=True,
        axes="one",
        why="another library reads memory that isn't there, or isn't the values",
        fix="refuse torch.Tensor.__dlpack__ and numpy in __torch_function__, or hand over dequantized values",
    )
    def test_exchange(self, case: str, expression: str) -> None:
        """dlpack and buffers refuse, or hand over the values; never other memory."""
        script = self.script()
        try:
            script.ns["got"] = script.value(expression, extend=False)
        except (Refused, CheckFailed):
            return  # any error is fine here
        script.note(f"got = {expression}")
        script.equal("torch.as_tensor(got)", "d", label=expression)

    @check(
        own_process=True,
        axes="one",
        why="a saver that reads the memory behind data_ptr writes other bytes, or reads past the end",
        fix="don't override data_ptr or untyped_storage with an inner tensor's; leave the pointer null",
    )
    def test_safetensors(self) -> None:
        """safetensors refuses the tensor, or saves its values."""
        script = self._safetensors()
        try:
            script.run("b = safetensors.torch.save({'w': w})")
        except (Refused, CheckFailed):
            return  # any error is fine here
        script.run("got = safetensors.torch.load(b)['w']")
        script.equal("got", "d", label="saved by safetensors and loaded, it")

    @check(
        level="should",
        needs=("wrapper",),
        axes="variant",
        why="safetensors holds plain tensors: flatten is how a wrapper gets into it",
        fix="keep inner tensors of plain dtypes, and rebuild from them and the context alone",
    )
    def test_safetensors_by_flattening(self) -> None:
        """The inner tensors, saved by safetensors under their names, rebuild the tensor."""
        script = self._safetensors()
        if any(hasattr(t, "__tensor_flatten__") for t in vars(script["w"]).values()):
            raise CheckSkipped("inner tensors are wrappers themselves")
        for dtype in {t.dtype for t in oracle.inner_tensors(script["w"]).values()}:
            try:
                script["safetensors"].torch.load(script["safetensors"].torch.save({"t": torch.empty(1, dtype=dtype)}))
            except Exception as error:
                raise CheckSkipped(f"safetensors can't hold a plain {dtype} tensor: {oracle.describe(error)}") from error
        script.run(
            "names, ctx = w.__tensor_flatten__()\nb = safetensors.torch.save({n: getattr(w, n).contiguous() for n in names})"
        )
        script.run("r = type(w).__tensor_unflatten__(safetensors.torch.load(b), ctx, w.size(), w.stride())")
        _kept.expect_kept(script, "r", "w", label="rebuilt from safetensors, it")

    def _safetensors(self) -> Script:
        if importlib.util.find_spec("safetensors") is None:
            raise CheckSkipped("safetensors isn't installed")
        script = self.script()
        script.run("import safetensors.torch")
        return script

    @check(
        level="should",
        tier="standard",
        axes="one",
        timeout=60,
        why="large models are saved by torch.distributed.checkpoint",
        fix="support the operations that its planner calls (detach, clone, copy_, narrow), or provide state_dict hooks",
    )
    def test_distributed_checkpoint(self) -> None:
        """torch.distributed.checkpoint saves the tensor and loads it into another one, or refuses."""
        if not torch.distributed.is_available():
            raise CheckSkipped("torch is built without torch.distributed")
        script = self.script(source=self.hp(seed=3))
        script.run("import torch.distributed.checkpoint as dcp")
        script.run(f"v = (lambda hp: {self.subject.make_text})(source)")
        with tempfile.TemporaryDirectory() as path:
            script.ns["path"] = path
            script.note("path = tempfile.mkdtemp()")
            script.run(
                _SAVE.format(what="w") + "\nnames = torch.serialization.get_unsafe_globals_in_checkpoint(f)\nimport pkgutil"
            )
            self._by_dcp(script)
            script.equal("state['w']", "w", label="saved and loaded by torch.distributed.checkpoint, it")

    def _by_dcp(self, script: Script) -> None:
        """Save and load; the subject's error is inside of an exception that derives from BaseException."""
        save = "dcp.save({'w': w}, checkpoint_id=path, no_dist=True)\nstate = {'w': v}"
        safe = "with torch.serialization.safe_globals([pkgutil.resolve_name(n) for n in names]):"
        load = "    dcp.load(state, checkpoint_id=path, no_dist=True)"
        try:
            script.run(f"{save}\n{safe}\n{load}")
        except CheckFailed as failure:
            inner = next((error for error, _ in getattr(failure.__cause__, "failures", {}).values()), None)
            if inner is None:
                raise
            script.blame(inner, "torch.distributed.checkpoint")


class _file(contextlib.AbstractContextManager[str]):  # reads as a context manager
    """The path of a file that is gone afterwards."""

    def __enter__(self) -> str:
        handle, self.path = tempfile.mkstemp()
        os.close(handle)
        return self.path

    def __exit__(self, *details: object) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)
