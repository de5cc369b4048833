"""Server-sent events out of a stream of bytes, as the HTML standard parses them (section 9.2.6)."""

from __future__ import annotations


class EventParser:
    """Feed it bytes as they come; it returns the data of each event that ended in them."""

    def __init__(self) -> None:
        self._line = b""
        self._data: list[bytes] = []
        self._after_return = False
        self.comments = 0
        """Comment lines so far: keep-alives."""

    def feed(self, chunk: bytes) -> list[str]:
        """Data of the finished events; an event without data is none. Bytes that are not UTF-8 become U+FFFD."""
        if self._after_return and chunk.startswith(b"\n"):
            chunk = chunk[1:]
            self._after_return = False
        if not chunk:
            return []
        self._after_return = chunk.endswith(b"\r")
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = (self._line + chunk).split(b"\n")
        self._line = lines.pop()
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line:
                if self._data:
                    events.append(b"\n".join(self._data).decode("utf-8", "replace"))
                    self._data.clear()
            elif line.startswith(b":"):
                self.comments += 1
        return events
