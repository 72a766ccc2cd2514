"""Views: every slice, transpose and reshape is that of the values, shares memory, and writes only where it should."""

from __future__ import annotations

import re

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from subclass_testkit import oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks._parts import with_checks_of_its_parts
from subclass_testkit.checks._view_values import FIX_SLICE, WHY_VALUES, ViewValueChecks
from subclass_testkit.outcome import CheckFailed, Finding, NotClaimed, Refused
from subclass_testkit.script import Script, execute

_WINDOWS = (
    "w[8:16]",
    "w[3]",
    "w[:, 8:16]",
    "w[8:16, 4:12]",
    "w.t()",
    "w.t()[8:16]",
    "w.narrow(0, 16, 8)",
    "w.chunk(2)[1]",
    "w.split(8)[1]",
    "w[::2]",
    "w.view(-1)",
    "w.detach()",
    "w[8:16].detach()",
    "w[:]",
    "w.unsqueeze(0)",
    "w.unbind()[2]",
    "w.transpose(0, 1)",
    "w[:, 2]",
    "w.select(-1, 5)",
    "w[:, ::2]",
    "w.t()[2]",
)

_UPDATED = ("w[8:16]", "w.t()", "w[:, 8:16]", "w.detach()")
_UPDATES = ("v.add_(torch.full_like(plain(v), 3.0))", "v.neg_()")


@with_checks_of_its_parts
class SlicingTests(ViewValueChecks):
    """Views of a subclass."""

    group = "slicing"

    @over(*_WINDOWS)
    @check(
        why="a write into a view that doesn't reach the base is lost without an error (weight loading, EMA, tensor parallel)",
        fix="make the view's inner tensors views of the base's, or refuse the write",
    )
    def test_write_through_view_reaches_the_base(self, window: str) -> None:
        """A write into a view is seen in the base, in exactly the view's elements; or the write is refused with nothing changed."""
        self.two_dim()
        script = self.script(source=self.hp(seed=3))
        script.run(f"before = plain(w).clone()\nv = {window}")
        changed = script["before"].clone()
        self._write(script, window)
        view = f"plain({window})"
        script.run("after = plain(w)")
        if not script.value("isinstance(v, type(w))", extend=False):
            script.expect(
                "torch.equal(plain(v), " + view + ")",
                f"v = {window} is a plain copy: a write into it is lost, without an error.",
                kind="lost-write",
                likely="the view decays to a new plain tensor, which shares nothing with the base.",
            )
            return
        script.expect(
            f"torch.equal(plain(v), {view})",
            f"after a write into v = {window}, v and the same view of the base differ.",
            kind="lost-write",
            likely="the view holds a copy of the data.",
        )
        mask = self._mask(window, changed)
        self._written(script, window)
        outside = script["after"][~mask]
        if not oracle.same_bits(outside, script["before"][~mask]):
            n = int((outside != script["before"][~mask]).sum())
            script.fail(
                f"a write into v = {window} changed {n} elements of the base outside of it.",
                kind="clobbered",
                likely="the write replaced a scale that the view shares with elements outside of it.",
                assertion="inside = torch.zeros_like(before, dtype=torch.bool)\n"
                + f"_ = {window.replace('w', 'inside', 1)}.fill_(True)\n"
                + "assert torch.equal(after[~inside], before[~inside])",
            )

    def _written(self, script: Script, window: str) -> None:
        """The window shows the written values, to within a requantization of the base."""
        wanted = script["before"].clone()
        execute(f"{_on_plain(window)}.copy_({window.replace('w', 'source', 1)} * 0.75)", {**script.ns, "d": wanted})
        # with new scales, or with the old ones
        bounds = [torch.as_tensor(self.requantization(script, t), dtype=torch.float64) for t in (wanted, script["before"])]
        rounding = wanted.double().abs() * torch.finfo(wanted.dtype).eps * 4
        slack = (bounds[0] + bounds[1]).expand(wanted.shape) + rounding
        written = window.replace("w", "source", 1)
        script.equal(
            "v",
            f"{written} * 0.75",
            label=f"v = {window} after v.copy_({written} * 0.75)",
            bound=execute(_on_plain(window), {"d": slack, "torch": torch}),
            likely="the write quantizes along another dimension than the one along which the view reads its scales.",
        )

    def _write(self, script: Script, window: str) -> None:
        try:
            script.run(f"with torch.no_grad():\n    v.copy_({window.replace('w', 'source', 1)} * 0.75)")
        except Refused:
            if not oracle.same_bits(script.subject.plain(script["w"]), script["before"]):
                raise CheckFailed(
                    Finding(
                        "half-done",
                        f"the write into {window} was refused, but after it had changed the base.",
                        reproduction=script.text(),
                    )
                ) from None
            raise

    def _mask(self, window: str, like: torch.Tensor) -> torch.Tensor:
        """True at the base's elements that the window covers."""
        mask = torch.zeros(like.shape, dtype=torch.bool)
        eval(window, {"w": mask, "torch": torch}).fill_(True)  # noqa: S307  # our own text
        return mask

    @over(*((f"v = {window}; {update}", window, update) for window in _UPDATED for update in _UPDATES))
    @check(
        why="a step on a parameter that is a view (a tied head, a transposed weight) is lost without an error",
        fix="write through the view's own inner tensors (a .contiguous() of them is a copy), or refuse the update",
    )
    def test_update_of_a_view(self, name: str, window: str, update: str) -> None:
        """An in-place update of a view gives the updated values, to within a requantization, in the view and in the base; or is refused."""
        self.two_dim()
        script = self.script()
        script.run(f"v = {window}")
        if not script.value("isinstance(v, type(w))", extend=False):
            return  # the check of writes through views is about these
        # The oracle updates the same view of the plain base: an error bound holds for the base's own rows and groups.
        plain_update = re.sub(r"\bv\b", _on_plain(window), update)
        base = script["d"].clone()
        execute(plain_update, {**script.ns, "d": base})
        bound = self.requantization(script, base)
        if isinstance(bound, torch.Tensor):
            bound = execute(_on_plain(window), {"d": bound})
        script.run(f"with torch.no_grad(): _ = {update}")
        script.run(f"_ = {plain_update}\nwanted = {_on_plain(window)}")
        likely = "the update went into a copy of the inner tensors."
        script.equal("plain(v)", "wanted", label=f"v = {window} after {update}", bound=bound, likely=likely)
        script.equal(f"plain({window})", "plain(v)", label=f"{window} of the base after {update}", likely=likely)

    @over(*_WINDOWS)
    @check(
        why="code that holds a view (a tied weight, a fused projection) must see updates of the base",
        fix="make the view's inner tensors views of the base's",
    )
    def test_write_into_base_reaches_the_view(self, window: str) -> None:
        """A view taken before a write into the base shows the written values; or the write is refused."""
        self.two_dim()
        script = self.script(source=self.hp(seed=3))
        script.run(f"v = {window}\nwith torch.no_grad():\n    w.copy_(source)")
        if script.value("isinstance(v, type(w))", extend=False):
            script.equal(
                "plain(v)",
                f"plain({window})",
                label=f"v = {window}, taken before w.copy_(...),",
                likely="copy_ replaced the base's inner tensors instead of writing into them, or the view holds copies.",
            )

    @over("w[8:16]", "w.t()", "w.detach()", "w.view(w.shape)", "w[3]", "w[:, 8:16]", "w.chunk(2)[0]", "w.unsqueeze(0)")
    @check(
        level="should",
        why="code that checks isinstance, or dispatches on the class, silently takes the plain path",
        fix="return an instance of the class from view handlers",
    )
    def test_view_keeps_the_class(self, expression: str) -> None:
        """A view of the subclass is of the subclass."""
        if self.decays_by_design:
            raise NotClaimed("the class switches __torch_function__ off: what comes of it is plain")
        self.two_dim()
        script = self.script()
        script.run(f"v = {expression}")
        script.expect("isinstance(v, type(w))", f"{expression} is a plain {{type(v).__name__}}.", kind="class")

    @over(
        "w[8:16]",
        "w[::2]",
        "w[:, 8:16]",
        "w.t()",
        "w.t()[8:16]",
        "w[8:16].t()",
        "w.transpose(0, 1)",
        "w.unsqueeze(0)",
        "w.view(-1)",
        "w.expand(2, *w.shape)",
        "w[3]",
        "w[:, 5]",
    )
    @check(
        axes="one",
        why="compiled code and kernels compute addresses from the reported strides",
        fix="pass the strides of the data (after the view) to _make_wrapper_subclass",
    )
    def test_view_reports_true_strides(self, expression: str) -> None:
        """A view that shares its base's memory reports the strides that the view of a plain tensor has."""
        self.two_dim()
        script = self.script()
        script.run(f"v = {expression}")
        if script.value("isinstance(v, type(w)) and v.numel() > 1", extend=False) and oracle.shares_memory(
            script["w"], script["v"]
        ):
            script.expect(
                f"v.stride() == ({_on_plain(expression)}).stride()",
                f"{expression} reports stride {{v.stride()}}, a plain tensor's is {{({_on_plain(expression)}).stride()}}.",
                kind="stride",
                likely="_make_wrapper_subclass was not given strides, so it assumed a contiguous tensor.",
            )

    @over(
        "w[8:16]",
        "w[3]",
        "w.t()",
        "w.chunk(2)",
        "w.chunk(3)",
        "w.split(8)",
        "w.unbind()",
        "w.view(-1)",
        "w.reshape(-1)",
        "w.narrow(0, 8, 8)",
        "w[:, 8:16]",
        "w.unsqueeze(0)",
        "w.expand(2, *w.shape)",
        "w.detach()",
        "w.permute(1, 0)",
    )
    @check(
        why="an operation that edits its input (a block size, a shape) breaks every later use of it",
        fix="build new attributes for the result; don't assign to self",
    )
    def test_view_leaves_its_input_alone(self, expression: str) -> None:
        """A view operation changes neither the values nor the flatten context of its input, also at the second call."""
        self.two_dim()
        script = self.script()
        before = oracle.Snapshot.of(script["w"])
        script.run(f"_ = {expression}")
        script.run(f"_ = {expression}")
        change = before.changes(script["w"])
        if change:
            script.fail(
                f"{expression} changed its input: {change}.",
                kind="mutated",
                assertion="assert repr(w.__tensor_flatten__()[1]) == before, 'the context changed'",
            )

    @over("w[8:16]", "w.t()", "w[:, 8:16]", "w[3]", "w.chunk(2)[1]", "w.detach()")
    @check(why="evaluation runs without grad", fix="don't depend on grad mode in view handlers")
    def test_view_under_no_grad(self, expression: str) -> None:
        """Views are the same under no_grad."""
        self.two_dim()
        self.agree(f"with torch.no_grad():\n    v = {expression}\nv")

    @over("w[8:16]", "w.t()", "w[:, 8:16]", "w[3]", "w.chunk(2)[1]", "w.view(-1)")
    @check(
        why="inference servers run under inference_mode, where composite operations reach the class undecomposed",
        fix="handle the composite operations (chunk, reshape, matmul) too",
        upstream="pytorch#164872, pytorch#170419",
    )
    def test_view_under_inference_mode(self, expression: str) -> None:
        """Views are the same under inference_mode, as far as torch allows."""
        self.two_dim()
        self.agree(f"with torch.inference_mode():\n    v = {expression}\nv")

    @check(axes="each", timeout=60, why=WHY_VALUES, fix=FIX_SLICE)
    def test_random_index(self) -> None:
        """Any index expression gives the values at that index, or is refused."""
        self.two_dim()
        rows, columns = self.shape
        texts = _index_texts(rows, columns)
        refusals: list[Refused] = []
        good = 0

        @settings(
            max_examples=25,
            derandomize=self.case.seed == 0,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )
        @given(texts)
        def one(text: str) -> None:
            nonlocal good
            try:
                self.agree(text)
                good += 1
            except Refused as refusal:
                refusals.append(refusal)

        one()
        if not good and refusals:
            raise refusals[0]


def _on_plain(expression: str) -> str:
    return re.sub(r"\bw\b", "d", expression)


def _index_texts(rows: int, columns: int) -> st.SearchStrategy[str]:
    """``w[index]`` or ``w[index, index]``, of slices, integers, ``None`` and ``...``."""

    def bound(n: int) -> st.SearchStrategy[str]:
        return st.one_of(st.just(""), st.integers(-n - 2, n + 2).map(str))

    def one(n: int) -> st.SearchStrategy[str]:
        slices = st.tuples(bound(n), bound(n), st.sampled_from(["", ":2", ":3"])).map(lambda p: f"{p[0]}:{p[1]}{p[2]}")
        return st.one_of(slices, st.integers(-n, n - 1).map(str))

    pair = st.tuples(one(rows), one(columns)).map(lambda p: f"w[{p[0]}, {p[1]}]")
    return st.one_of(one(rows).map(lambda i: f"w[{i}]"), pair, one(columns).map(lambda i: f"w[..., {i}]"))
