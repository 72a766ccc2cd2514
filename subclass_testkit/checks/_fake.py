"""What the checks on fake tensors share."""

from __future__ import annotations

from subclass_testkit import oracle
from subclass_testkit.checks._compilation_cases import FAKE_ERRORS
from subclass_testkit.checks._traced import TracedGroup, same_context
from subclass_testkit.outcome import CheckFailed, Finding, Refused
from subclass_testkit.script import Script


class FakeGroup(TracedGroup):
    """Runs code on fake tensors, and compares what comes out with what real tensors give."""

    def fake_copy(self, script: Script, text: str) -> None:
        """Make ``got``, the fake copy of ``want``. An error here ends every compile and export, so that it is a failure."""
        try:
            self.traced(script, "got = FakeTensorMode().from_tensor(want)", f"the fake copy of {text}")
        except Refused as refusal:
            if not refusal.odd:
                raise
            message = f"a fake copy of {text} can't be made: {oracle.describe(refusal.__cause__ or refusal)}"
            likely = "__tensor_unflatten__ doesn't give what outer_size, outer_stride and the inner tensors say."
            raise CheckFailed(Finding(refusal.kind, message, likely, refusal.reproduction)) from None

    def on_fake(self, script: Script, code: str) -> None:
        try:
            self.traced(script, "with mode, torch.no_grad():\n    got = run(fw, fx, fb, fsource)", code)
        except Refused as refusal:
            text = oracle.describe(refusal.__cause__) if refusal.__cause__ else str(refusal)
            hint = next((hint for pattern, hint in FAKE_ERRORS.items() if pattern in text), "")
            if not hint:
                raise
            raise CheckFailed(
                Finding(
                    refusal.kind, f"{code} works on real tensors, and on fake ones raises {text}", hint, refusal.reproduction
                )
            ) from None

    def same_metadata(self, script: Script, label: str) -> None:
        """``got``, which is fake, has the metadata of ``want``; and so have their inner tensors."""
        name = self.subject.cls.__name__
        script.expect(
            f"isinstance(got, {name}) == isinstance(want, {name})",
            f"{label}: {{type(got).__name__}}, but real ones give a {{type(want).__name__}}.",
            kind="class",
        )
        for what in ("shape", "dtype", "device", "stride()", "storage_offset()"):
            slug = what.removesuffix("()")
            if slug in ("stride", "storage_offset") and (script["want"].numel() < 2 or script["want"].device.type == "meta"):
                continue
            script.expect(
                f"got.{what} == want.{what}", f"{label}: {slug} {{got.{what}}}, but real ones give {{want.{what}}}.", kind=slug
            )
        if not isinstance(script["want"], self.subject.cls) or not hasattr(script["want"], "__tensor_flatten__"):
            return
        if not same_context(script["got"], script["want"]):
            script.expect(
                "got.__tensor_flatten__() == want.__tensor_flatten__()",
                f"{label}: flatten context {{got.__tensor_flatten__()}}, but real ones give {{want.__tensor_flatten__()}}.",
                kind="context",
            )
        for inner in oracle.inner_tensors(script["want"]):
            for what in ("shape", "dtype"):
                script.expect(
                    f"got.{inner}.{what} == want.{inner}.{what}",
                    f"{label}: inner tensor {inner!r} has {what} {{got.{inner}.{what}}}, but {{want.{inner}.{what}}} for real ones.",
                    kind=f"inner-{what}",
                )
