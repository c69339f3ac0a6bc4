"""A program of one step, written by hand."""

SOURCE = """
import torch
import torch.distributed as dist
from torch import nn

MESH, BUFFERS, ALIASES = {"tp": 2}, {}, {}
SHARDS = {"w": ("w", (4, 200), "float32", (("tp", 1, 1),))}
INPUTS = {"x": ((4, 100), "float32")}


class Step(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.tp = mesh.get_group("tp")
        self.w = nn.Parameter(torch.empty(4, 100))

    @torch.no_grad()
    def step(self, x):
        y = x * self.w
        y_done = dist.all_reduce(y, group=self.tp, async_op=True)
        z = self.twice(x)
        y_done.wait()
        del y, y_done
        self.w.grad = z + x
        return z.sum()

    def twice(self, x):
        local = x + x
        return local + x
"""
