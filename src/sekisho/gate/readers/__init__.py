"""One reader an engine: from its answers to a `Reading`. Each is small and knows nothing of HTTP."""
