"""The search for a plan: ``plans`` ranks whole plans, ``shardings`` searches shardings over ``tp``
as a problem of cost tables, which ``solver`` minimises.
"""
