"""torchtitan's trainer as a job of Ray Train, with its experts on raymoe. docs/training_job.md walks through it.

`train.py` drives the job, `worker.py` is what each worker runs, `on_ray.py` joins torchtitan to Ray Train,
`config_registry.py` has the model, `text.py` its text, `record.py` what a run leaves. `cpu.py` is for machines without
GPUs.
"""
