"""Pipeline schedules: which stage computes what, in which order, on every pipeline rank."""
