"""Owned blocks inside an unmodified vLLM: a connector around any KV connector, and its checks."""
