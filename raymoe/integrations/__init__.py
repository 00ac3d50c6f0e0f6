"""Adapters that let other frameworks run on raymoe, one file each. None is imported unless a program asks for it."""
