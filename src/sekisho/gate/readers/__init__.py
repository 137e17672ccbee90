"""One reader an engine: from its answers to a `Reading`. Small, and without HTTP."""
