"""A local graph of one layer, as text."""

# a column and a row cut weight; collectives stand where their results are first needed
LOCAL = """\
local graph MLP  mesh dp=2 tp=2
param layers.0.up.weight : f32[32@tp,16]
param layers.0.down.weight : f32[16,32@tp]
input x : f32[8@dp,16]
input d_out : f32[8@dp,16]
forward layers.0.up
  up = linear(x, layers.0.up.weight)           : f32[8@dp,32@tp]
forward layers.0
  act = silu(up)                               : f32[8@dp,32@tp]
forward layers.0.down
  down = linear(act, layers.0.down.weight)     : f32[8@dp,16]{U:tp}
forward layers.0
  other = mul.Tensor(x, 2.0)                   : f32[8@dp,16]
  reduced = all_reduce(down, axis='tp', num=2) : f32[8@dp,16]
  out = add.Tensor(other, reduced)             : f32[8@dp,16]
forward (loss)
  total = sum(out)                             : f32[]{U:dp}
  loss = all_reduce(total, axis='dp', num=2)   : f32[]
backward layers.0.down
  d_act = matmul(d_out, layers.0.down.weight)  : f32[8@dp,32@tp]
  d_down = weight_grad(d_out, act)             : f32[16,32@tp]{U:dp}
backward layers.0
  d_up = silu_backward(d_act, up)              : f32[8@dp,32@tp]
backward layers.0.up
  d_up_w = weight_grad(d_up, x)                : f32[32@tp,16]{U:dp}
  d_x = matmul(d_up, layers.0.up.weight)       : f32[8@dp,16]{U:tp}
  d_x_r = all_reduce(d_x, axis='tp', num=2)    : f32[8@dp,16]
backward layers.0
  d_all = add.Tensor(d_x_r, d_out)             : f32[8@dp,16]
backward (loss)
  last = sum(d_all)                            : f32[]{U:dp}
  last_r = all_reduce(last, axis='dp', num=2)  : f32[]
backward layers.0.down
  d_down_r = all_reduce(d_down, axis='dp', num=2) : f32[16,32@tp]
backward layers.0.up
  d_up_r = all_reduce(d_up_w, axis='dp', num=2) : f32[32@tp,16]
outputs
  loss = loss
  grad layers.0.up.weight = d_up_r
  grad layers.0.down.weight = d_down_r
  result last = last_r
"""
