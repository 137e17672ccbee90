"""``pytest --pyargs sekisho.guard.conformance``: does a KV connector keep a guarded vLLM's word?

For authors of connectors; it runs in vLLM's environment, without a model and without a GPU. The
options ``--inner NAME``, ``--inner-module PATH`` and ``--inner-config JSON`` name another connector
than Mooncake over TCP.
"""
