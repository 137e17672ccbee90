"""The gate: no deployment whose advertised window its KV pools cannot hold.

Reads the physical KV capacity of running engines over HTTP, compares it with every window that is
advertised for them, and says so with an exit code. Knows nothing of the inside of an engine.

    claims ──┐
             ├─▶ judge (pure) ─▶ Result ─▶ output, exit code
    readers ─┘   rules, versions, waivers

Exceptions:

    GateError        the gate cannot run: exit code 2, one line
    └─ ClaimError    a catalogue or configuration cannot be used
    ReadError        one engine cannot be read; becomes an `Unread`, never a pass
"""
