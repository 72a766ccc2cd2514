"""The wrapper protocol, construction, printing, memory, global state."""

from __future__ import annotations

import gc

import torch

from subclass_testkit import inputs, oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks._construction import ConstructionChecks
from subclass_testkit.checks._foreign import FOREIGN
from subclass_testkit.checks._parts import with_checks_of_its_parts
from subclass_testkit.checks._protocol_flatten import FlattenChecks
from subclass_testkit.checks._protocol_report import ReportChecks
from subclass_testkit.outcome import CheckFailed, CheckSkipped, NotClaimed, Refused
from subclass_testkit.script import Script

_STATE = """state = lambda: {
    "grad mode": torch.is_grad_enabled(), "inference mode": torch.is_inference_mode_enabled(),
    "default dtype": torch.get_default_dtype(), "default device": torch.get_default_device(), "autocast": torch.is_autocast_enabled("cpu"),
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled(), "the number of threads": torch.get_num_threads(),
    "matmul precision": torch.get_float32_matmul_precision(), "the random generator": hash(tuple(torch.get_rng_state().tolist()))}"""
_PRINTED = {
    "repr": ("w", "repr(t)"),
    "str": ("w", "str(t)"),
    "f-string": ("w", "f'{t}'"),
    "percent": ("w", "'%s' % t"),
    "in a list": ("w", "repr([t])"),
    "Parameter": ("nn.Parameter(w)", "repr(t)"),
    "frozen Parameter": ("nn.Parameter(w, False)", "repr(t)"),
    "on meta": ("w.to('meta')", "repr(t)"),
    "in a module": ("nn.ParameterList([w])", "repr(t)"),
}
_OPERATIONS = {
    "make": "{make}",
    "to_plain": "to_plain(w)",
    "linear": "{linear}",
    "slice": "w[8:16]",
    "transpose": "w.t()",
    "clone": "w.clone()",
    "deepcopy": "copy.deepcopy(w)",
    "pickle": "pickle.loads(pickle.dumps(w))",
    "repr": "repr(w)",
    "move": "w.to('meta')",
    "cast": "w.to(torch.bfloat16)",
    "write": "w.detach().copy_(source)",
    "Parameter": "nn.Parameter(w)",
    "backward": "{backward}",
}
_LONGEST_REPR = 50_000


@with_checks_of_its_parts
class ProtocolTests(FlattenChecks, ReportChecks, ConstructionChecks):
    """The wrapper protocol, construction, printing, memory, global state."""

    group = "protocol"

    # --- printing and memory

    @over(*_PRINTED)
    @check(
        axes="variant",
        why="a debugger, a log line or an assertion message then fails, or floods the log",
        fix="define __repr__(self, *, tensor_contents=None) from shapes, dtypes and attributes alone",
    )
    def test_prints(self, how: str) -> None:
        """repr, str and f-strings give a text, also on meta and inside a Parameter, and change nothing."""
        script = self.script()
        before = oracle.Snapshot.of(script["w"])
        target, expression = _PRINTED[how]
        script.run("d = plain(w).clone()")
        script.run(f"t = {target}")
        try:
            script.run(f"text = {expression}")
        except Refused as error:  # no operation that may be refused
            script.fail(f"{expression} of t = {target} fails: {error}", kind="repr")
        script.expect("isinstance(text, str) and text != ''", f"{expression} of t = {target} gives {{text!r}}.", kind="type")
        change = before.changes(script["w"])
        if change:
            script.fail(
                f"{expression} of t = {target} changed the tensor: {change}.",
                kind="mutated",
                assertion="assert torch.equal(plain(w), d), 'printing changed the tensor'",
            )

    @check(
        axes="variant",
        why="printing a model must not print its weights in full",
        fix="print shapes and dtypes, or torch's own summary of the values",
    )
    def test_prints_briefly(self) -> None:
        """The repr of a large tensor stays short."""
        self.matrix()
        shape = (*self.shape[:-2], max(1, 100_000 // (self.shape[-1] * self.shape[-2])) * self.shape[-2], self.shape[-1])
        script = self.script(inputs.weight(shape, self.dtype))
        script.expect(
            f"len(repr(w)) < {_LONGEST_REPR}",
            f"the repr of a tensor of {shape} has {{len(repr(w)):,}} characters.",
            kind="length",
        )

    @check(
        level="should",
        needs=("wrapper",),
        axes="variant",
        why="people can't tell from a log which of their weights are quantized",
        fix="start __repr__ with the name of the class, and say it once",
    )
    def test_prints_its_class(self) -> None:
        """The repr names the class (or another type than a plain tensor), and no more than once."""
        script = self.script()
        script.run("text = repr(w)")
        script.expect(
            "not text.startswith('tensor(') and text != ''", "the repr reads as a plain tensor's: {text[:60]}", kind="name"
        )
        name = self.subject.cls.__name__
        script.expect(
            f"text.count('{name}(') <= 1",
            f"the repr names the class {{text.count('{name}(')}} times: {{text[:120]}}",
            kind="name",
        )

    @over(
        ("data_ptr", "w.data_ptr()"),
        ("untyped_storage", "w.untyped_storage().data_ptr()"),
        ("numpy", "w.numpy()"),
        ("asarray", "__import__('numpy').asarray(w)"),
        ("tolist", "w.tolist()"),
    )
    @check(
        needs=("wrapper",),
        own_process=True,
        axes="one",
        why="a saver or a C extension reads from such a pointer: other memory, or a crash",
        fix="raise, or leave the pointer null; don't hand out an inner tensor's memory for the whole",
    )
    def test_storage_access(self, how: str, expression: str) -> None:
        """Access to its memory gives an error, a null pointer, or really its values; never something else."""
        script = self.script()
        try:
            script.ns["got"] = script.value(f"{expression}", extend=False)
        except (Refused, CheckFailed):
            return  # any error is fine here
        script.note(f"got = {expression}")
        if "data_ptr" in expression:
            self._pointer(script, expression)
        else:
            script.equal("torch.as_tensor(got).to(d.dtype)", "d", label=expression)

    def _pointer(self, script: Script, expression: str) -> None:
        """A pointer is null, or that of memory which holds the values in the outer dtype."""
        address, w = script["got"], script["w"]
        if not address:
            return
        size = w.numel() * w.element_size()
        for name, inner in oracle.inner_tensors(w).items():
            begin = inner.untyped_storage().data_ptr()
            if begin <= address < begin + inner.untyped_storage().nbytes():
                room = begin + inner.untyped_storage().nbytes() - address
                if inner.dtype == w.dtype and room >= size:
                    return
                script.fail(
                    f"{expression} points into its inner tensor {name!r} ({inner.dtype}, {room} bytes left); a reader takes it for {size} bytes of {w.dtype}.",
                    kind="pointer",
                    assertion=f"assert got == 0, '{size} bytes of {w.dtype} are not there'",
                )
        script.fail(f"{expression} points to memory of none of its inner tensors.", kind="pointer", assertion="assert got == 0")

    @check(
        level="should",
        needs=("quantized", "wrapper"),
        why="the point of a quantized tensor is its size",
        fix="keep the codes packed, scales coarse, and no copy of the source",
    )
    def test_is_smaller_than_its_source(self) -> None:
        """The memory of the inner tensors is less than that of the plain values."""
        script = self.script()
        # one bit a value is the least that codes take; scales are fewer, and in full precision
        large = [t for t in oracle.inner_tensors(script["w"]).values() if 8 * t.numel() >= script["d"].numel()]
        if all(t.is_floating_point() and t.element_size() >= script["d"].element_size() for t in large):
            raise NotClaimed("it has no codes: it keeps its values in full precision, and rounds them when they are read")
        sizes = {n: t.untyped_storage().nbytes() for n, t in oracle.inner_tensors(script["w"]).items()}
        plain = script["d"].numel() * script["d"].element_size()
        if sum(sizes.values()) >= plain:
            script.fail(
                f"its inner tensors take {sum(sizes.values())} bytes ({sizes}), the plain values {plain}.",
                kind="size",
                assertion="assert sum(getattr(w, n).nbytes for n in w.__tensor_flatten__()[0]) < d.nbytes",
            )

    @over("{make}", "w.clone()", "w.detach()", "w[8:16]", "nn.Parameter(w)", "copy.deepcopy(w)", "used in a linear")
    @check(
        axes="one",
        why="replaced weights stay in memory until the collector runs, which it may not: loading a model twice is out of memory",
        fix="no reference from the tensor (or a cache, a closure, a handler's global) back to itself",
    )
    def test_is_freed_at_once(self, expression: str) -> None:
        """A tensor is freed when its last reference goes, without the cycle collector."""
        script = self.script(x=self.x())
        linear = expression == "used in a linear"
        text = "w.clone()" if linear else expression.replace("{make}", self.subject.make_text)
        enabled = gc.isenabled()
        script.run("gc.disable()")
        try:
            try:
                script.run(f"v = {text}" + (f"\ny = {self.linear(w='v')}" if linear else ""))
            except CheckFailed as failure:
                raise CheckSkipped(f"{expression} fails by itself: {failure}") from failure
            script.run("alive = weakref.ref(v)\ndel v" + (", y" if linear else ""))
            script.expect(
                "alive() is None",
                f"a tensor ({expression.replace('{make}', 'newly made')}) is still alive after its last reference is gone.",
                kind="alive",
                likely="it is in a reference cycle, or in a cache.",
            )
        finally:
            script.ns.pop("v", None)
            if enabled:
                gc.enable()

    # --- other subclasses, global state

    @over(
        "torch.add(w, Foreign(a))",
        "torch.sub(Foreign(a), w)",
        "w.mul(Foreign(a))",
        "torch.where(Foreign(a) > 0, Foreign(a), w)",
        "torch.cat([w, Foreign(a)])",
        "F.linear(Foreign(x), w)",
        "torch.matmul(Foreign(x), w.t())",
    )
    @check(
        axes="one",
        why="a tensor meets DTensor, fake tensors and other libraries' tensors; taken for plain data they give garbage",
        fix="return NotImplemented from __torch_dispatch__ when types holds a class that you don't know",
        upstream="pytorch#162964",
    )
    def test_meets_an_unknown_subclass(self, expression: str) -> None:
        """Together with a tensor subclass that it doesn't know, an operation is right or refused, in both orders of the arguments."""
        self.need_shape(len(self.shape) == 2, "a matrix")
        if "(x)" in expression:
            self.agree(expression, setup=FOREIGN, tolerance=self.linear_tolerance(), x=self.x())
        else:
            self.agree(expression, setup=FOREIGN, tolerance=oracle.ELEMENTWISE, a=inputs.activation(self.shape, self.dtype, 11))

    @over(*_OPERATIONS)
    @check(
        axes="dtype",
        why="a library that leaves grad mode, dtype or the generator changed breaks code far away",
        fix="use the context managers (torch.no_grad(), torch.random.fork_rng()), and no global setters",
    )
    def test_global_state(self, name: str) -> None:
        """No operation changes global state: grad mode, default dtype and device, autocast, determinism, threads, the random generator."""
        script = self.script(x=self.x(), source=self.hp(seed=3))
        backward = f"{self.linear('x.clone().requires_grad_()')}.sum().backward()"
        text = _OPERATIONS[name].format(make=self.subject.make_text, linear=self.linear(), backward=backward)
        script.run(_STATE + "\n_ = torch.manual_seed(1234)")
        keep = (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), torch.get_float32_matmul_precision())
        draws = name == "write" or self.subject.stochastic  # rounding at random needs the generator
        try:
            for mode in (True, False) if name != "backward" else (True,):
                self._run_between_states(script, text, mode)
                self._state_kept(script, text, draws)
        finally:
            torch.use_deterministic_algorithms(keep[0])
            torch.set_num_threads(keep[1])
            torch.set_float32_matmul_precision(keep[2])

    def _run_between_states(self, script: Script, text: str, mode: bool) -> None:
        try:
            script.run(f"torch.set_grad_enabled({mode})\nbefore = state()\n_ = {text}\nafter = state()")
        except CheckFailed as failure:
            raise CheckSkipped(f"{text} fails by itself: {failure}") from failure

    def _state_kept(self, script: Script, text: str, draws: bool) -> None:
        for what, old in script["before"].items():
            new = script["after"][what]
            if old != new and not (draws and what == "the random generator"):
                detail = "" if "generator" in what else f" from {old} to {new}"
                script.fail(
                    f"{text} changed {what}{detail}.", kind="state", assertion=f"assert after[{what!r}] == before[{what!r}]"
                )
