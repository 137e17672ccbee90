"""Other engines behind our gateway: a `Backend` over running prefill and decode servers.

What is one engine's alone is in the modules that begin with its name, and in `local` and
`local_server` a vLLM pair that the gateway starts; every engine shares the rest.
"""
