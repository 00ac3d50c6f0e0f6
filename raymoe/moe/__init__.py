"""The Mixture-of-Experts layer around an exchange: router, experts and their weights."""
