"""Pages, leases, handoff: sans-IO, no clock, no randomness, no logging."""
