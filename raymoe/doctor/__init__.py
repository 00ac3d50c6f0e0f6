"""What this machine can do and why not: each file is a group of checks, its probe apart from its judgement.

A probe runs in a child process and tells plain values; a judgement turns them into a line and touches nothing.
"""
