"""Servers beside islands that come and go: who computes joins and leaves, and a replica takes over.

In: a model, a store, the bound of a plan's ``[servers]``. Out: on the server ``Server``, whose loop
steps an optimizer; on each island a worker, which pulls parameters and pushes gradients. Start:
``server.py`` and ``worker.py``. Never: the default process group, which one dead peer breaks.
"""
