"""Sekisho: multi-tenant LLM inference in which every KV-cache page has an owner."""

__version__ = "0.1.0"
