"""A network of limited bandwidth on one machine: its hosts, their switch, commands that run on it."""
