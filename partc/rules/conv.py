"""Rules of convolution, pooling and resampling: cut by sample and channel, never in space."""

from __future__ import annotations

from partc.rules.call import Call
from partc.rules.table import rule


def convolution(call: Call) -> str:
    """``b(g c)__, (g o)c__, (g o) -> b(g o)__``; a transposed weight is ``(g c)o__``."""
    space = "_" * (call.rank() - 2)
    weight = f"(g c)o{space}" if call["transposed"] else f"(g o)c{space}"
    return f"b(g c){space},{weight},(g o)->b(g o){space}"


def convolution_backward(call: Call) -> str:
    """Gradients of input, weight and bias; cutting ``c`` leaves the bias's gradient whole."""
    space = "_" * (call.rank() - 2)
    weight = f"(g c)o{space}" if call["transposed"] else f"(g o)c{space}"
    data = f"b(g c){space}"
    return f"b(g o){space},{data},{weight}->{data},{weight},(g o)=c"


rule("aten.convolution", convolution, linear="0|1", added=2, scales={"groups": "g"})
rule(
    "aten.convolution_backward",
    convolution_backward,
    linear="0",
    scales={"groups": "g", "bias_sizes": "go"},
)

for dims, space in (("1d", "_"), ("2d", "__"), ("3d", "___")):
    one, two, three = (",".join([f"...{space}"] * num) for num in (1, 2, 3))
    rule(f"aten.avg_pool{dims} aten.adaptive_avg_pool{dims}", f"{one}->{one}", linear="0")
    rule(f"aten._adaptive_avg_pool{dims}", f"{one}->{one}", linear="0")
    rule(f"aten.avg_pool{dims}_backward", f"{two}->{one}", linear="0")
    rule(f"aten._adaptive_avg_pool{dims}_backward", f"{two}->{one}", linear="0")
    rule(f"aten.max_pool{dims}_with_indices aten.adaptive_max_pool{dims}", f"{one}->{two}")
    rule(f"aten.max_pool{dims}_with_indices_backward", f"{three}->{one}", linear="0")
    rule(f"aten.adaptive_max_pool{dims}_backward", f"{three}->{one}", linear="0")
    rule(f"aten.upsample_nearest{dims}", f"{one}->{one}", linear="0")
    rule(f"aten.upsample_nearest{dims}_backward", f"{one}->{one}", linear="0", sizes="input_size")

for kind, space in (
    ("linear1d", "_"),
    ("bilinear2d", "__"),
    ("bicubic2d", "__"),
    ("trilinear3d", "___"),
):
    rule(f"aten.upsample_{kind} aten._upsample_{kind}_aa", f"...{space}->...{space}", linear="0")
    rule(
        f"aten.upsample_{kind}_backward aten._upsample_{kind}_aa_backward",
        f"...{space}->...{space}",
        linear="0",
        sizes="input_size",
    )

rule("aten.grid_sampler_2d", "bc__,b___->bc__", linear="0")
rule("aten.pixel_shuffle aten.pixel_unshuffle", "...___->...___", linear="0", moves=True)
rule("aten.im2col", "b___->b__", linear="0")
rule("aten.col2im", "b__->b___", linear="0")
