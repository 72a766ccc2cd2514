"""Copies and serialization keep everything, and are independent; copy_ and .data do what they say."""

from __future__ import annotations

import re

import torch

from subclass_testkit import inputs, oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks import _kept
from subclass_testkit.checks._cloning import CloneChecks
from subclass_testkit.checks._foreign import FOREIGN
from subclass_testkit.checks._parts import with_checks_of_its_parts
from subclass_testkit.checks._serialization import SerializationChecks
from subclass_testkit.outcome import Refused
from subclass_testkit.script import Script, execute
from subclass_testkit.subject import Subject

_PLAIN_SOURCES = {
    "plain": ("source", "source"),
    "keyword": ("source", "source"),
    "non-blocking": ("source", "source"),
    "non-contiguous": ("source.transpose(-1, -2).contiguous().transpose(-1, -2)", "source"),
    "float64": ("source.double()", "source"),
    "one row": ("source[..., :1, :]", "source[..., :1, :].expand_as(hp)"),
    "1-D": ("source.flatten(0, -2)[0]", "source.flatten(0, -2)[0].expand_as(hp)"),
    "0-D": ("torch.tensor(0.75)", "torch.full_like(hp, 0.75)"),
    "zeros": ("torch.zeros_like(hp)", "torch.zeros_like(hp)"),
    "requires grad": ("source.clone().requires_grad_()", "source"),
}
_DESTINATIONS = {
    "same dtype": "torch.zeros_like(hp)",
    "float64": "torch.zeros(hp.shape, dtype=torch.float64)",
    "bfloat16": "torch.zeros(hp.shape, dtype=torch.bfloat16)",
    "non-contiguous": "torch.zeros_like(hp.transpose(-1, -2).contiguous()).transpose(-1, -2)",
    "a part of a larger one": "torch.zeros(2 * hp.shape[0], *hp.shape[1:], dtype=hp.dtype)[hp.shape[0] :]",
    "broadcast": "torch.zeros(2, *hp.shape, dtype=hp.dtype)",
}
_WRONG_SHAPES = {
    "a row too many": "torch.cat([source, source[:1]])",
    "a column too few": "source[..., 1:]",
    "transposed": "source.transpose(-1, -2).contiguous()",
    "flat": "source.reshape(-1)",
    "a dimension too many": "source.repeat(2, *[1] * source.dim())",
    "of the class": "{make}",
}
_WHY_WRITE = "checkpoint loading, EMA and optimizers write by copy_; a wrong or lost write is a wrong model, without an error"
_FIX_WRITE = "quantize plain values anew, with new scales, into the existing inner tensors; take inner tensors over only from the same format"


@with_checks_of_its_parts
class CopyTests(SerializationChecks, CloneChecks):
    """Copies and serialization keep everything, and are independent."""

    group = "copies"

    # --- copy_

    @over(*_PLAIN_SOURCES)
    @check(why=_WHY_WRITE, fix=_FIX_WRITE)
    def test_copy_from_plain(self, kind: str) -> None:
        """w.copy_(plain) gives w the plain values, as near as its format can; the same object, dtype, shape and device."""
        script = self.script(source=self.source())
        text, full = _PLAIN_SOURCES[kind]
        script.run(f"full = {full}")
        arguments = {"keyword": f"other={text}", "non-blocking": f"{text}, non_blocking=True"}.get(kind, text)
        self._write(script, f"w.copy_({arguments})", "full")

    @check(why=_WHY_WRITE, fix=_FIX_WRITE)
    def test_copy_from_the_same_kind(self) -> None:
        """w.copy_(other of the class) gives w the other's values, and doesn't tie the two together."""
        script = self.script(source=self.source())
        script.run(f"other = {self._make('source')}\nfull = plain(other)")
        self._write(script, "w.copy_(other)", "full")
        script.equal("other", "full", label="after w.copy_(other), other")
        script.ns["third"] = self.subject.build(script["source"].clone())
        _kept.expect_independent(script, "w", "other", "third", "after w.copy_(other), w")

    @check(
        level="should",
        why="weights that are copied around change a little each time",
        fix="copy the inner tensors when class, context and their shapes are the same",
    )
    def test_copy_from_the_same_kind_is_exact(self) -> None:
        """w.copy_(other of the same format) takes over the values bit for bit."""
        script = self.script(source=self.source())
        script.run(f"other = {self._make('source')}\nwith torch.no_grad():\n    _ = w.copy_(other)")
        same = _kept.is_wrapper(script["w"]) and _alike(script["w"], script["other"])
        bound = (
            None
            if same or self.subject.stochastic
            else 4 * torch.finfo(self.dtype).eps * float(script["source"].double().abs().amax())
        )
        script.equal("w", "other", bound=bound, label="after w.copy_(other), w")

    @over("small into large", "large into small")
    @check(
        axes="variant",
        why=_WHY_WRITE,
        fix="where the other has an inner tensor that this one lacks (or the other way round), requantize, or refuse",
    )
    def test_copy_between_ranges(self, which: str) -> None:
        """copy_ between tensors of other ranges, whose optional inner tensors may differ, gives the values, or is refused."""
        small, large = self._make("hp * 0.01"), self._make("source")
        script = self.script(source=self.source())
        into, other = (large, small) if which == "small into large" else (small, large)
        script.run(f"w = {into}\nother = {other}\nfull = plain(other)")
        self._write(script, "w.copy_(other)", "full")

    @check(axes="dtype", why=_WHY_WRITE, fix=_FIX_WRITE)
    def test_copy_from_another_kind(self) -> None:
        """w.copy_(a tensor of another variant, dtype or class) gives w its values, or is refused."""
        refusals, done = [], 0
        for label, text, subject in self._kinds():
            script = self.script(source=self.source(), a=inputs.activation(self.shape, self.dtype, 11))
            try:
                ns = {**script.ns, **subject.namespace}
                script.run(FOREIGN) if "Foreign" in text else None
                script.ns["other"] = eval(text, {**ns, **script.ns}) if "Foreign" in text else eval(text, ns)  # noqa: S307  # the recipes
                script.ns["full"] = subject.plain(script["other"]) if "Foreign" not in text else script["a"]
            except Exception:
                continue  # not every variant takes this shape
            script.note("\n".join(line for line in subject.import_lines if line not in self.subject.import_lines))
            script.note(f"other = {text}\nfull = {'a' if 'Foreign' in text else 'plain(other)'}")
            if script["full"].shape != script["w"].shape:
                continue
            try:
                self._write(script, "w.copy_(other)", "full", label=f"w.copy_({label})")
                done += 1
            except Refused as refusal:
                refusals.append(refusal)
        if refusals and not done:
            raise refusals[0]

    def _kinds(self) -> list[tuple[str, str, Subject]]:
        kinds = [(f"variant {name}", self._make("source", other), other) for name, other in self.case.others.items()]
        kinds += [(f"of {d}", self._make(f"source.to({d})"), self.subject) for d in self.subject.dtypes if d != self.dtype]
        return [*kinds, ("an unknown subclass", "Foreign(a)", self.subject)]

    def _make(self, source: str, subject: Subject | None = None) -> str:
        """The recipe with another source: ``make(source)`` in the subject's own words."""
        return re.sub(r"\bhp\b", source if source.isidentifier() else f"({source})", (subject or self.subject).make_text)

    @over(
        *(
            (f"{write} under {mode}", write, full, f"torch.{mode}()")
            for mode in ("inference_mode", "enable_grad")
            for write, full in (("w.copy_(source)", "source"), ("w.mul_(-1)", "d * -1"), ("w.zero_()", "torch.zeros_like(d)"))
        )
    )
    @check(
        axes="variant",
        why="servers load and merge weights under inference_mode: a write that does nothing there keeps the old model, without an error",
        fix="handle in-place operators alike in every mode",
    )
    def test_write_in_mode(self, name: str, write: str, full: str, mode: str) -> None:
        """A write does the same under inference_mode, and where gradients are recorded, as under no_grad; or it is refused."""
        script = self.script(source=self.source())
        script.run(f"full = {full}")
        self._write(script, write, "full", f"{write} under {mode}", mode=mode)

    def _write(self, script: Script, operation: str, full: str, label: str = "", *, mode: str = "torch.no_grad()") -> None:
        """Run a write, which must leave in ``w`` the values of ``full`` as far as its format can hold them, or change nothing."""
        label = label or operation
        before = oracle.Snapshot.of(script["w"])
        bound = self._writing_bound(script, script[full])
        try:
            script.run(f"with {mode}:\n    r = {operation}")
        except Refused:
            change = before.changes(script["w"])
            if change:
                script.fail(f"{label} was refused, but only after a change: {change}.", kind="half-done")
            raise
        script.expect("r is w", f"{label} gives another object than w.", kind="identity")
        self._reports_as_before(script, before, label)
        script.ns["bound"] = bound
        likely = self._what_was_written(script, before, full)
        script.equal("w", f"{full}.to(w.dtype)", bound=bound, label=f"after {label}, w", likely=likely)

    def _what_was_written(self, script: Script, before: oracle.Snapshot, full: str) -> str:
        """What a wrong write may have done."""
        if not before.changes(script["w"]):
            return "nothing was written: the inner tensors are those of before."
        if script[full].isfinite().all() and not self.subject.plain(script["w"]).isfinite().all():
            return "some values are not finite: a scale of zero, or one that underflows in its dtype."
        return "the codes were replaced and the scales kept, or the other way round." if "quantized" in self.case.found else ""

    def _reports_as_before(self, script: Script, before: oracle.Snapshot, label: str) -> None:
        w = script["w"]
        now = (w.shape, w.dtype, w.stride())
        if now != (before.shape, before.dtype, before.stride):
            script.fail(
                f"{label} changed shape, dtype or strides of w from {list(before.shape)} {before.dtype} {before.stride} to {list(w.shape)} {w.dtype} {w.stride()}.",
                kind="mutated",
            )

    def _writing_bound(self, script: Script, full: torch.Tensor) -> float | None:
        """How far written values may be from the wanted ones: what `make` needs for them, twice that if it rounds at random.

        None (exact) for a class that isn't quantized. In-place operations may round at random without the subject being declared stochastic.
        """
        if "quantized" not in self.case.found:
            return None
        full = full.detach().to(self.dtype)
        error = (self.subject.plain(self.subject.build(full.contiguous())).double() - full.double()).abs().amax()
        standard = self.subject.plain(self.subject.build(script["source"])).double()
        relative = (standard - script["source"].double()).abs().amax() / script["source"].double().abs().amax()
        largest = full.double().abs().amax()
        return float(2.1 * torch.maximum(error, relative * largest) + 4 * torch.finfo(self.dtype).eps * largest)

    @over(*_DESTINATIONS)
    @check(
        why="dequantizing into a buffer is how weights are gathered and exported",
        fix="handle aten.copy_ with a plain destination: copy the dequantized values",
    )
    def test_copy_into_plain(self, kind: str) -> None:
        """plain.copy_(w) gives the plain tensor the values of w, in its own dtype; broadcast too."""
        script = self.script()
        script.run(f"p = {_DESTINATIONS[kind]}\nwith torch.no_grad():\n    _ = p.copy_(w)")
        # a quantized tensor may be dequantized straight into the destination's dtype, without the rounding to its own
        coarser = max(torch.finfo(self.dtype).eps, torch.finfo(script["p"].dtype).eps)
        want = script["d"].to(script["p"].dtype).expand_as(script["p"])
        bound = want.double().abs() * coarser if "quantized" in self.case.found else None
        script.equal("p", "d.to(p.dtype).expand_as(p)", bound=bound, label=f"after p.copy_(w), p ({kind})")

    @over(*_WRONG_SHAPES)
    @check(
        axes="variant",
        why="a checkpoint of another size must not load",
        fix="compare the shapes before copying inner tensors, and raise with both",
    )
    def test_copy_of_a_wrong_shape(self, kind: str) -> None:
        """copy_ from a tensor of a shape that doesn't broadcast raises, and changes nothing."""
        self._wrong_shape(kind)

    @over(*_WRONG_SHAPES)
    @check(
        level="should",
        axes="variant",
        depends=("copies/copy-from-plain",),
        why="without the sizes people can't tell which weight doesn't fit",
        fix="raise with both shapes in the text",
    )
    def test_wrong_shape_error_names_the_sizes(self, kind: str) -> None:
        """The error of copy_ from a wrong shape names the two sizes that don't fit."""
        script, error = self._wrong_shape(kind)
        if oracle.judge_exception(error, self.subject.refusals) == "refused":
            return  # it takes no such source, of whatever shape
        have, given = script["w"].shape, script["wrong"].shape
        numbers = {int(n) for n in re.findall(r"\d+", str(error))}
        differing = {n for a, b in zip(have, given, strict=False) for n in (a, b) if a != b}
        if not numbers & (differing | set(have) | set(given)):
            script.fail(
                f"the error of copy_ of {list(given)} into {list(have)} names no size: {oracle.describe(error)}", kind="message"
            )

    def _wrong_shape(self, kind: str) -> tuple[Script, Exception]:
        self.need_shape(len(self.shape) > 1 and self.shape[-1] != self.shape[-2], "a matrix that isn't square")
        script = self.script(source=self.source())
        template = _WRONG_SHAPES[kind].format(make=self._make("torch.cat([source, source])"))
        script.run(f"wrong = {template}")
        before = oracle.Snapshot.of(script["w"])
        error = self._error_of(script, "with torch.no_grad():\n    _ = w.copy_(wrong)")
        if error is None:
            shapes = f"{list(script['wrong'].shape)} into {list(script['w'].shape)}"
            script.fail(f"copy_ of {shapes} raises nothing.", kind="no-error", assertion="raise AssertionError('no error')")
        change = before.changes(script["w"])
        if change:
            script.fail(f"copy_ of a wrong shape raised, but only after a change: {change}.", kind="half-done")
        assert error is not None
        return script, error

    def _error_of(self, script: Script, source: str) -> Exception | None:
        """What running ``source`` raises, of whatever type."""
        script.note(source)
        try:
            execute(source, script.ns)
        except Exception as error:
            return error
        return None

    # --- .data, swap, set_, resize_

    @check(axes="variant", why="old training code reads p.data", fix="detach of every inner tensor, sharing memory")
    def test_data_reads(self) -> None:
        """w.data has the class, the values and the memory of w, and requires no gradient."""
        script = self.script()
        script.run("v = w.data")
        script.expect("not v.requires_grad", "w.data requires grad.", kind="requires_grad")
        script.run("v.requires_grad_(w.requires_grad)" if script["w"].requires_grad else "_ = v.shape")
        _kept.expect_kept(script, "v", "w", label="w.data", klass="wrapper" in self.case.found)

    @over("w", "nn.Parameter(w)", "nn.Parameter(w, False)")
    @check(
        level="should",
        axes="variant",
        why="code that swaps weights by p.data = new keeps the old ones, without an error",
        fix="refuse torch.Tensor.data.__set__ in __torch_function__, or take over the inner tensors too",
    )
    def test_data_assignment(self, target: str) -> None:
        """After t.data = other, t has the values of other; or the assignment raises."""
        script = self.script(source=self.source())
        script.run(f"t = {target}\nother = {self._make('source')}")
        script.run("t.data = other")
        old = script.value("torch.equal(plain(t), d)", extend=False)
        likely = (
            "torch itself replaces the outer metadata alone."
            if old
            else "some inner tensors are those of other, some the old ones."
        )
        script.expect(
            "torch.equal(plain(t), plain(other))",
            f"after t.data = other, t has {'its old values' if old else 'neither its old values nor those of other'}.",
            kind="old values" if old else "mixed values",
            likely=likely,
        )
        script.expect(
            "t.shape == other.shape and t.dtype == other.dtype", "after t.data = other, t is {t.shape} {t.dtype}.", kind="shape"
        )

    @check(
        axes="variant",
        why="Module.to and load_state_dict swap tensors where torch is told to",
        fix="keep all state in __dict__ and inner tensors; no __slots__, no registries keyed by id",
    )
    def test_swap_tensors(self) -> None:
        """torch.utils.swap_tensors exchanges two tensors: each then has the other's values and context."""
        script = self.script(source=self.source())
        script.run(f"other = {self._make('source')}\nwanted = plain(other).clone()")
        script.run("torch.utils.swap_tensors(w, other)")
        script.equal("w", "wanted", label="after swap_tensors(w, other), w")
        script.equal("other", "d", label="after swap_tensors(w, other), other")

    @over("w.resize_(2, 2)", "w.set_(source)", "w.resize_(w.shape)", "w.resize_as_(source[:2])")
    @check(
        axes="one",
        why="these rebind memory that a wrapper doesn't have",
        fix="raise NotImplementedError for aten.set_ and aten.resize_",
    )
    def test_resize_and_set(self, operation: str) -> None:
        """resize_ and set_ do on the values what they say, or are refused."""
        self.need_shape(len(self.shape) == 2, "a matrix")
        self.agree(operation, mutates=True, source=self.source())


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same class, context and shapes of inner tensors: values can be taken over as they are."""
    x, y = oracle.inner_tensors(a), oracle.inner_tensors(b)
    metas = [[(n, t.shape, t.dtype) for n, t in inner.items()] for inner in (x, y)]
    return type(a) is type(b) and metas[0] == metas[1] and _kept.same_context(_kept.context_of(a), _kept.context_of(b))
