"""Other engines behind our gateway: a `Backend` over running prefill and decode servers.

What every engine shares is in `fleet`, `replica`, `answer`, `events`, `scope` and `judging`; what
is SGLang's alone is in the modules that begin with ``sglang``.
"""
