"""Graphs that each canonical pass rewrites, for its test."""

from __future__ import annotations

from collections.abc import Callable

from partc.graph import Graph
from partc.passes.canonical.cancel_transposes import cancel_transposes
from partc.passes.canonical.cast_first import cast_first
from partc.passes.canonical.drop_noops import drop_noops
from partc.passes.canonical.fold_linear import fold_linear
from partc.passes.canonical.fold_masks import fold_masks
from partc.passes.canonical.free_fills import free_fills
from partc.passes.canonical.index_rows import index_rows
from partc.passes.canonical.join_scatters import join_scatters
from partc.passes.canonical.merge_given import merge_given
from partc.passes.canonical.merge_reshapes import merge_reshapes
from partc.passes.canonical.narrow_expands import narrow_expands
from partc.passes.canonical.open_bags import open_bags
from partc.passes.canonical.open_masks import open_masks
from partc.passes.canonical.open_means import open_means
from partc.passes.canonical.open_strides import open_strides
from partc.passes.canonical.pad_slices import pad_slices
from partc.passes.canonical.products_first import products_first
from partc.passes.canonical.squeeze_sums import squeeze_sums
from partc.passes.canonical.start_sums import start_sums
from partc.passes.canonical.sums_first import sums_first

CASES: dict[str, tuple[Callable[[Graph], None], str]] = {
    "drop_noops": (
        drop_noops,
        """\
graph M
input x : f64[4,6]
forward (loss)
  detach = detach(x) : f64[4,6]
  view = view(detach, [4, 6]) : f64[4,6]
  same = permute(view, [0, 1]) : f64[4,6]
  part = slice.Tensor(same, 1, 0, 9223372036854775807) : f64[4,6]
  one = mul.Tensor(part, 1) : f64[4,6]
  cast = _to_copy(one, dtype=f64) : f64[4,6]
  shift = constant_pad_nd(cast, [0, 0, 1, -1], 0.0) : f64[4,6]
  none = constant_pad_nd(shift, [0, 0], 0.0) : f64[4,6]
  flat = view(none, [24]) : f64[24]
  twice = mul.Tensor(flat, 2) : f64[24]
  empty = zeros([0], dtype=f64) : f64[0]
  alone = cat([empty, twice]) : f64[24]
  both = cat([alone, empty, flat]) : f64[48]
outputs
  result y = both
""",
    ),
    "cast_first": (
        cast_first,
        """\
graph M
param w : f32[6,4]
param v : f32[8,4]
input x : bf16[3,4]
forward (loss)
  a = split.Tensor(w, 3) : (f32[3,4], f32[3,4])
  b = a[0] : f32[3,4]
  c = a[1] : f32[3,4]
  d = t(b) : f32[4,3]
  e = _to_copy(d, dtype=bf16) : bf16[4,3]
  f = _to_copy(c, dtype=bf16) : bf16[3,4]
  g = mm(x, e) : bf16[3,3]
  h = mm(g, f) : bf16[3,4]
  part = slice.Tensor(v, 0, 0, 3) : f32[3,4]
  stays = _to_copy(part, dtype=bf16) : bf16[3,4]
  sum = add.Tensor(h, stays) : bf16[3,4]
outputs
  result y = sum
""",
    ),
    "cancel_transposes": (
        cancel_transposes,
        """\
graph M
input x : f64[4,6]
input w : f64[5,6]
forward (loss)
  a = t(w) : f64[6,5]
  b = mm(x, a) : f64[4,5]
  c = t(b) : f64[5,4]
  d = unsqueeze(c, 0) : f64[1,5,4]
  e = permute(d, [0, 2, 1]) : f64[1,4,5]
  f = transpose.int(e, 1, 2) : f64[1,5,4]
  g = permute(f, [1, 2, 0]) : f64[5,4,1]
outputs
  result y = g
""",
    ),
    "fold_linear": (
        fold_linear,
        """\
graph M
param w : f64[5,6]
param b : f64[5]
input x : f64[2,3,6]
input d : f64[2,3,5]
forward (loss)
  rows = reshape(x, [6, 6]) : f64[6,6]
  turned = t(w) : f64[6,5]
  product = addmm(b, rows, turned) : f64[6,5]
  y = reshape(product, [2, 3, 5]) : f64[2,3,5]
backward (loss)
  flat = reshape(d, [6, 5]) : f64[6,5]
  d_x = mm(flat, w) : f64[6,6]
  d_x3 = reshape(d_x, [2, 3, 6]) : f64[2,3,6]
  across = t(flat) : f64[5,6]
  d_w = mm(across, rows) : f64[5,6]
  d_b = sum.dim_IntList(flat, [0]) : f64[5]
outputs
  grad w = d_w
  grad b = d_b
  result y = y
  result d_x = d_x3
""",
    ),
    "fold_linear of the other layout": (
        fold_linear,
        """\
graph M
param w : f64[6,5]
param b : f64[5]
input x : f64[2,3,6]
input q : f64[2,3,4,6]
input k : f64[2,3,6,5]
forward (loss)
  rows = reshape(x, [6, 6]) : f64[6,6]
  product = addmm(b, rows, w, beta=2) : f64[6,5]
  plain = addmm(b, rows, w) : f64[6,5]
  y = reshape(plain, [2, 3, 5]) : f64[2,3,5]
  queries = reshape(q, [6, 4, 6]) : f64[6,4,6]
  keys = reshape(k, [6, 6, 5]) : f64[6,6,5]
  scores = bmm(queries, keys) : f64[6,4,5]
  heads = reshape(scores, [2, 3, 4, 5]) : f64[2,3,4,5]
outputs
  result y = y
  result scaled = product
  result heads = heads
""",
    ),
    "merge_reshapes": (
        merge_reshapes,
        """\
graph M
input x : f64[4,6]
forward (loss)
  a = reshape(x, [24]) : f64[24]
  b = reshape(a, [2, 12]) : f64[2,12]
  c = reshape(b, [4, 6]) : f64[4,6]
  d = mul.Tensor(c, 2) : f64[4,6]
outputs
  result y = d
  result z = b
""",
    ),
    "squeeze_sums": (
        squeeze_sums,
        """\
graph M
input x : f64[4,6]
forward (loss)
  a = sum.dim_IntList(x, [0], True) : f64[1,6]
  b = reshape(a, [6]) : f64[6]
  c = sum.dim_IntList(x, [-1], True) : f64[4,1]
  d = squeeze.dim(c, 1) : f64[4]
outputs
  result y = b
  result z = d
""",
    ),
    "open_means": (
        open_means,
        """\
graph M
input x : f64[4,6]
input y : f64[4,6]
input t : i64[4]
input d : f64[]
forward (loss)
  a = mean(x) : f64[]
  b = mean.dim(x, [-1], True) : f64[4,1]
  c = mse_loss(x, y) : f64[]
  e = nll_loss_forward(x, t, None, 1, 2) : (f64[], f64[])
  f = e[0] : f64[]
  g = e[1] : f64[]
backward (loss)
  h = nll_loss_backward(d, x, t, None, 1, 2, g) : f64[4,6]
  i = mse_loss_backward(d, x, y, 1) : f64[4,6]
outputs
  result a = a
  result b = b
  result c = c
  result f = f
  result h = h
  result i = i
""",
    ),
    "open_means in half precision": (
        open_means,
        """\
graph M
input x : bf16[4,6]
forward (loss)
  a = mean.dim(x, [0]) : bf16[6]
outputs
  result a = a
""",
    ),
    "pad_slices": (
        pad_slices,
        """\
graph M
input x : f64[4,2]
input y : f64[4,3]
backward (loss)
  a = slice_backward(x, [4, 5], -1, 3, 9223372036854775807, 1) : f64[4,5]
  b = slice_backward(y, [4, 5], 1, 0, 3, 1) : f64[4,5]
  c = add.Tensor(a, b) : f64[4,5]
  d = slice_backward(x, [4, 7], 1, -5, -3, 1) : f64[4,7]
outputs
  result c = c
  result d = d
""",
    ),
    "index_rows": (
        index_rows,
        """\
graph M
input x : f64[4,5,3]
input i : i64[4]
input d : f64[4,3]
input k : i64[4,2]
forward (loss)
  n = arange.start(0, 4) : i64[4]
  a = index.Tensor(x, [n, i]) : f64[4,3]
  m = unsqueeze(n, 1) : i64[4,1]
  b = index.Tensor(x, [m, k]) : f64[4,2,3]
  s = arange.start(1, 4) : i64[3]
  t = arange(3) : i64[3]
  c = index.Tensor(x, [s, t]) : f64[3,3]
backward (loss)
  z = zeros([4, 5, 3], dtype=f64) : f64[4,5,3]
  e = index_put(z, [n, i], d, True) : f64[4,5,3]
  f = index_put(x, [n, i], d) : f64[4,5,3]
outputs
  result a = a
  result b = b
  result c = c
  result e = e
  result f = f
""",
    ),
    "index_rows of all elements": (
        index_rows,
        """\
graph M
input x : f64[4,5,3]
input y : f64[4,5]
forward (loss)
  n = arange(4) : i64[4]
  m = arange.start(0, 5) : i64[5]
  c = unsqueeze(n, 1) : i64[4,1]
  a = index.Tensor(x, [c, m]) : f64[4,5,3]
  r = reshape(n, [4,1,1,1]) : i64[4,1,1,1]
  s = reshape(m, [1,1,1,5]) : i64[1,1,1,5]
  b = index.Tensor(y, [r, s]) : f64[4,1,1,5]
  u = unsqueeze(m, 1) : i64[5,1]
  d = index.Tensor(x, [n, u]) : f64[5,4,3]
  t = arange(3) : i64[3]
  v = unsqueeze(t, 1) : i64[3,1]
  e = index.Tensor(y, [v, m]) : f64[3,5]
outputs
  result a = a
  result b = b
  result d = d
  result e = e
""",
    ),
    "join_scatters": (
        join_scatters,
        """\
graph M
input x : f64[4,2]
input y : f64[4,3]
forward (loss)
  a = zeros([4, 5], dtype=f64) : f64[4,5]
  b = slice_scatter(a, x, 1, 3, 9223372036854775807) : f64[4,5]
  c = slice_scatter(b, y, 1, 0, 3) : f64[4,5]
  d = slice_scatter(c, x, 1, 1, 3) : f64[4,5]
outputs
  result c = c
  result d = d
""",
    ),
    "free_fills": (
        free_fills,
        """\
graph M
param w : f64[4,6]
input x : i64[4,6]
forward (loss)
  one = new_ones(x, [], dtype=bool) : bool[]
  seven = new_full(x, [4, 6], 7) : i64[4,6]
  zeros = new_zeros(w, [4, 6]) : f64[4,6]
  sum = add.Tensor(seven, zeros) : f64[4,6]
  all = mul.Tensor(sum, one) : f64[4,6]
outputs
  result all = all
""",
    ),
    "sums_first": (
        sums_first,
        """\
graph M
param w : f64[4,4]
input mask : bool[4,4]
forward model.layers.0.attn
  seen_0 = mul.Tensor(w, w) : f64[4,4]
forward model.layers.1.attn
  seen_1 = mul.Tensor(seen_0, w) : f64[4,4]
backward model
  zero = full([], 0.0, dtype=f64) : f64[]
backward model.layers.1.attn
  d_seen_1 = mul.Tensor(seen_1, 2.0) : f64[4,4]
  d_bias_1 = where.self(mask, d_seen_1, zero) : f64[4,4]
backward model.layers.0.attn
  d_seen_0 = mul.Tensor(d_seen_1, seen_0) : f64[4,4]
  d_bias_0 = where.self(mask, d_seen_0, zero) : f64[4,4]
  d_bias = add.Tensor(d_bias_1, d_bias_0) : f64[4,4]
backward model
  all = add.Tensor(d_bias, w) : f64[4,4]
outputs
  result all = all
""",
    ),
    "merge_given": (
        merge_given,
        """\
graph M
param w : f64[4,4]
forward model.layers.0.attn
  places_0 = arange(4) : i64[4]
  rows_0 = unsqueeze(places_0, 1) : i64[4,1]
  seen_0 = le.Tensor(places_0, rows_0) : bool[4,4]
  zero_0 = scalar_tensor(0.0, dtype=f64) : f64[]
  hidden_0 = scalar_tensor(-9.0, dtype=f64) : f64[]
  mask_0 = where.self(seen_0, zero_0, hidden_0) : f64[4,4]
  scores_0 = add.Tensor(w, mask_0) : f64[4,4]
  rest_0 = zeros([4, 4], dtype=f64) : f64[4,4]
  filled_0 = slice_scatter(rest_0, scores_0) : f64[4,4]
forward model.layers.1.attn
  places_1 = arange(4) : i64[4]
  rows_1 = unsqueeze(places_1, 1) : i64[4,1]
  seen_1 = le.Tensor(places_1, rows_1) : bool[4,4]
  zero_1 = scalar_tensor(0.0, dtype=f64) : f64[]
  hidden_1 = scalar_tensor(-9.0, dtype=f64) : f64[]
  mask_1 = where.self(seen_1, zero_1, hidden_1) : f64[4,4]
  scores_1 = add.Tensor(w, mask_1) : f64[4,4]
  rest_1 = zeros([4, 4], dtype=f64) : f64[4,4]
  filled_1 = slice_scatter(rest_1, scores_1) : f64[4,4]
backward model.layers.1.attn
  zero = scalar_tensor(0.0, dtype=f64) : f64[]
  d_scores_1 = where.self(seen_1, filled_1, zero) : f64[4,4]
backward model.layers.0.attn
  zero_2 = scalar_tensor(0.0, dtype=f64) : f64[]
  d_scores_0 = where.self(seen_0, filled_0, zero_2) : f64[4,4]
outputs
  result a = d_scores_0
  result b = d_scores_1
""",
    ),
    "narrow_expands": (
        narrow_expands,
        """\
graph M
input x : f64[4,1]
input y : f64[4,6]
backward (loss)
  a = expand(x, [4, 6]) : f64[4,6]
  b = div.Scalar(a, 6) : f64[4,6]
  c = mul.Tensor(b, y) : f64[4,6]
  d = add.Tensor(b, a) : f64[4,6]
outputs
  result c = c
  result d = d
""",
    ),
    "fold_masks": (
        fold_masks,
        """\
graph M
input q : f64[2,3,4,8]
input m : bool[1,1,4,4]
forward (loss)
  rows = arange(4) : i64[4]
  below = unsqueeze(rows, 1) : i64[4,1]
  triangle = le.Tensor(rows, below) : bool[4,4]
  yes = scalar_tensor(0.0, dtype=f64) : f64[]
  no = scalar_tensor(-inf, dtype=f64) : f64[]
  mask = where.self(triangle, yes, no) : f64[4,4]
  given = where.self(m, yes, no) : f64[1,1,4,4]
  a = _scaled_dot_product_flash_attention_for_cpu(q, q, q, attn_mask=mask) : ()
  b = a[0] : f64[2,3,4,8]
  c = _scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, False, attn_mask=given) : ()
  d = c[0] : f64[2,3,4,8]
outputs
  result b = b
  result d = d
""",
    ),
    "open_bags": (
        open_bags,
        """\
graph M
param w : f64[2,3]
input i : i64[8]
input d : f64[4,3]
input k : i64[3]
forward (loss)
  p = arange.start_step(0, 8, 2) : i64[4]
  a = _embedding_bag(w, i, p, False, 1) : (f64[4,3], i64[8], i64[4], i64[4])
  b = a[0] : f64[4,3]
  e = a[1] : i64[8]
  f = a[2] : i64[4]
  g = a[3] : i64[4]
  q = arange(3) : i64[3]
  m = _embedding_bag(w, k, q, False, 0) : (f64[3,3], i64[3], i64[3], i64[3])
  n = m[0] : f64[3,3]
  r = arange.start_step(0, 8, 4) : i64[2]
  s = _embedding_bag(w, i, r, False, 2) : (f64[2,3], i64[8], i64[2], i64[2])
  t = s[0] : f64[2,3]
backward (loss)
  h = _embedding_bag_dense_backward(d, i, e, f, g, 2, False, 1, None) : f64[2,3]
outputs
  result b = b
  result n = n
  result t = t
  result h = h
""",
    ),
    "open_masks": (
        open_masks,
        """\
graph M
input x : f64[4,6]
input m : bool[4,6]
input rows : bool[4]
input i : i64[3]
forward (loss)
  one = scalar_tensor(1.5, dtype=f64) : f64[]
  a = index_put(x, [m], one) : f64[4,6]
  b = index_put(a, [rows], one) : f64[4,6]
  c = index_put(b, [m], one, True) : f64[4,6]
  d = index_put(c, [i], one) : f64[4,6]
outputs
  result d = d
""",
    ),
    "open_strides": (
        open_strides,
        """\
graph M
input x : f64[4,6]
forward (loss)
  a = as_strided(x, [24, 1], [1, 5]) : f64[24,1]
  b = as_strided(x, [6, 4], [1, 6]) : f64[6,4]
outputs
  result a = a
  result b = b
""",
    ),
    "products_first": (
        products_first,
        """\
graph M
param q : f64[5,6]
param k : f64[5,6]
input d_q : f64[4,5]
input d_k : f64[4,5]
input past : f64[4,6]
backward h.0
  went = exp(past) : f64[4,6]
  by_k = mm(d_k, k) : f64[4,6]
  sum_1 = add.Tensor(went, by_k) : f64[4,6]
  by_q = mm(d_q, q) : f64[4,6]
  sum_2 = add.Tensor(sum_1, by_q) : f64[4,6]
outputs
  grad q = sum_2
""",
    ),
    "pad_slices-of-all-places": (
        pad_slices,
        """\
graph M
input d : f64[4,6]
backward
  b = exp(d) : f64[4,6]
  last = select_backward(d, [4,3,6], 1, 2) : f64[4,3,6]
  first = select_backward(b, [4,3,6], 1, 0) : f64[4,3,6]
  two = add.Tensor(last, first) : f64[4,3,6]
  middle = select_backward(d, [4,3,6], -2, 1) : f64[4,3,6]
  three = add.Tensor(two, middle) : f64[4,3,6]
outputs
  grad d = three
""",
    ),
    "merge_reshapes-around-a-transpose": (
        merge_reshapes,
        """\
graph M
input x : f64[4,3,6]
forward (loss)
  one = unsqueeze(x, 0) : f64[1,4,3,6]
  moved = transpose.int(one, 0, -2) : f64[3,4,1,6]
  small = squeeze.dim(moved, -2) : f64[3,4,6]
  flat = reshape(small, [12,6]) : f64[12,6]
  parts = reshape(flat, [3,4,1,2,3]) : f64[3,4,1,2,3]
  turned = permute(parts, [2,0,4,3,1]) : f64[1,3,3,2,4]
  matrix = reshape(turned, [9,8]) : f64[9,8]
outputs
  result y = matrix
""",
    ),
    "start_sums": (
        start_sums,
        """\
graph M
param bias : f64[4,6]
input x : f64[4,6]
backward h.2
  d_2 = mul.Tensor(x, bias) : f64[4,6]
  bias_2 = exp(d_2) : f64[4,6]
backward h.1
  d_1 = mul.Tensor(d_2, bias) : f64[4,6]
  bias_1 = exp(d_1) : f64[4,6]
  sum_1 = add.Tensor(bias_2, bias_1) : f64[4,6]
backward h.0
  d_0 = mul.Tensor(d_1, bias) : f64[4,6]
  bias_0 = exp(d_0) : f64[4,6]
  sum_0 = add.Tensor(sum_1, bias_0) : f64[4,6]
outputs
  grad bias = sum_0
""",
    ),
}
