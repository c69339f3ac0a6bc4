"""A network of limited bandwidth on one machine: hosts, their switch, commands run on them."""
