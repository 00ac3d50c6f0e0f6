"""What other frameworks need to run on raymoe: one file for each. None is imported unless a program asks for it."""
