"""The prompts of the tests with vLLM: for the program that generates, and for the test that judges."""

PROMPTS = [[5, 17, 99, 4], [8, 9, 10, 11, 12, 77], [3, 1, 2], [60, 61, 62, 63, 64]]
LENGTHS = [16, 12, 8, 4]
"""The tokens that each prompt gets: ranks with short ones are idle while the others go on."""
RECORDED = 3
"""The prompt whose routes are compared: the only one of rank 1 in the first call."""
SPREADS = [([0, 1, 2], [3]), ([0, 1, 2, 3], []), ([], [1, 3])]
"""The prompts of two ranks in three calls of `generate`."""
