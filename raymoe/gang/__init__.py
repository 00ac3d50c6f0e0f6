"""A gang: ranks that live and die together, one Ray actor each. The only folder that imports ray.

Read first: `supervisor.py` (every decision, as pure functions), `driver.py` (carries them out), `rank.py` (the actor).
"""
