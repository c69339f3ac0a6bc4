"""Training loops of other libraries over partc's programs.

``partc.wrappers.accelerate`` is an ``Accelerator``, ``partc.wrappers.trainer`` a ``Trainer`` of
transformers, which trains with it. Nothing else of partc imports these libraries. Start:
``prepared.py``, the model that both train.
"""
