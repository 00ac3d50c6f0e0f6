"""Workload train: a soak of a cluster, which trains a small model and goes on from its checkpoints. It is no trainer.

Read first: `run_train.py`, then `model.py` (the model and the unsharded one) and `checkpoints.py`.
"""
