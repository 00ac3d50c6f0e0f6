"""The Mixture-of-Experts layer around an exchange: router, experts, and the weights of experts."""
