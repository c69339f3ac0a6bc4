"""Training loops over partc's programs: of Accelerate, the transformers Trainer, and Lightning.

In: a model, and a script for one of these libraries. Out: the same script over a mesh, by a plan.
Start: ``prepared.py``, the model that both train; ``accelerate.py`` and ``trainer.py`` are what
users import, as is ``lightning.py``. Never: an import of these libraries anywhere else in partc, or
a rule for one model.
"""
