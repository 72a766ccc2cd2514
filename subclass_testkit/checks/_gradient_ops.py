"""The operations that the gradient checks differentiate, as text over ``x``, ``g`` (the output's gradient) and ``p`` (a Parameter)."""

from __future__ import annotations

# lead dimensions of the activation
LEADS = ((5,), (1,), (33,), (), (2, 3), (2, 1, 3), (0,))
# what lies how: text of the input and of the output's gradient
LAYOUTS = (
    ("x transposed", "({x}).t().contiguous().t()", "{g}"),
    ("x every second row", "({x}).repeat_interleave(2, 0)[::2]", "{g}"),
    ("grad transposed", "{x}", "({g}).t().contiguous().t()"),
    ("3-D transposed", "torch.stack([({x}), ({x}) * 2]).transpose(0, 1)", "torch.stack([({g}), ({g}) * 2]).transpose(0, 1)"),
    ("grad of one number", "{x}", "torch.full((1, 1), 2.0, dtype=({g}).dtype).expand(5, {n})"),
    ("grad of one row", "{x}", "({g})[:1].expand(5, -1)"),
    ("grad every second column", "{x}", "({g}).repeat_interleave(2, 1)[:, ::2]"),
)
# an operation on the subclass as Parameter p, linear in p, and in other inputs
PARAMETER_OPERATIONS = (
    "x @ p.t()",
    "torch.mm(x, p.t())",
    "torch.matmul(x, p.T)",
    "torch.mm(p, x.t())",
    "p @ x[0]",
    "torch.addmm(b, x, p.t(), alpha=2)",
    "torch.einsum('sk,nk->sn', x, p)",
    "F.linear(x, weight=p)",
    "F.linear(x, p, bias=b)",
    "F.linear(input=x, weight=p, bias=b)",
    "F.embedding(i, p)",
    "p[i]",
    "p * y",
    "p + y",
    "y + p",
    "p * 3",
    "p / 4",
    "p.sum(-1)",
    "p.mean()",
    "p.t() * 2",
    "p[1:3] * 2",
    "p[:, 1:3] * 2",
    "p[2] * 2",
    "p.chunk(2)[1] * 2",
    "p.view(-1) * 2",
    "p.clone()",
    "p.t().contiguous()",
    "p.reshape(-1) * 2",
    "p.unsqueeze(0) * 2",
    "p.to('cpu', copy=True)",
    "p.to(torch.float64)",
    "torch.cat([p, y])",
    "torch.stack([y, p])",
    "torch.where(m, p, y)",
    "F.linear(x, p[1:3])",
    "F.linear(x, p) + F.linear(x * 2, p)",
    "F.linear(x, p) + p.sum(1)",
    "to_plain(p) * 2",
    "F.linear(x, to_plain(p))",
)
FLAGS = (
    ("w.requires_grad_()", "w.requires_grad_()", "w.requires_grad and w.is_leaf and w.grad_fn is None and isinstance(w, C)"),
    (
        "under no_grad",
        "with torch.no_grad():\n    v = w.requires_grad_()",
        "v is w and w.requires_grad and w.is_leaf and isinstance(v, C)",
    ),
    ("requires_grad = True", "w.requires_grad = True", "w.requires_grad and w.is_leaf"),
    ("off again", "w.requires_grad_().requires_grad_(False)", "not w.requires_grad"),
    (
        "Parameter(w)",
        "p = nn.Parameter(w)",
        "p.requires_grad and p.is_leaf and p.grad is None and isinstance(p, nn.Parameter) and not w.requires_grad",
    ),
    ("Parameter(w, False)", "p = nn.Parameter(w, False)", "not p.requires_grad and p.is_leaf and isinstance(p, nn.Parameter)"),
    ("Parameter of the class", "p = nn.Parameter(w)", "isinstance(p, C)"),
    (
        "Parameter toggled",
        "p = nn.Parameter(w)\np.requires_grad_(False)",
        "not p.requires_grad and isinstance(p, nn.Parameter)",
    ),
    (
        "Parameter(w.requires_grad_())",
        "p = nn.Parameter(w.requires_grad_())",
        "p.requires_grad and p.is_leaf and isinstance(p, nn.Parameter)",
    ),
    (
        "detach of a Parameter",
        "p = nn.Parameter(w)\nv = p.detach()",
        "v is not p and not v.requires_grad and v.grad_fn is None and p.requires_grad and isinstance(v, C)",
    ),
    ("detach of w", "v = w.detach()", "v is not w and not v.requires_grad and v.grad_fn is None"),
    ("detach of a result", "p = nn.Parameter(w)\nv = (p * 2).detach()", "not v.requires_grad and v.grad_fn is None"),
)
CONNECTED = ("x.requires_grad_()", "b.requires_grad_()", "p")
# a function transform of a linear: its name, and its text around {linear}
TRANSFORMS = (
    ("grad", "torch.func.grad(lambda x: ({linear} * g).sum())(x)"),
    ("vjp", "torch.func.vjp(lambda x: {linear}, x)[1](g)[0]"),
    ("jvp", "torch.func.jvp(lambda x: {linear}, (x,), (z,))[1]"),
    ("vmap", "torch.vmap(lambda x: {linear})(x)"),
    ("vmap of grad", "torch.vmap(torch.func.grad(lambda x, g: ({linear} * g).sum()))(x, g)"),
    ("jacrev", "torch.func.jacrev(lambda x: {linear})(x[0])"),
    ("functional_call", "torch.func.functional_call(nn.Linear(w.shape[1], w.shape[0], bias=False), {{'weight': w}}, (x,))"),
)
# what a training loop does before it reads p.grad: {0} is the linear of x, {1} that of z
SEQUENCES = (
    ("two backwards", "{0}.backward(g)\n{0}.backward(2 * g)"),
    ("one graph twice", "out = {0}\nout.backward(g, retain_graph=True)\nout.backward(2 * g)"),
    ("two uses", "({0} + {1}).backward(g)"),
    ("input too", "x = x.detach().requires_grad_()\n{0}.backward(g)"),
    ("after zero_grad", "{0}.backward(g)\ntorch.optim.SGD([p], lr=0.1).zero_grad()\n{0}.backward(g)"),
    (
        "after zero_grad to zeros",
        "{0}.backward(g)\ntorch.optim.SGD([p], lr=0.1).zero_grad(set_to_none=False)\n{0}.backward(g)",
    ),
    ("after grad = None", "{0}.backward(g)\np.grad = None\n{0}.backward(g)"),
    ("hook", "p.register_hook(lambda t: t * 3)\n{0}.backward(g)"),
    ("post-accumulate hook", "p.register_post_accumulate_grad_hook(lambda t: t.grad.mul_(3))\n{0}.backward(g)"),
    ("checkpoint", "torch.utils.checkpoint.checkpoint(lambda x: {0}, x, use_reentrant=False).backward(g)"),
    ("saved on cpu", "with torch.autograd.graph.save_on_cpu():\n    out = {0}\nout.backward(g)"),
    ("autograd.grad beside a .grad", "{0}.backward(g)\n_ = torch.autograd.grad({0}, p, g)"),
    ("chunks of the batch", "F.linear(x[:2], p).backward(g[:2])\nF.linear(x[2:], p).backward(g[2:])"),
)
# contexts that pack what autograd saves
SAVED_TENSOR_CONTEXTS = (
    ("identity", "torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)"),
    ("clone", "torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)"),
    ("detach", "torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t)"),
    ("save_on_cpu", "torch.autograd.graph.save_on_cpu()"),
)
