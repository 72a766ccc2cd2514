"""Shard it: a 4-bit weight over two processes, by rows and by columns.

    python docs/tutorials/shard_it.py

Everything runs on one machine, over gloo. What it takes of the class is little: slices that share memory and are exact, and
collectives on the inner tensors (`reference_impls/collectives.py`). DTensor does the rest.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from reference_impls import UInt4Tensor
from reference_impls.linear import record_kernels
from subclass_testkit import Subject, check_subclass

WORLD = 2


def quantized(hp):
    return UInt4Tensor.from_hp(hp, group_size=16)


def say(*words):
    """Print once, though every process gets here."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


# 1. By hand. A linear's weight (N, K) can be cut in two ways:
#
#    column-wise   each process has rows of the weight, so columns of the result: they are put side by side, and a bias is cut likewise
#    row-wise      each process has columns of the weight and the same columns of the input: the results are added up, and the bias is
#                  added once, not once a process
#
#    (The names are those of Megatron-LM, Shoeybi et al. 2019, which writes x @ A with A = weight.T.) The shard of a packed weight is a slice
#    of each inner tensor, so a plain linear on it runs the same kernel as the whole.


def by_hand(rank, x, weight, bias):
    rows, columns = weight.shape[0] // WORLD, weight.shape[1] // WORLD
    mine = weight.narrow(0, rank * rows, rows)
    assert mine.qdata.untyped_storage().data_ptr() == weight.qdata.untyped_storage().data_ptr()  # not a copy
    with record_kernels() as ran:
        part = F.linear(x, mine, bias.narrow(0, rank * rows, rows))
    parts = [torch.empty_like(part) for _ in range(WORLD)]
    dist.all_gather(parts, part)
    torch.testing.assert_close(torch.cat(parts, -1), F.linear(x, weight, bias))
    say(f"by hand, column-wise: each process runs {ran[0]} on {tuple(mine.shape)} of {tuple(weight.shape)}")

    mine = weight.narrow(1, rank * columns, columns)
    with record_kernels() as ran:
        part = F.linear(x.narrow(1, rank * columns, columns), mine)
    dist.all_reduce(part)
    torch.testing.assert_close(part + bias, F.linear(x, weight, bias))
    say(f"by hand, row-wise: each process runs {ran[0]} on {tuple(mine.shape)} of {tuple(weight.shape)}")


# 2. With DTensor. `distribute_tensor` cuts the first process's weight, sends each its shard, and keeps the placement, from which it knows
#    what to send when. The local tensor has the class, and so is four bits an element. (DTensor takes a linear apart into t and mm
#    before it gets to the shard, which then runs on its values. Where speed counts, call F.linear on `to_local()`, as in part 1.)


def with_dtensor(rank, mesh, x, weight, bias):
    replicated = distribute_tensor(x, mesh, [Replicate()])
    mine = weight if rank == 0 else quantized(torch.zeros(weight.shape))  # what it has afterwards, it has received
    for placement, of_bias in ((Shard(0), Shard(0)), (Shard(1), Replicate())):
        sharded = distribute_tensor(mine, mesh, [placement])
        local, expected = sharded.to_local(), weight.chunk(WORLD, placement.dim)[rank]
        assert type(local) is UInt4Tensor
        assert torch.equal(local.dequantize(), expected.dequantize())
        out = F.linear(replicated, sharded, distribute_tensor(bias, mesh, [of_bias]))
        torch.testing.assert_close(out.full_tensor(), F.linear(x, weight, bias))
        whole = sharded.full_tensor()  # the values, gathered
        assert torch.equal(whole.dequantize() if isinstance(whole, UInt4Tensor) else whole, weight.dequantize())
        say(
            f"DTensor, {placement}: {type(local).__name__} {tuple(local.shape)} in each process; the result was {out.placements[0]}"
        )


# 3. A whole MLP. The first linear column-wise, the second row-wise: between them nothing is sent, and after them one sum.


def a_module(mesh, x):
    torch.manual_seed(1)
    mlp = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    for linear in (mlp[0], mlp[2]):
        linear.weight = nn.Parameter(quantized(linear.weight.detach()), requires_grad=False)
    expected = mlp(x)
    parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.testing.assert_close(mlp(x), expected)
    shapes = [tuple(mlp[i].weight.to_local().shape) for i in (0, 2)]
    say(f"an MLP of (128, 64) and (64, 128): {shapes[0]} and {shapes[1]} in each process")


# 4. Borders. Rows can be cut anywhere, also unevenly. Columns can be cut between groups: a group has one scale, and a byte two codes. A cut
#    through several groups is refused, by every process before anything is sent, so that none waits for another. A part of a single
#    group is a view that can be read, but not be written to: its scale belongs to the rest as well.


def borders(mesh):
    uneven = distribute_tensor(quantized(torch.randn(5, 32)), mesh, [Shard(0)])
    assert uneven.to_local().shape[0] == (3, 2)[dist.get_rank()]
    say("5 rows are cut into 3 and 2")
    weight = quantized(torch.randn(8, 48))
    try:
        distribute_tensor(weight, mesh, [Shard(1)])
        raise AssertionError("48 columns are 3 groups, which can't be cut in two")
    except NotImplementedError as error:
        say("refused:", error)
    # the remedy is a group that divides the shard: 24 columns are 3 groups of 8
    finer = distribute_tensor(UInt4Tensor.from_hp(torch.randn(8, 48), 8), mesh, [Shard(1)])
    assert finer.to_local().shape == (8, 24)
    try:
        weight[:, :8].zero_()
        raise AssertionError("a part of a group was written to")
    except NotImplementedError as error:
        say("refused:", error)


def process(rank, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, init_method=f"file://{path}")
    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)  # the same in each process
    x, weight, bias = torch.randn(4, 64), quantized(torch.randn(32, 64)), torch.randn(32)
    by_hand(rank, x, weight, bias)
    with_dtensor(rank, mesh, x, weight, bias)
    a_module(mesh, x)
    borders(mesh)
    dist.destroy_process_group()


# 5. Does it hold? A shard is a weight like any other: the kit tries what the second process has, a view that begins in the middle of the
#    memory of the whole. It comes from a checkpoint, so that there is no graph to keep.


def second_shard(hp):
    whole = quantized(torch.cat([-hp, hp]))
    return whole[hp.shape[0] :].detach()


def main():
    sys.stdout.flush()  # a fork copies what isn't written yet
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        torch.multiprocessing.start_processes(process, (store,), WORLD, start_method="fork")
    report = check_subclass(
        Subject(
            UInt4Tensor,
            name="shard of a UInt4Tensor",
            make=second_shard,
            to_plain=UInt4Tensor.dequantize,
            multiples_of=(1, 16),
            claims=("inference", "training", "serialization", "serving"),
        ),
        checks=["!gradients/make-keeps-the-graph"],
    )
    print(report)
    if not report.ok:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
