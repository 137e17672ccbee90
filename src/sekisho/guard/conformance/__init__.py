"""``pytest --pyargs sekisho.guard.conformance``: does a KV connector keep a guarded vLLM's word?

For authors of connectors; it runs in vLLM's environment, without a model and without a GPU. With
``-p sekisho.guard.conformance.options`` before it, ``--inner NAME``, ``--inner-module PATH`` and
``--inner-config JSON`` name another connector than Mooncake over TCP.
"""
