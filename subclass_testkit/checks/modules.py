"""Modules, state dicts, parameters: the subclass lives in nn.Module as a plain weight does."""

from __future__ import annotations

from typing import Any

import torch

from subclass_testkit import oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks._parts import with_checks_of_its_parts
from subclass_testkit.checks._serving import ServingChecks
from subclass_testkit.checks._writes import Watched
from subclass_testkit.outcome import CheckSkipped, Refused
from subclass_testkit.script import Script

_FIX_DETACH = "return the class from aten.detach, sharing the inner tensors: nn.Parameter and state_dict are made of it"
_FIX_COPY = "implement copy_ from the same class (inner tensors into inner tensors) and from plain tensors (quantize anew), or raise NotImplementedError"
_WHY_LOAD = "load_state_dict reports that all keys match, and the model runs with its old weights"

_LOADS = tuple(
    (f"{source} into {target}, {mode}", source, target, mode)
    for source in ("subclass", "plain")
    for target in ("subclass", "plain")
    if (source, target) != ("plain", "plain")
    for mode in ("copy", "copy, not strict", "swap", "assign", "assign and swap")
)
_OPTIONS = {
    "copy": "",
    "copy, not strict": ", strict=False",
    "swap": "",
    "assign": ", assign=True",
    "assign and swap": ", assign=True",
}


@with_checks_of_its_parts
class ModuleTests(ServingChecks):
    """Modules, state dicts, parameters."""

    group = "modules"
    of_parameters = True

    # --- parameters and buffers

    @over(
        ("Parameter", "m.t = nn.Parameter(w)", True),
        ("frozen Parameter", "m.t = nn.Parameter(w, requires_grad=False)", True),
        ("register_parameter", "m.register_parameter('t', nn.Parameter(w, False))", True),
        ("replaced parameter", "m.t = nn.Parameter(torch.zeros_like(hp)); m.t = nn.Parameter(w, False)", True),
        ("Parameter of a Parameter", "m.t = nn.Parameter(nn.Parameter(w, False), False)", True),
        ("Buffer", "m.t = nn.Buffer(w)", False),
        ("register_buffer", "m.register_buffer('t', w)", False),
        ("assigned to a buffer", "m.register_buffer('t', None); m.t = w", False),
    )
    @check(
        why="a weight that loses its class in a module isn't quantized any more, or breaks at the first use", fix=_FIX_DETACH
    )
    def test_keeps_the_class(self, name: str, source: str, parameter: bool) -> None:
        """As a Parameter or Buffer the tensor keeps its class and values, and is registered once."""
        if self.subject.cls is torch.nn.Parameter and not parameter:
            raise CheckSkipped("an nn.Parameter is registered as a parameter, not as a buffer")
        s = self.script()
        s.run(f"m = nn.Module()\n{source}")
        kind = "parameter" if parameter else "buffer"
        s.expect("isinstance(m.t, type(w))", f"as a {name}, the tensor is a {{type(m.t).__name__}}.", kind="class")
        if parameter:
            s.expect("isinstance(m.t, nn.Parameter)", f"as a {name}, the tensor is no nn.Parameter.", kind="parameter")
            frozen = "True" if name == "Parameter" else "False"
            s.expect(
                f"m.t.requires_grad is {frozen}", f"requires_grad of a {name} is {{m.t.requires_grad}}.", kind="requires_grad"
            )
        listed = f"[k for k, t in m.named_{kind}s() if t is m.t]"
        s.expect(
            f"{listed} == ['t'] == [k for k, _ in m.named_{kind}s()]",
            f"named_{kind}s() lists it as {{{listed}}}.",
            kind="registered",
        )
        s.equal("m.t", "d", label=f"the values as a {name}")

    @over(("parameter", "m.t = nn.Parameter(w, False)"), ("buffer", "m.register_buffer('t', w)"))
    @check(why="checkpoints and weight synchronisation go through state_dict", fix=_FIX_DETACH)
    def test_state_dict_keeps_the_class(self, name: str, source: str) -> None:
        """state_dict has the tensor once, detached, of its class, with its values; keep_vars=True gives the very object."""
        s = self.script()
        s.run(f"m = nn.Module()\n{source}\nsd = m.state_dict()")
        s.expect("list(sd) == ['t']", "state_dict has the keys {list(sd)}.", kind="keys")
        kind = "torch.Tensor" if self.subject.cls is torch.nn.Parameter else "type(w)"
        s.expect(f"isinstance(sd['t'], {kind})", "in state_dict it is a {type(sd['t']).__name__}.", kind="class")
        s.expect(
            "not sd['t'].requires_grad and sd['t'].grad_fn is None", "the tensor in state_dict isn't detached.", kind="grad"
        )
        s.equal("sd['t']", "d", label="the values in state_dict")
        s.expect(
            "m.state_dict(keep_vars=True)['t'] is m.t", "state_dict(keep_vars=True) holds another object.", kind="identity"
        )

    # --- load_state_dict

    @over(*_LOADS)
    @check(why=_WHY_LOAD, fix=_FIX_COPY)
    def test_load_state_dict(self, name: str, source: str, target: str, mode: str) -> None:
        """load_state_dict really loads: afterwards the values equal the saved ones, class and Parameter are as promised; or it refuses, with nothing changed."""
        s = self.layer()
        self.second_subject(s)
        if target == "plain":
            s.run("m.weight = nn.Parameter(torch.zeros_like(hp), False)")
        s.run(f"sd = dict(weight={'v' if source == 'subclass' else 'source'}, bias=m.bias.detach() + 1); old = m.weight")
        before = self.watch(s, "old")
        result = self._load(s, mode, before)
        if list(result.missing_keys) or list(result.unexpected_keys):
            s.fail("load_state_dict reports missing or unexpected keys: {result}.", kind="keys")
        self._loaded(s, before, source, target, mode, name)
        self.forward(s, "m", "after load_state_dict")

    def _load(self, s: Script, mode: str, before: Watched) -> Any:
        load = f"result = m.load_state_dict(sd{_OPTIONS[mode]})"
        if "swap" not in mode:
            return self._load_or_explain(s, load, mode, before)
        swap = "torch.__future__.set_swap_module_params_on_conversion({})"
        s.run(swap.format(True))
        try:
            return self._load_or_explain(s, load, mode, before)
        finally:
            s.run(swap.format(False))

    def _load_or_explain(self, s: Script, load: str, mode: str, before: Watched) -> Any:
        """Run the load; torch turns every error into a RuntimeError, so the operation below tells a refusal from an accident."""
        try:
            self.attempt(s, load, before)
        except Refused as refusal:
            if (
                "While copying" not in str(refusal)
                and "While swapping" not in str(refusal)
                and "Error(s) in loading" not in str(refusal)
            ):
                raise
            direct = "m.weight.module_load(sd['weight'])" if "swap" in mode else "m.weight.copy_(sd['weight'])"
            s.run(f"with torch.no_grad(): {direct}")
            raise
        return s["result"]

    def _loaded(self, s: Script, before: Watched, source: str, target: str, mode: str, name: str) -> None:
        """What m.weight has to be afterwards."""
        s.expect("isinstance(m.weight, nn.Parameter)", f"after loading {name}, the weight is no Parameter.", kind="parameter")
        if mode.startswith("assign"):
            s.expect(
                f"isinstance(m.weight, type({'v' if source == 'subclass' else 'source'}))",
                f"after loading {name}, the weight is a {{type(m.weight).__name__}}.",
                kind="class",
            )
            s.equal("m.weight", "source", label=f"the weight after loading {name}")
            return
        s.expect("m.weight is old", f"loading {name} put another Parameter object into the module.", kind="identity")
        s.expect("not m.weight.requires_grad", f"loading {name} changed requires_grad.", kind="requires_grad")
        if mode != "swap":
            kind = "w" if target == "subclass" else "hp"
            s.expect(
                f"isinstance(m.weight, type({kind}))",
                f"loading {name} changed the weight's class to {{type(m.weight).__name__}}.",
                kind="class",
            )
        self.written(s, before, "source", f"the weight after loading {name}")

    @over("nn.Linear", "nn.Linear, Parameter in the state_dict")
    @check(why="large models are built on meta and get their weights by assign=True", fix=_FIX_DETACH)
    def test_meta_init_and_assign(self, name: str) -> None:
        """A module built on meta, loaded with assign=True, has the tensor itself: its class, values and device."""
        self.only_matrices()
        s = self.script()
        n, k = self.shape
        weight = "nn.Parameter(w, False)" if "Parameter" in name else "w"
        s.run(f"with torch.device('meta'): m = nn.Linear({k}, {n}, dtype=hp.dtype)")
        s.run(f"result = m.requires_grad_(False).load_state_dict(dict(weight={weight}, bias=hp[:, 0].clone()), assign=True)")
        s.expect(
            "isinstance(m.weight, type(w)) and isinstance(m.weight, nn.Parameter)",
            "the assigned weight is a {type(m.weight).__name__}.",
            kind="class",
        )
        s.expect("m.weight.device == hp.device", "the assigned weight is on {m.weight.device}.", kind="device")
        s.equal("m.weight", "d", label="the assigned weight")
        self.forward(s, "m", "after assign=True")

    # --- copies of modules, functional use

    @check(
        why="EMA, ensembles and fine-tuning copy modules",
        fix="let clone and deepcopy copy every inner tensor, and keep the Parameter's flags",
    )
    def test_deepcopy_of_a_module(self) -> None:
        """A deep copy of a module has the weight's class, flags and values, in memory of its own."""
        s = self.layer()
        s.run("m2 = copy.deepcopy(m)")
        s.expect(
            "m2.weight is not m.weight and isinstance(m2.weight, type(w))",
            "the copy's weight is a {type(m2.weight).__name__}.",
            kind="class",
        )
        s.expect(
            "isinstance(m2.weight, nn.Parameter) and not m2.weight.requires_grad",
            "the copy's weight is no frozen Parameter.",
            kind="parameter",
        )
        s.equal("m2.weight", "d", label="the weight of the copy")
        shared = _shared(s["m"].weight, s["m2"].weight)
        if shared:
            s.fail(
                f"the copy shares memory with the original: {shared}.",
                kind="shared",
                assertion=f"assert m.weight.{shared.split(', ')[0]}.data_ptr() != m2.weight.{shared.split(', ')[0]}.data_ptr()",
                likely="deepcopy passes that inner tensor through.",
            )
        self.forward(s, "m2", "of the copy")

    @over(("plain module", "torch.zeros_like(hp)"), ("module with another subject", "{made}"))
    @check(
        needs=("inference",),
        why="per-sample gradients, ensembles and weight swapping call modules functionally",
        fix=_FIX_DETACH,
    )
    def test_functional_call(self, name: str, own: str) -> None:
        """functional_call with the tensor computes with it, not with the module's own weight."""
        self.nn_linear()
        module = self.layer_lines(weight=f"nn.Parameter({own.format(made=self.made('hp2'))}, False)")
        self.agree(
            "torch.func.functional_call(m, dict(weight=w, bias=b), (x,))",
            setup=f"hp2 = {self.second()}\n{module}; _ = m(x)",
            tolerance=self.linear_tolerance(),
            x=self.x(),
            b=self.bias(),
            suspects={"the result with the module's own weight": "F.linear(x, hp2, b)"},
        )

    @over(("identity", "return t", "d"), ("dequantizing", "return to_plain(t) * 2", "d * 2"))
    @check(why="weight tying, masking and quantization-aware training are parametrizations", fix=_FIX_DETACH)
    def test_parametrize(self, name: str, body: str, want: str) -> None:
        """Under a parametrization the original keeps class and values, the module shows the parametrized values, and removing it gives the weight back."""
        s = self.layer()
        s.run(f"class P(nn.Module):\n    def forward(self, t): {body}")
        s.run(
            "from torch.nn.utils import parametrize\n_ = parametrize.register_parametrization(m, 'weight', P())\noriginal = m.parametrizations.weight.original"
        )
        s.expect(
            "isinstance(original, type(w)) and isinstance(original, nn.Parameter)",
            "the original of the parametrization is a {type(original).__name__}.",
            kind="class",
        )
        s.equal("original", "d", label="the parametrization's original")
        s.equal("m.weight", want, label=f"the weight under a {name} parametrization")
        self.forward(s, "m", "under a parametrization")
        s.run("_ = parametrize.remove_parametrizations(m, 'weight', leave_parametrized=False)")
        s.expect(
            "isinstance(m.weight, type(w))",
            "after removing the parametrization the weight is a {type(m.weight).__name__}.",
            kind="class",
        )
        s.equal("m.weight", "d", label="the weight after removing the parametrization")

    @check(
        axes="one",
        level="should",
        why="merging a parametrization into the weight silently does nothing",
        fix="refuse set_ and data = of other classes, with the remedy in the text",
    )
    def test_parametrized_weight_stays(self) -> None:
        """remove_parametrizations(leave_parametrized=True) leaves the parametrized values, or is refused."""
        s = self.layer()
        s.run(
            "class P(nn.Module):\n    def forward(self, t): return to_plain(t) * 2\nfrom torch.nn.utils import parametrize\n_ = parametrize.register_parametrization(m, 'weight', P())"
        )
        before = self.watch(s, "w")
        s.run("_ = parametrize.remove_parametrizations(m, 'weight', leave_parametrized=True)\nleft, want = m.weight, d * 2")
        self.written(
            s,
            Watched("left", before.values, before.snapshot),
            "want",
            "the weight after remove_parametrizations(leave_parametrized=True)",
        )

    @over(
        ("ParameterList", "nn.ParameterList([nn.Parameter(w, False), nn.Parameter(v, False)])", "c[0]", "c[1]"),
        ("ParameterList of tensors", "nn.ParameterList([w, v])", "c[0]", "c[1]"),
        (
            "ParameterList.append",
            "nn.ParameterList().append(nn.Parameter(w, False)).append(nn.Parameter(v, False))",
            "c[0]",
            "c[1]",
        ),
        ("ParameterDict", "nn.ParameterDict(dict(a=nn.Parameter(w, False), b=nn.Parameter(v, False)))", "c['a']", "c['b']"),
    )
    @check(axes="one", why="mixtures of experts and adapters keep weights in containers", fix=_FIX_DETACH)
    def test_parameter_containers(self, name: str, container: str, first: str, second: str) -> None:
        """Parameter containers keep class, values and order, also through state_dict and load_state_dict."""
        s = self.script()
        self.second_subject(s)
        s.run(f"c = {container}")
        s.expect(
            f"isinstance({first}, type(w)) and isinstance({first}, nn.Parameter)",
            f"in a {name} the tensor is a {{type({first}).__name__}}.",
            kind="class",
        )
        s.expect(
            "len(list(c.parameters())) == 2",
            "the container lists {len(list(c.parameters()))} parameters instead of 2.",
            kind="registered",
        )
        for got, want in ((first, "d"), (second, "source")):
            s.equal(got, want, label=f"the values of {got} in a {name}")
        s.run(
            "sd = {k: t.clone() for k, t in c.state_dict().items()}; _ = c.load_state_dict(dict(zip(sd, reversed(list(sd.values())))))"
        )
        s.run(f"a, b = {first}, {second}")
        before = self.watch(s, "w")
        for got, want in (("a", "source"), ("b", "d")):
            self.written(
                s,
                Watched(got, before.values, before.snapshot),
                want,
                f"the values in a {name} after loading them in the other order",
            )

    @check(
        why="training loops call these on every module", fix="handle detach and requires_grad_ without rebuilding the tensor"
    )
    def test_module_methods(self) -> None:
        """apply, train, eval, requires_grad_, zero_grad keep the Parameter object, its class and values, and set the flag."""
        s = self.layer()
        s.run("old = m.weight\n_ = m.apply(lambda module: None).train().eval().requires_grad_(True)")
        s.expect("old.requires_grad", "m.requires_grad_(True) left the weight's requires_grad at False.", kind="requires_grad")
        s.run("m.zero_grad(); m.zero_grad(set_to_none=False); _ = m.requires_grad_(False)")
        s.expect(
            "not old.requires_grad", "m.requires_grad_(False) left the weight's requires_grad at True.", kind="requires_grad"
        )
        s.expect("m.weight is old and isinstance(old, type(w))", "the weight is another object or class now.", kind="identity")
        s.equal("m.weight", "d", label="the weight after apply, train, eval, requires_grad_ and zero_grad")

    # --- torch.nn.utils

    @check(why="L-BFGS, meta-learning and model averaging flatten parameters", fix="support view(-1) and cat, or refuse them")
    def test_parameters_to_vector(self) -> None:
        """parameters_to_vector gives the values in one vector, or is refused."""
        self.agree("torch.nn.utils.parameters_to_vector([w, b])", b=self.bias())

    @check(
        level="should",
        axes="one",
        why="the vector is written by .data =, which torch turns into a silent no-op for wrapper subclasses",
        fix="handle the setter of torch.Tensor.data: rebind the inner tensors, or raise",
    )
    def test_vector_to_parameters(self) -> None:
        """vector_to_parameters writes the vector's values into the parameter, or is refused."""
        s = self.script(vector=f"({self.second()}).reshape(-1)")
        s.run("p = nn.Parameter(w, False); want = vector.view(d.shape)")
        before = self.watch(s, "p")
        self.attempt(s, "torch.nn.utils.vector_to_parameters(vector, [p])", before)
        self.written(s, before, "want", "the parameter after vector_to_parameters")

    @over(
        ("custom_from_mask", "custom_from_mask({}, 'weight', mask=mask)"),
        ("l1_unstructured", "l1_unstructured({}, 'weight', amount=0.3)"),
        ("random_unstructured", "random_unstructured({}, 'weight', amount=0.3)"),
    )
    @check(
        why="a mask that isn't applied leaves the model dense, and its reported sparsity wrong",
        fix="let mul with a plain mask give the masked values, or refuse it",
    )
    def test_prune(self, name: str, call: str) -> None:
        """Pruning masks the same elements as on a dense weight and shows the masked values, or is refused."""
        s = self.layer()
        s.run(
            "from torch.nn.utils import prune\nmask = (torch.arange(hp.numel()) % 3 > 0).reshape(hp.shape).to(hp.dtype)\n"
            + self.layer_lines("dense", "nn.Parameter(d.clone(), False)")
        )
        s.run(f"torch.manual_seed(0); _ = prune.{call.format('dense')}")
        before = self.watch(s, "w")
        s.run(f"torch.manual_seed(0); _ = prune.{call.format('m')}\npruned, want = m.weight, dense.weight")
        s.equal("m.weight_mask", "dense.weight_mask", label=f"the mask of {name}")
        self.written(s, Watched("pruned", before.values, before.snapshot), "want", f"the weight after prune.{name}")
        if change := before.snapshot.changes(s["w"]):
            s.fail(
                f"prune.{name} changed the original weight: {change}.",
                kind="mutated",
                assertion="assert torch.equal(plain(w), d)",
            )

    # --- shared weights

    @check(why="embeddings and output layers share one weight", fix=_FIX_DETACH)
    def test_tied_weights(self) -> None:
        """A weight that two modules share stays one: counted once, loaded once, and still shared in a deep copy."""
        s = self.layer()
        self.second_subject(s)
        s.run(f"{self.layer_lines('n', 'm.weight')}; model = nn.ModuleDict(dict(m=m, n=n))")
        s.expect(
            "len(list(model.parameters())) == 3",
            "the model with a tied weight has {len(list(model.parameters()))} parameters instead of 3.",
            kind="registered",
        )
        s.run("twin = copy.deepcopy(model)")
        s.expect("twin.m.weight is twin.n.weight", "deepcopy made two weights out of the tied one.", kind="untied")
        s.run("sd = model.state_dict(); sd['m.weight'] = sd['n.weight'] = v; old = m.weight")
        before = self.watch(s, "old")
        self.attempt(s, "_ = model.load_state_dict(sd)", before)
        s.expect("model.m.weight is model.n.weight", "loading a state_dict untied the weights.", kind="untied")
        self.written(s, before, "source", "the tied weight after load_state_dict")

    @check(
        why="two modules over one tensor must not drift apart",
        fix="let detach share the inner tensors, and copy_ write into them",
    )
    def test_two_parameters_of_one_tensor(self) -> None:
        """Two Parameters made of one tensor share it: what is written through one is seen through the other."""
        s = self.layer()
        s.run(self.layer_lines("n") + f"\nhp2 = {self.second()}\np = m.weight")
        before = self.watch(s, "p")
        self.attempt(s, "with torch.no_grad(): _ = m.weight.copy_(hp2)", before)
        self.written(s, before, "hp2", "the written parameter")
        s.equal(
            "n.weight",
            "m.weight",
            label="the other module's weight",
            likely="nn.Parameter(w) copies, or copy_ replaces inner tensors.",
        )

    @over(
        ("average", ""),
        ("EMA", ", avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.75)"),
        ("EMA-foreach", ", multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.75)"),
    )
    @check(
        axes="dtype",
        why="an averaged model that stays at its first values is published as the trained one",
        fix="support copy_, lerp_ and _foreach_lerp_ by dequantizing and quantizing anew, or refuse them",
    )
    def test_averaged_model(self, name: str, argument: str) -> None:
        """AveragedModel holds the average of the weights it was given, up to requantization, in memory of its own; or refuses."""
        s = self.layer()
        self.second_subject(s)
        s.run(f"ema = torch.optim.swa_utils.AveragedModel(m{argument}); e = ema.module.weight")
        start = self.watch(s, "e")
        self.attempt(s, "ema.update_parameters(m)", start)
        self.written(s, start, "d", f"the {name} after its first update")
        s.run(f"m.weight = nn.Parameter(v, False); want = d.lerp(source, {'0.5' if not argument else '0.25'})")
        before = self.watch(s, "e")
        self.attempt(s, "ema.update_parameters(m)", before)
        self.written(s, before, "want", f"the {name} after its second update")
        s.equal("w", "d", label="the first model's weight after updates of the average")


def _shared(a: torch.Tensor, b: torch.Tensor) -> str:
    """The names of inner tensors of ``b`` that lie in the storage of one of ``a``."""
    homes = {t.untyped_storage().data_ptr() for t in (oracle.inner_tensors(a) or {"": a}).values()} - {0}
    return ", ".join(
        name or "its values"
        for name, t in (oracle.inner_tensors(b) or {"": b}).items()
        if t.untyped_storage().data_ptr() in homes
    )
