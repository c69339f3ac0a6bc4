"""Rules of convolution, pooling and resampling: sharded by sample and channel, never in space.

A kernel reads neighbouring places, which another rank would have.
"""

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

for num_dims, space in enumerate(("_", "__", "___"), start=1):
    one, two, three = (",".join([f"...{space}"] * num) for num in (1, 2, 3))
    of_two, of_three = f"{two}->{one}", f"{three}->{one}"
    rule(f"aten.avg_pool{num_dims}d aten.adaptive_avg_pool{num_dims}d", f"{one}->{one}", linear="0")
    rule(f"aten.upsample_nearest{num_dims}d", f"{one}->{one}", linear="0")
    rule(
        f"aten.upsample_nearest{num_dims}d_backward",
        f"{one}->{one}",
        linear="0",
        sizes="input_size",
    )
    if num_dims == 1:  # torch computes the ops below on one dim as on two dims
        continue
    rule(f"aten._adaptive_avg_pool{num_dims}d", f"{one}->{one}", linear="0")
    rule(f"aten.avg_pool{num_dims}d_backward", of_two, linear="0")
    rule(f"aten._adaptive_avg_pool{num_dims}d_backward", of_two, linear="0")
    rule(
        f"aten.max_pool{num_dims}d_with_indices aten.adaptive_max_pool{num_dims}d", f"{one}->{two}"
    )
    rule(f"aten.max_pool{num_dims}d_with_indices_backward", of_three, linear="0")
    rule(
        f"aten.adaptive_max_pool{num_dims}d_backward",
        of_three,
        linear="0",
        contiguous=("grad_output", "self", "indices"),
    )

RESAMPLED = {
    "upsample_linear1d": "_",
    "upsample_bilinear2d": "__",
    "upsample_bicubic2d": "__",
    "upsample_trilinear3d": "___",
    "_upsample_bilinear2d_aa": "__",
    "_upsample_bicubic2d_aa": "__",
}
for op, space in RESAMPLED.items():
    letters = f"...{space}->...{space}"
    rule(f"aten.{op}", letters, linear="0")
    rule(f"aten.{op}_backward", letters, linear="0", sizes="input_size")

for num_dims in (2, 3):
    space = "_" * num_dims
    image, grid = f"bc{space}", f"b{space}_"
    rule(f"aten.grid_sampler_{num_dims}d", f"{image},{grid}->{image}", linear="0")
    rule(
        f"aten.grid_sampler_{num_dims}d_backward",
        f"{image},{image},{grid}->{image},{grid}",
        linear="0",
    )
rule("aten.pixel_shuffle aten.pixel_unshuffle", "...___->...___", linear="0", moves=True)
rule("aten.im2col", "b___->b__", linear="0")
rule("aten.col2im", "b__->b___", linear="0")
