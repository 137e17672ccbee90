"""The incident of 2026 in miniature, with a real model. Unsafe on purpose; serves no tenant."""
