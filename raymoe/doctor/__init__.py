"""Report what this machine can do, and why not. Each file is a group of checks: a probe and its `judge_` functions.

A probe runs in a child process and returns plain values. A `judge_` function turns them into a line, and does no more.
"""
