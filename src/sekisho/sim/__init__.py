"""The simulated cluster: the real node code under every fault of the catalogue, seeded."""
