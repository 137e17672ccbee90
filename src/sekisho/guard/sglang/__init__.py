"""The guard inside SGLang prefill and decode servers; `plugin` is where SGLang loads it."""
