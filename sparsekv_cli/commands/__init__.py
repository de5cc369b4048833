"""One thin file per command: parse, call, render."""
