"""The wrapper protocol: flatten and unflatten, and the context."""

from __future__ import annotations

import re

import torch

from subclass_testkit import oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks import _kept, _sources
from subclass_testkit.checks.base import CheckGroup
from subclass_testkit.outcome import CheckFailed, Refused
from subclass_testkit.script import Script, execute
from subclass_testkit.subject import Subject

_SAME = ("w.detach()", "w.clone()", "nn.Parameter(w)", "nn.Parameter(w, False)", "nn.Buffer(w)")
_FLATTENED = ("w", "w.detach()", "w.clone()", "w.contiguous()", "w.t()", "w[8:16]", "w.t().contiguous()", "nn.Parameter(w)")
_BATTERY = ("plain(w)", "w.dtype", "w.t()", "w[1:2]", "w.clone()", "w.to(torch.bfloat16)", "w * 2", "w.clone().mul_(-1)")
_WHY_FLATTEN = "torch.compile, FSDP, DTensor and torch.save take a wrapper apart and rebuild it by flatten and unflatten"
_FIX_FLATTEN = (
    "return every inner tensor's name and every attribute from __tensor_flatten__, and use all of them in __tensor_unflatten__"
)
_RECOGNISED = ("protocol/is-a-traceable-wrapper",)


class FlattenChecks(CheckGroup):
    """Flatten, unflatten, and the context."""

    @check(
        needs=("wrapper",),
        axes="variant",
        why="torch takes it for a plain tensor without data: compile, FSDP and save fail",
        fix=_FIX_FLATTEN,
    )
    def test_is_a_traceable_wrapper(self) -> None:
        """torch recognises the class as a wrapper subclass: it has __tensor_flatten__ and __tensor_unflatten__."""
        script = self.script()
        script.expect(
            "is_traceable_wrapper_subclass(w)",
            "is_traceable_wrapper_subclass(w) is false for a {type(w).__name__}, which has no storage of its own.",
            kind="protocol",
        )

    @over(*_SAME)
    @check(
        needs=("wrapper",),
        why="modules and optimizers call these at once: the class, and its kernels, are gone without an error",
        fix="implement aten.detach, aten.alias and aten.clone by applying them to each inner tensor",
    )
    def test_class_is_kept(self, expression: str) -> None:
        """detach, clone, Parameter and Buffer keep the class and the values."""
        script = self.script()
        script.run(f"v = {expression}")
        script.expect(
            "isinstance(v, type(w))", f"{expression} is a {{type(v).__name__}}, no {{type(w).__name__}} any more.", kind="class"
        )
        _kept.expect_kept(script, label=expression, klass=False) if "Parameter" not in expression else self._parameter(
            script, expression
        )

    def _parameter(self, script: Script, expression: str) -> None:
        script.expect("isinstance(v, nn.Parameter)", f"isinstance({expression}, nn.Parameter) is false.", kind="class")
        grad = "False" not in expression
        script.expect(f"v.requires_grad is {grad}", f"{expression}.requires_grad is {not grad}.", kind="requires_grad")
        script.equal("v", "w", label=f"{expression}")

    @over(*_FLATTENED)
    @check(needs=("wrapper",), depends=_RECOGNISED, why=_WHY_FLATTEN, fix=_FIX_FLATTEN)
    def test_rebuild(self, source: str) -> None:
        """Flatten and unflatten with the same size and strides give the same tensor: class, shape, strides, dtype, context, values."""
        self.need_shape(len(self.shape) == 2, "views of a matrix")
        script = self.script()
        _kept.take(script, "s", source)
        _kept.need_wrapper(script, "s", source)
        script.run(_kept.REBUILD.format(s="s"))
        if script["s"].requires_grad:
            script.run("r.requires_grad_()")
        _kept.expect_kept(script, "r", "s", label=f"{source}, flattened and rebuilt,")

    @over("small values", "large values", "all positive", "zero row")
    @check(
        needs=("wrapper",),
        axes="variant",
        depends=_RECOGNISED,
        why=_WHY_FLATTEN,
        fix="list an optional inner tensor in __tensor_flatten__ only when it is there, and take a missing one for None",
    )
    def test_rebuild_of_other_data(self, kind: str) -> None:
        """Flatten and unflatten keep tensors whose data decides which inner tensors there are (optional ones present, and absent)."""
        self.rows_and_columns()
        scale = {"small values": " * 0.01", "large values": " * 100"}.get(kind)
        script = self.script(f"({self.hp()}){scale}" if scale else _sources.kind(kind, self.shape, self.dtype))
        _kept.need_wrapper(script, "w", "make(hp)")
        script.run(_kept.REBUILD.format(s="w"))
        _kept.expect_kept(script, "r", "w", label=f"a tensor of {kind}, flattened and rebuilt,")

    @check(
        needs=("wrapper",),
        requires=("compile",),
        axes="variant",
        depends=_RECOGNISED,
        why="fake tensors are made by unflattening fake inner tensors; one that keeps memory of its own breaks compile",
        fix="build the result from the inner tensors that __tensor_unflatten__ is given, and from nothing else",
    )
    def test_rebuild_from_other_inner_tensors(self) -> None:
        """Unflatten uses the inner tensors that it is given: copies give an equal tensor that shares nothing with the original."""
        script = self.script(other=self.hp(seed=3))
        script.run("names, ctx = w.__tensor_flatten__()\nparts = {n: getattr(w, n) for n in names}")
        tensors = [n for n in script["names"] if isinstance(script["parts"][n], torch.Tensor)]
        script.run(
            f"copies = {{**parts, **{{n: parts[n].clone() for n in {tensors!r}}}}}\nr = type(w).__tensor_unflatten__(copies, ctx, w.size(), w.stride())"
        )
        _kept.expect_kept(script, "r", "w", label="w, rebuilt from copies of its inner tensors,")
        script.ns["independent"] = script.subject.build(script["other"])
        _kept.expect_independent(script, "r", "w", "independent", "w, rebuilt from copies of its inner tensors,")

    @check(
        level="should",
        needs=("wrapper",),
        axes="variant",
        depends=_RECOGNISED,
        why="meta and fake tensors, and loading with map_location, are made by unflattening inner tensors of another device",
        fix="derive the device of the result from the inner tensors, not from the context",
    )
    def test_rebuild_on_another_device(self) -> None:
        """Unflatten of meta inner tensors gives a meta tensor of the same shape and dtype."""
        script = self.script()
        script.run("names, ctx = w.__tensor_flatten__()\nparts = {n: getattr(w, n) for n in names}")
        tensors = [n for n in script["names"] if isinstance(script["parts"][n], torch.Tensor)]
        script.run(
            f"meta = {{**parts, **{{n: parts[n].to('meta') for n in {tensors!r}}}}}\nm = type(w).__tensor_unflatten__(meta, ctx, w.size(), w.stride())"
        )
        script.expect(
            "m.device.type == 'meta'", "rebuilt from meta inner tensors, it reports device {m.device}.", kind="device"
        )
        script.expect(
            "(m.shape, m.dtype) == (w.shape, w.dtype)",
            "rebuilt from meta inner tensors, it reports {m.shape} {m.dtype}, expected {w.shape} {w.dtype}.",
            kind="shape",
        )

    @over("standard", "small values")
    @check(
        needs=("wrapper",),
        axes="variant",
        depends=_RECOGNISED,
        why="the context guards compiled code: one that isn't comparable, or holds a tensor, breaks or recompiles",
        fix="put primitives, dtypes, enums and (frozen) dataclasses with == into the context, and tensors among the inner tensors",
    )
    def test_context_is_plain_data(self, kind: str) -> None:
        """Flatten gives names of present inner tensors, and a context without tensors that equals its copy by a plain bool; twice the same."""
        script = self.script(f"({self.hp()}) * 0.01" if kind == "small values" else None)
        script.run("names, ctx = w.__tensor_flatten__()\nnames2, ctx2 = w.__tensor_flatten__()")
        script.expect("all(type(n) is str for n in names)", "the names are no strings: {names}.", kind="names")
        script.expect(
            "all(getattr(w, n) is not None for n in names)",
            "the names {names} list an inner tensor that is None.",
            kind="names",
            likely="an absent optional inner tensor must be left out of the names.",
        )
        script.expect(
            "list(names) == list(names2)", "two calls of __tensor_flatten__ give the names {names} and {names2}.", kind="names"
        )
        found = next(_kept.tensors_in(script["ctx"], "ctx"), "")
        if found:
            script.fail(
                f"the flatten context holds a tensor, at {found}.",
                kind="tensor",
                assertion=f"assert not isinstance({found}, torch.Tensor)",
            )
        for pair in ("ctx == ctx2", "copy.deepcopy(ctx) == ctx"):
            script.expect(
                f"({pair}) is True",
                f"{pair} gives {{{pair}!r}}, expected True.",
                kind="context",
                likely="the context holds an object without __eq__, or one whose __eq__ gives no bool.",
            )
        script.expect(
            "not any((part == object()) is True for part in torch.utils._pytree.tree_leaves(ctx))",
            "a part of the flatten context equals any object whatever: {ctx}.",
            kind="context",
            likely="an __eq__ that always gives True, so that compiled code is reused for tensors that behave differently.",
        )

    @check(
        needs=("wrapper",),
        axes="variant",
        depends=_RECOGNISED,
        why="compiled code, and the caches of compiled code, are reused for any tensor with an equal context: with the wrong behaviour",
        fix="compare every attribute that changes what the tensor does in the context's ==, the outer dtype too",
    )
    def test_context_tells_behaviour_apart(self) -> None:
        """Tensors with equal contexts and alike inner tensors behave alike: any of them can be rebuilt with the other's context."""
        script = self.script()
        script.run("ctx = w.__tensor_flatten__()[1]")
        for label, text, subject in self._relatives():
            try:
                script.ns["o"] = _execute_on(script, text, subject)
                alike = self._alike(script["w"], script["o"])
            except Exception:
                continue  # not every variant takes this shape, not every class transposes: then there is nothing to confuse
            if alike:
                script.note(f"o = {text}")
                self._same_with(script, label)

    def _relatives(self) -> list[tuple[str, str, Subject]]:
        found = [
            (f"one of {str(d).removeprefix('torch.')}", re.sub(r"\bhp\b", f"hp.to({d})", self.subject.make_text), self.subject)
            for d in self.subject.dtypes
            if d != self.dtype
        ]
        found += [(f"the variant {other.make_text}", other.make_text, other) for other in self.case.others.values()]
        return found + [
            ("its transpose", "w.t()", self.subject),
            ("a contiguous transpose", "w.t().contiguous()", self.subject),
        ]

    def _alike(self, w: torch.Tensor, o: torch.Tensor) -> bool:
        """Whether nothing that torch guards on tells two tensors apart but the context, and that is equal."""
        if type(w) is not type(o) or w.shape != o.shape or w.stride() != o.stride():
            return False
        a, b = oracle.inner_tensors(w), oracle.inner_tensors(o)
        metas = [[(n, t.shape, t.stride(), t.dtype) for n, t in x.items()] for x in (a, b)]
        return metas[0] == metas[1] and bool(_kept.context_of(w) == _kept.context_of(o))

    def _same_with(self, script: Script, label: str) -> None:
        script.run(
            "names = o.__tensor_flatten__()[0]\nr = type(w).__tensor_unflatten__({n: getattr(o, n) for n in names}, ctx, w.size(), w.stride())"
        )
        likely = "the context leaves out, or doesn't compare, an attribute that the two differ in."
        script.note("if not (o.__tensor_flatten__()[1] == ctx): raise SystemExit  # told apart")
        script.expect(
            "r.dtype == o.dtype",
            f"w and {label} have equal contexts {{ctx!r:.80}}; rebuilt with w's, the dtype is {{r.dtype}}, not {{o.dtype}}.",
            kind="context",
            likely=likely,
        )
        script.equal("r", "o", label=f"w and {label} have equal contexts; rebuilt with w's, it", likely=likely)
        if "inference" in self.case.found:
            script.run(f"x = {self.x()}.to(w.dtype)")
            self._same_results(script, [self.linear()], "r", "o", f"w and {label} have equal contexts; rebuilt with w's, {{}}")

    @check(
        needs=("wrapper",),
        depends=_RECOGNISED,
        why="an attribute that is lost in between makes compiled, sharded and loaded weights behave differently, without an error",
        fix=_FIX_FLATTEN,
    )
    def test_attributes_survive_rebuilding(self) -> None:
        """A rebuilt tensor behaves as the original: dequantize, linear and its gradient, views, casts and in-place operations."""
        self.need_shape(len(self.shape) == 2, "a linear")
        script = self.script(x=self.x())
        script.run(_kept.REBUILD.format(s="w"))
        linear = self.linear()
        gradient = f"torch.autograd.grad({self.linear('z')}.sum(), z)"
        script.ns["z"] = script["x"].clone().requires_grad_()
        self._same_results(script, [*_BATTERY, linear, gradient], "r", "w", "after rebuilding, {}")

    def _same_results(self, script: Script, expressions: list[str], got: str, want: str, label: str) -> None:
        """Each expression gives bit for bit the same on both; what the second refuses isn't asked of the first."""
        for expression in expressions:
            a, b = (re.sub(r"\bw\b", name, expression) for name in (got, want))
            try:
                torch.manual_seed(0)
                script.ns["expected"] = script.read(script.value(b, extend=False), b)
            except (Refused, CheckFailed):
                continue
            torch.manual_seed(0)
            if "z" in expression:
                script.note("z = x.clone().requires_grad_()")
            try:
                script.ns["result"] = script.read(script.value(a, extend=False), a)
            except Refused as refusal:
                script.fail(
                    f"{label.format(expression)} fails: {refusal}",
                    kind="behaviour",
                    likely="an attribute was lost.",
                    assertion=a,
                )
            found = oracle.compare(script["result"], script["expected"], None, label.format(expression))
            if found:
                script.fail(
                    found.message,
                    kind=found.kind,
                    likely="an attribute was lost.",
                    assertion=f"torch.testing.assert_close(plain({a}), plain({b}), rtol=0, atol=0)",
                )

    @check(
        needs=("wrapper",),
        axes="variant",
        depends=_RECOGNISED,
        why="a flag, tag or block size that a rebuilt tensor lacks changes what it does in compiled code, after loading and in FSDP",
        fix=_FIX_FLATTEN,
    )
    def test_attributes_are_rebuilt(self) -> None:
        """A rebuilt tensor has the public instance attributes of the original."""
        script = self.script()
        script.run(_kept.REBUILD.format(s="w"))
        for name, value in vars(script["w"]).items():
            if isinstance(value, torch.Tensor) or name.startswith("_"):
                continue  # caches and back-references may be made anew
            script.expect(f"hasattr(r, {name!r})", f"after rebuilding, the attribute {name!r} is missing.", kind="attribute")
            other = getattr(script["r"], name)
            if not _kept.same_context(value, other) and not re.search(r" at 0x", repr(value)):
                script.fail(
                    f"after rebuilding, the attribute {name!r} is {_kept.short(other)}, expected {_kept.short(value)}.",
                    kind="attribute",
                    assertion=f"assert r.{name} == w.{name}",
                )

    @check(
        level="should",
        needs=("wrapper", "compile"),
        axes="variant",
        depends=_RECOGNISED,
        why="the compile cache on disk is bypassed, or misses at every start: compiling anew takes minutes",
        fix="use tuples and primitives in the context, or define _stable_hash_for_caching",
        upstream="pytorch#189293, pytorch#193418",
    )
    def test_context_can_key_a_cache(self) -> None:
        """The context can be pickled, the same in every process (no sets, whose order changes); or the class has a stable hash."""
        script = self.script()
        script.run("ctx = w.__tensor_flatten__()[1]")
        if hasattr(script["w"], "_stable_hash_for_caching"):
            script.expect(
                "w._stable_hash_for_caching() == type(w)._stable_hash_for_caching(w.clone())",
                "_stable_hash_for_caching differs between w and its clone.",
                kind="hash",
            )
            return
        try:
            script.run("pickled = pickle.dumps(ctx)")
        except (Refused, CheckFailed) as error:
            script.fail(f"the flatten context can't be pickled: {error}", kind="pickle")
        path = _sets_in(script["ctx"], "ctx")
        if path:
            script.fail(
                f"the flatten context holds a set at {path}: its order differs from process to process.",
                kind="set",
                assertion=f"assert not isinstance({path}, set | frozenset)",
            )


def _execute_on(script: Script, text: str, subject: Subject) -> torch.Tensor:
    """A relative of ``w``: made by another variant's recipe, or from w."""
    ns = {**script.ns, **subject.namespace, "hp": script["hp"], "w": script["w"]}
    made: torch.Tensor = execute(text, ns)
    return made


def _sets_in(value: object, path: str) -> str:
    """The path of the first set in a nest of containers and attributes; empty if none."""
    if isinstance(value, set | frozenset):
        return path if len(value) > 1 else ""
    if isinstance(value, dict):
        items = [(f"{path}[{k!r}]", v) for k, v in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{path}[{i}]", v) for i, v in enumerate(value)]
    elif hasattr(value, "__dict__") and not callable(value) and not isinstance(value, type):
        items = [(f"{path}.{k}", v) for k, v in vars(value).items() if not k.startswith("__")]
    else:
        return ""
    return next((found for where, item in items if (found := _sets_in(item, where))), "")
