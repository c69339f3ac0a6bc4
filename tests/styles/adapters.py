"""Small parts trained beside frozen ones; weights that are made, masked, shared or kept oddly."""
# mypy: disable-error-code="no-any-return, no-untyped-call, operator, index, arg-type, misc"
# mypy: disable-error-code="return-value, assignment"
# (written as users write, who check no types)

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from tests.styles import BATCH, Style, style
from tests.styles.mixtures import features, mse


class ListLora(nn.Module):
    """Low-rank pairs in a plain list, registered by hand under names of the writer's own."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(16, 16) for _ in range(2)).requires_grad_(False)
        self.pairs = []
        for i in range(2):
            a, b = nn.Parameter(torch.randn(2, 16) / 4), nn.Parameter(torch.randn(16, 2) / 9)
            self.register_parameter(f"lora_a_{i}", a)
            self.register_parameter(f"lora_b_{i}", b)
            self.pairs.append((a, b))
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer, (a, b) in zip(self.base, self.pairs, strict=True):
            x = torch.relu(layer(x) + 0.5 * (x @ a.T) @ b.T)
        return self.head(x)


@style
def low_rank_pairs_in_a_list() -> Style:
    return Style(ListLora(), features(), mse)


class PlainLora(nn.Module):
    """Low-rank pairs that nobody registered: plain tensors in a dict that wants gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 8)
        self.lora = {"a": torch.randn(2, 16).requires_grad_(), "b": torch.zeros(8, 2)}

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.lora["a"]), self.lora["b"])


@style
def low_rank_pairs_unregistered() -> Style:
    return Style(PlainLora(), features(), mse)


class Hidden(nn.Module):
    """Modules that stand in a plain list and a namespace; `parameters()` does not see them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(16, 16), nn.Linear(16, 16)]
        self.parts = SimpleNamespace(norm=nn.LayerNorm(16))
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.head(self.parts.norm(x))


@style
def modules_in_a_plain_list() -> Style:
    return Style(Hidden(), features(), mse)


class Prefix(nn.Module):
    """Learned keys and values before a frozen attention's own."""

    def __init__(self, num: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 12)
        self.requires_grad_(False)
        self.prefix = nn.Embedding(num, 8)
        self.trans = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2 * 8))
        self.tokens = torch.arange(num).long()

    def forward(self, ids: Tensor) -> Tensor:
        b, t = ids.shape
        past = self.trans(self.prefix(self.tokens.unsqueeze(0).expand(b, -1)))
        pk, pv = past.view(b, -1, 2, 2, 4).permute(2, 0, 3, 1, 4)
        q, k, v = (
            z.view(b, t, 2, 4).transpose(1, 2) for z in self.qkv(self.table(ids)).split(8, 2)
        )
        k, v = torch.cat([pk, k], 2), torch.cat([pv, v], 2)
        mask = torch.cat([torch.ones(t, len(self.tokens)), torch.ones(t, t).tril()], 1).bool()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


@style
def prefixes_of_attention() -> Style:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return Style(Prefix(), (torch.randint(0, 12, (BATCH, 5)),), loss)


class Bottleneck(nn.Module):
    """An adapter behind each layer that a user put in by wrapping what was there."""

    def __init__(self, wrapped: nn.Module, dim: int = 16) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.down, self.up = nn.Linear(dim, 4), nn.Linear(4, dim)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.wrapped(x)
        return y + self.up(F.silu(self.down(y)))


@style
def bottlenecks_and_biases() -> Style:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)))
    model.append(nn.Linear(16, 8))
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.endswith("bias")
    for i in range(2):
        model[i] = Bottleneck(model[i])
    return Style(model, features(), mse)


class Int8(nn.Module):
    """A frozen weight in int8 with a scale for each row, and a low-rank pair."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        full = torch.randn(out, into)
        scale = full.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight_int8", (full / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.lora = nn.ParameterDict({"A": torch.randn(2, into) / 4, "B": torch.zeros(out, 2)})

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight_int8.to(x.dtype) * self.scale
        return F.linear(x, weight) + x @ self.lora["A"].t() @ self.lora["B"].t()


@style
def weights_in_eight_bits() -> Style:
    return Style(nn.Sequential(Int8(16, 16), nn.ReLU(), Int8(16, 8)), features(), mse)


class MadeWeights(nn.Module):
    """A net whose weights a hypernetwork makes from codes of its layers, by functional_call."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
        self.net.requires_grad_(False)
        self.shapes = {name: p.shape for name, p in self.net.named_parameters()}
        self.codes = nn.ParameterDict(
            {name.replace(".", "_"): torch.randn(4) for name in self.shapes}
        )
        self.makers = nn.ModuleDict(
            {name.replace(".", "_"): nn.Linear(4, s.numel()) for name, s in self.shapes.items()}
        )

    def forward(self, x: Tensor) -> Tensor:
        made = {}
        for name, shape in self.shapes.items():
            key = name.replace(".", "_")
            made[name] = self.makers[key](self.codes[key]).view(shape)
        return functional_call(self.net, made, (x,))


@style
def weights_from_codes() -> Style:
    return Style(MadeWeights(), features(), mse)


class TiedBack(nn.Module):
    """An autoencoder that decodes with the transposed weights of its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(16, 12), nn.Linear(12, 6)])
        self.biases = nn.ParameterList([torch.zeros(12), torch.zeros(16)])
        self.again = self.encoder[0].weight  # the same parameter under a second name

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder[1](torch.sigmoid(self.encoder[0](x)))
        z = torch.sigmoid(F.linear(z, self.encoder[1].weight.t(), self.biases[0]))
        return F.linear(z, self.again.t(), self.biases[1])


@style
def tied_and_transposed() -> Style:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return F.mse_loss(model(x + 0.0), x)

    return Style(TiedBack(), (torch.randn(BATCH, 16),), loss)


class OddKeys(nn.Module):
    """Dicts with keys that are no Python names, and a parameter beside them with such a one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {"conv-1": nn.Linear(16, 16), "en->de": nn.Linear(16, 16), "class": nn.Linear(16, 8)}
        )
        self.scales = nn.ParameterDict({"1st": torch.ones(16), "lambda": torch.ones(16)})
        self.scales["größe"] = nn.Parameter(torch.ones(8))
        self.extra = nn.ParameterDict({"none": None, "x y": torch.zeros(8)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers["conv-1"](x) * self.scales["1st"]
        x = self.layers["en->de"](x.relu()) * self.scales["lambda"]
        return self.layers["class"](x.relu()) * self.scales["größe"] + self.extra["x y"]


@style
def keys_that_are_no_names() -> Style:
    return Style(OddKeys(), features(), mse)


class Splines(nn.Module):
    """A layer of a Kolmogorov-Arnold network: B-splines on every edge."""

    def __init__(self, into: int, out: int, num: int = 4, order: int = 3) -> None:
        super().__init__()
        self.order = order
        step = 2 / num
        grid = torch.arange(-order, num + order + 1) * step - 1
        self.register_buffer("grid", grid.expand(into, -1).contiguous())
        self.base_weight = nn.Parameter(torch.randn(out, into) / 4)
        self.spline_weight = nn.Parameter(torch.randn(out, into, num + order) / 4)
        self.spline_scaler = nn.Parameter(torch.ones(out, into))

    def bases(self, x: Tensor) -> Tensor:
        x, grid = x.unsqueeze(-1), self.grid
        bases = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            left = (x - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)])
            right = (grid[:, k + 1 :] - x) / (grid[:, k + 1 :] - grid[:, 1:(-k)])
            bases = left * bases[:, :, :-1] + right * bases[:, :, 1:]
        return bases.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.spline_weight * self.spline_scaler.unsqueeze(-1)).view(
            len(self.base_weight), -1
        )
        curve = F.linear(self.bases(x).view(x.size(0), -1), weight)
        return F.linear(F.silu(x), self.base_weight) + curve


@style
def splines_on_edges() -> Style:
    return Style(nn.Sequential(Splines(16, 6), Splines(6, 8)), features(), mse)


class Pruned(nn.Linear):
    """A layer whose weight a buffer masks, and whose smallest weights the forward masks itself."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__(into, out)
        self.register_buffer("weight_mask", (torch.rand(out, into) > 0.5).float())
        self.register_buffer("calls", torch.tensor(0, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        bound = self.weight.detach().abs().flatten().kthvalue(8).values
        kept = self.weight_mask * (self.weight.detach().abs() > bound)
        return F.linear(x, self.weight * kept, self.bias)


@style
def masked_weights() -> Style:
    return Style(nn.Sequential(Pruned(16, 16), nn.ReLU(), Pruned(16, 8)), features(), mse)


class Given(nn.Module):
    """A model whose forward is told which of its parts to call, and with what."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 8)
        self.act = nn.PReLU()

    def forward(self, x: Tensor, head: nn.Module, act: Callable[[Tensor], Tensor]) -> Tensor:
        return head(act(self.first(x)))


@style
def a_module_as_argument() -> Style:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x, model.second, model.act), y)

    return Style(Given(), features(), loss)
