"""The incident of 2026 in miniature: an engine unsafe on purpose, its defences put back singly."""
