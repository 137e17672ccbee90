"""The incident of 2026 in miniature: an engine unsafe on purpose, and each defence put back alone."""
