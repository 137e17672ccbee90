"""Ratios, measured interleaved in one run: ``make bench``."""
