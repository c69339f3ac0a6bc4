"""The search for a plan: ``shardings`` and ``plans`` pose what ``solver`` minimises."""
