"""A gang: ranks that live and die together, one Ray actor each. The only folder that imports ray.

Read first: `supervisor.py` (every decision, pure), `driver.py` (what acts on them), `rank.py` (the actor).
"""
