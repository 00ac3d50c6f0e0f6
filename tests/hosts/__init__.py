"""Tests of raymoe inside the frameworks of others, with the real packages: each has an environment of its own."""
