"""Recurrent layers of a segment: each span begins with its parent's state."""
