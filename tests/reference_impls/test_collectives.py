"""Sharding quantized weights over two real processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

# Each process prints "ok" for every case. The second one starts from other values: what it shows, it has received.
SCRIPT = """
import sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from reference_impls import AffineQuantizedTensor, Int4Layout, Int4Tensor, Int8Tensor, PlainLayout, UInt4Tensor, UintxLayout, UintxTensor

def check(w, placement, mesh, rank):
    mine = w if rank == 0 else w.mapped(lambda t: t.clone().zero_())
    shard = distribute_tensor(mine, mesh, [placement])
    assert type(shard.to_local()) is type(w)
    full = shard.full_tensor()
    assert torch.equal(full.dequantize() if hasattr(full, 'dequantize') and type(full) is not torch.Tensor else full, w.dequantize())
    x = torch.arange(3.0 * w.shape[1]).reshape(3, -1)
    if w.shape[0] % 2 == 0:
        out = F.linear(distribute_tensor(x, mesh, [Replicate()]), shard).full_tensor()
        torch.testing.assert_close(out, x @ w.dequantize().t(), rtol=1e-4, atol=1e-3)
    print("ok", flush=True)

def main(rank, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method="file://" + path)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    hp = torch.randn(6, 8) * torch.arange(1, 7)[:, None]
    for granularity in ("row", 4, "tensor"):
        for placement in (Shard(0), Shard(1), Replicate()):
            check(Int8Tensor.from_hp(hp, granularity), placement, mesh, rank)
    check(Int8Tensor.from_hp(hp[:5]), Shard(0), mesh, rank)
    wide = torch.randn(6, 32) * torch.arange(1, 7)[:, None]
    packed = [Int4Tensor.from_hp(wide, 16), UInt4Tensor.from_hp(wide, 8)]
    packed += [UintxTensor.from_hp(wide, bits, 16) for bits in range(1, 8)]
    layouts = (PlainLayout(), UintxLayout(4), Int4Layout())
    packed += [AffineQuantizedTensor.from_hp(wide, layout, "asymmetric", 0, 15, 16) for layout in layouts]
    for layout in layouts:
        check(AffineQuantizedTensor.from_hp(wide[:5], layout, "symmetric", -4, 3, 16), Shard(0), mesh, rank)
    for w in packed:
        for placement in (Shard(0), Shard(1), Replicate()):
            check(w, placement, mesh, rank)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(main, (sys.argv[1],), 2, start_method="fork")
"""


@pytest.mark.skipif(not torch.distributed.is_available() or sys.platform != "linux", reason="needs gloo and fork")
def test_distribute_linear_and_gather(tmp_path):
    script = tmp_path / "shard.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    shown = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "store")],
        capture_output=True, text=True, timeout=120, env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert shown.stdout.split() == ["ok"] * 2 * (10 + 3 + 12 * 3), shown.stderr


def test_other_collectives_are_refused():
    from reference_impls.values import ValueTensor

    with pytest.raises(NotImplementedError, match="ValueTensor does not implement c10d.allreduce_"):
        ValueTensor._fallback(torch.ops.c10d.allreduce_.default, ([], None, None, None, True, -1))
