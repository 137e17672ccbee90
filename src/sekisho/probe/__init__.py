"""Can one account see what another sent? Asked from outside, over HTTP, with controls.

Knows nothing of an engine's inside. A clean run bounds a rate of leaks; it never says "secure".
"""
