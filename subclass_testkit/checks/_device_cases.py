"""The moves and operations that the device checks run, as text."""

from __future__ import annotations

import torch

META = (
    "w.to('meta')",
    "w.to(device='meta')",
    "w.to(torch.device('meta'), non_blocking=True)",
    "w.to('meta', copy=True)",
    "w.to(torch.empty(0, dtype=w.dtype, device='meta'))",
    "w.to('meta', torch.bfloat16)",
)
SAME = (
    "w.to('cpu')",
    "w.cpu()",
    "w.to(w.device)",
    "w.to(w.dtype)",
    "w.to(w)",
    "w.to(device='cpu', dtype=w.dtype)",
    "w.type_as(w)",
)
DTYPES = (
    ("w.to(torch.bfloat16)", torch.bfloat16),
    ("w.to(dtype=torch.float16)", torch.float16),
    ("w.half()", torch.float16),
    ("w.bfloat16()", torch.bfloat16),
    ("w.float()", torch.float32),
    ("w.double()", torch.float64),
    ("w.to('cpu', torch.bfloat16)", torch.bfloat16),
    ("w.to(torch.empty(0, dtype=torch.float16))", torch.float16),
    ("w.to(torch.float64, copy=True)", torch.float64),
    ("w.type(torch.bfloat16)", torch.bfloat16),
    ("w.to(torch.bfloat16).to(torch.float32)", torch.float32),
)
MODULE = (
    ("m.half()", torch.float16, "cpu"),
    ("m.bfloat16()", torch.bfloat16, "cpu"),
    ("m.double()", torch.float64, "cpu"),
    ("m.to(torch.bfloat16)", torch.bfloat16, "cpu"),
    ("m.to('cpu', torch.float16)", torch.float16, "cpu"),
    ("m.to('cpu')", None, "cpu"),
    ("m.to('meta')", None, "meta"),
    ("m.to_empty(device='meta')", None, "meta"),
    ("m.to_empty(device='cpu')", None, "cpu"),
    ("m.to('meta').to_empty(device='cpu')", None, "cpu"),
)
FACTORIES = (
    "torch.zeros_like(w)",
    "torch.ones_like(w)",
    "torch.full_like(w, 2.0)",
    "torch.zeros_like(w, dtype=torch.bfloat16)",
    "torch.ones_like(w, dtype=torch.int32)",
    "torch.zeros_like(w, device='meta')",
    "torch.ones_like(w, requires_grad=True)",
    "torch.zeros_like(w.t())",
    "w.new_zeros(3, 2)",
    "w.new_ones((3, 2))",
    "w.new_full((2, 3), 2.0)",
    "w.new_zeros(3, dtype=torch.int64)",
    "w.new_zeros((3, 2), device='meta')",
    "w.new_tensor([1.0, 2.0])",
)
UNSET = (
    "torch.empty_like(w)",
    "torch.empty_like(w, dtype=torch.float16)",
    "torch.empty_like(w, device='meta')",
    "torch.rand_like(w)",
    "torch.randn_like(w)",
    "w.new_empty(3, 2)",
    "w.new_empty_strided((3, 2), (2, 1))",
    "torch.empty_like(w, device='meta', dtype=torch.float16)",
)
# Families of cases: each family is one child process, which costs more than its cases.
SIM_MOVES = (
    (
        "to a device",
        "w.to('sim')",
        "w.to('sim:0')",
        "w.to('sim:1')",
        "w.to(device='sim')",
        "w.to('sim', non_blocking=True)",
        "w.to('sim', copy=True)",
        "w.sim()",
    ),
    ("like another tensor", "w.to(torch.empty(0, dtype=w.dtype, device='sim'))"),
    ("to a device and dtype", "w.to('sim', torch.bfloat16)", "w.to('sim').half()"),
    ("there and on", "w.to('sim').cpu()", "w.to('sim').to('cpu')", "w.to('sim').to('sim:1')", "w.to('sim').to('meta')"),
    ("copies", "copy.deepcopy(w.to('sim'))", "nn.Parameter(w.to('sim'))", "w.to('sim').detach().clone()"),
    ("views", "w.t().to('sim')", "w[8:16].to('sim')"),
)
SIM_OPERATIONS = (
    ("linear", "linear", "linear-bias", "to_plain"),
    ("views", "w[8:16]", "w[:, 8:16]", "w[3]", "w.t()", "w.chunk(2)[1]", "w.contiguous()"),
    ("arithmetic", "w + 1", "x @ w.t()", "torch.cat([w, w])", "w.sum()"),
    ("writes", "w.copy_(on_cpu)", "on_cpu.copy_(w)", "w.mul_(-1)"),
    ("new tensors", "torch.zeros_like(w)", "torch.empty_like(w)", "w.new_zeros(3)", "torch.ones_like(w, device='cpu')"),
)
SIM_MODULE = (
    ("to", "m.to('sim')", "m.to('sim', torch.bfloat16)", "m.sim()", "m.to('sim').cpu()"),
    ("to_empty", "m.to_empty(device='sim')", "m.to('meta').to_empty(device='sim')"),
)
SIM_ENDS = {"'sim:1')": "sim:1", ".cpu()": "cpu", "'cpu')": "cpu", "'meta')": "meta"}
